"""These tests run commands, and programs in sandboxes."""

from commands import _plugins_of_one_test, kvpolicy, model_folder
from sandboxes import any_sandbox, sandbox

__all__ = ["_plugins_of_one_test", "any_sandbox", "kvpolicy", "model_folder", "sandbox"]
