"""Fixtures for tests that run commands."""

from commands import kvpolicy, model_folder

__all__ = ["kvpolicy", "model_folder"]
