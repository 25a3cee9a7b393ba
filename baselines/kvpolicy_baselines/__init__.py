"""Published eviction policies, one file each."""

DEFAULT_POLICY = "full"
