"""Recency: old rows fade, rows with long values less."""

from kvpolicy_recency.policy import Recency

__all__ = ["Recency"]
