"""SkipKV: whole sentences leave first, thoughts that do not execute are steered away from."""
