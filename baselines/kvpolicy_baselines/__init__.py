"""Published eviction policies, one file each."""
