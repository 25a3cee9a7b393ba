"""These tests run commands, and programs in sandboxes."""

from commands import _plugins_of_one_test, kvpolicy, model_folder
from sandboxes import any_wall, wall

__all__ = ["_plugins_of_one_test", "any_wall", "kvpolicy", "model_folder", "wall"]
