"""Calibrating steering vectors: from a model's traces to a direction for each layer."""
