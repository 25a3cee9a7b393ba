"""Startup time: commands that need no model do not import heavy packages."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "pandas", "scipy", "matplotlib", "safetensors")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["list"], ["list", "--json"]])
def test_light_command_imports_nothing_heavy(args: list[str]) -> None:
    code = f"""
import sys
from kvpolicy.cli.app import run
status = run({args!r})
heavy = [name for name in {HEAVY!r} if name in sys.modules]
packages = ("kvpolicy_baselines", "kvpolicy_plugins", "kvpolicy_reasoner.", "kvpolicy.lab")
policies = [name for name in sys.modules if name.startswith(packages)]
sys.exit(status or repr(heavy + policies) if heavy or policies else status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
