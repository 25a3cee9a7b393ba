"""Where a steering vector comes from."""

from collections.abc import Mapping

import attrs

SIGN = "execution - non_execution"


@attrs.frozen(kw_only=True)
class Calibration:
    """Where vectors come from.

    Attributes:
        model: What the user called the model.
        fingerprint: Hash of its configuration and weights; empty if not known.
        task: Name of the task.
        split: Split of the task.
        seed: Chose the items.
        num_right: Traces used that were graded right.
        num_wrong: Traces used that were not.
        num_thoughts: Thoughts of each kind.
        rules: Name of the rules that told the kinds apart.
        rules_digest: Hash of these rules.
        sign: Which mean was subtracted from which.
        version: Version of kvpolicy.
    """

    model: str
    fingerprint: str = ""
    task: str = ""
    split: str = ""
    seed: int = 0
    num_right: int = 0
    num_wrong: int = 0
    num_thoughts: Mapping[str, int] = attrs.field(factory=dict)
    rules: str = ""
    rules_digest: str = ""
    sign: str = SIGN
    version: str = ""
