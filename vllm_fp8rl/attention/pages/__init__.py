"""Pages of a KV cache of 8 bits: their layout, and what writes them."""
