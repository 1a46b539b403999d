"""``fp8rl bench``: what FP8 gains and costs for a model on the user's own machine."""
