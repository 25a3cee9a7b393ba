"""Comparisons for SkipKV's claims."""
