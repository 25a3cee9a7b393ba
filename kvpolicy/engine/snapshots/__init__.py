"""Sequences out of their slots, as values that can be kept, copied and saved."""
