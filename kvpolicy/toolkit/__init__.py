"""Computations that several policies share. Public: policies import from here."""
