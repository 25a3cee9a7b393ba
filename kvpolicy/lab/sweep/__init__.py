"""Sweeps: sweep files, cells, running them, recording."""
