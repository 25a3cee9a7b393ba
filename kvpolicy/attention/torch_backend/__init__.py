"""Attention in torch, for any device: what other backends fall back to."""
