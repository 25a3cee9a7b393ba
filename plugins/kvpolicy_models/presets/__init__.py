"""Sweeps on the models that pip brings: `NAME.toml`."""
