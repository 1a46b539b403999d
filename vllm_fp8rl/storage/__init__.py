"""Live FP8 weights of one rank: block grids, the parameters that write to them, experts."""
