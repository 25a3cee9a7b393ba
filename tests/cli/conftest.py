"""Fixtures that run commands."""

from commands import kvpolicy, model_folder
from installed_package import install

__all__ = ["install", "kvpolicy", "model_folder"]
