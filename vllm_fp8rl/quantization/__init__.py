"""The quantization method ``fp8rl``: its config, and a method for each kind of layer."""
