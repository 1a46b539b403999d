"""Queries, keys and values: their amax, and attention over them as the rollout caches them."""
