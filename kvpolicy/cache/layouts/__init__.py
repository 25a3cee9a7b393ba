"""Layouts: how a layer holds what it remembers of each slot, one file each."""
