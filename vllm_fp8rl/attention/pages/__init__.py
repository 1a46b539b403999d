"""Pages of a KV cache of 8 bits: their layout, what writes them, a 16-bit copy of them."""
