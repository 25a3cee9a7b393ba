"""Startup time: commands that need no model do not import heavy packages."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "pandas", "scipy", "matplotlib", "safetensors")


def test_light_commands_import_nothing_heavy() -> None:
    code = f"""
import sys
from kvpolicy.cli.app import run
packages = ("kvpolicy_baselines", "kvpolicy_plugins", "kvpolicy_reasoner.", "kvpolicy.lab")
for words in (["--help"], ["--version"], ["list"], ["list", "--json"]):
    assert run(words) == 0, words
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    policies = [name for name in sys.modules if name.startswith(packages)]
    assert not heavy + policies, (words, heavy, policies)
    print("::", *words)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("::")
    assert all(words.strip() for words in printed), printed
