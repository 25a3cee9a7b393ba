"""Steering vectors by name: ``vector = "NAME"`` reads NAME.safetensors of this folder."""
