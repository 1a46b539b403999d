"""KV scales of a live model's attention layers: set, read, forgotten and observed."""
