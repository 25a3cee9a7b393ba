"""The bundled reasoners by what they need: the whole ones run wherever kvpolicy is installed."""

from kvpolicy_reasoner import REASONERS, bundled_path

WHOLE = [name for name in REASONERS if (bundled_path(name) / "config.json").is_file()]
