"""Imported first: attention on the CPU in torch, as Numba compiles for longer than texts take."""

import sys

sys.modules["numba"] = None
