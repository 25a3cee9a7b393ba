"""Fixtures for tests of models."""

from commands import model_folder

__all__ = ["model_folder"]
