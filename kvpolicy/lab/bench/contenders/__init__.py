"""Implementations that are measured: how each is filled, run and timed."""
