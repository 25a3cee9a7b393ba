"""Telling one version of a policy's code from another.

Results are kept by the hash of their plan. If a plan said a policy's name and knobs alone, a
policy that was edited would be answered with the samples of the one before.
"""

import hashlib
import sys
from pathlib import Path

# Their code goes by the version of kvpolicy.
OURS = ("kvpolicy", "kvpolicy_baselines", "kvpolicy_plugins", "skipkv_plugin")

_DIGITS = 8


def code_of(policy: type) -> str | None:
    """Hash the file in which a policy is written.

    What that file imports is not looked into.

    Args:
        policy: The policy's class.

    Returns:
        8 hexadecimal digits; ``None`` for kvpolicy's own policies, and where there is no file.
    """
    if policy.__module__.partition(".")[0] in OURS:
        return None
    file = getattr(sys.modules.get(policy.__module__), "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:_DIGITS]
