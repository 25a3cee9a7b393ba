"""SkipKV: evict redundant sentences first, and steer away from non-execution thoughts."""
