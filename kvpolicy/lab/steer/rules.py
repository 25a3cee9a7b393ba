"""Earlier name of `kvpolicy.lab.steer.thoughts`."""

from kvpolicy.lab.steer.thoughts import (
    EXECUTION,
    GROUP,
    PUBLISHED,
    Rule,
    Scope,
    ThoughtRules,
    default_rules,
    load_rules,
)

__all__ = [
    "EXECUTION",
    "GROUP",
    "PUBLISHED",
    "Rule",
    "Scope",
    "ThoughtRules",
    "default_rules",
    "load_rules",
]
