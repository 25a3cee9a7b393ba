"""Fixtures that run commands."""

from commands import _plugins_of_one_test, kvpolicy, model_folder
from installed_package import install

__all__ = ["_plugins_of_one_test", "install", "kvpolicy", "model_folder"]
