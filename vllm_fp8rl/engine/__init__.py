"""What one rank knows of its engine, and the names under which vLLM knows this package."""
