"""Fixtures that run commands."""

from commands import kvpolicy

__all__ = ["kvpolicy"]
