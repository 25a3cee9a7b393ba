"""TRIM-KV: learned retention gates rank rows for eviction."""
