"""Helpers of the demo and the tests; nothing here is needed to train."""
