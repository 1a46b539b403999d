"""The demo: the whole FP8 RL loop on one CPU, on arithmetic problems."""
