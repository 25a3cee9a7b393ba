"""Recency: rows with large values stay, and lose score with age."""

from kvpolicy_recency.policy import Recency

__all__ = ["Recency"]
