"""Fixtures that run commands."""

from commands import _plugins_of_one_test, kvpolicy, model_folder

__all__ = ["_plugins_of_one_test", "kvpolicy", "model_folder"]
