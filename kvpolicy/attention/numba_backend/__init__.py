"""Attention in Numba, for CPUs and fp32; it needs the extra ``cpu``."""
