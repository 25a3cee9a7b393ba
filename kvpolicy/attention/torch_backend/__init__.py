"""Attention in torch: what other backends fall back to, and are compared with."""
