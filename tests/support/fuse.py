"""A policy that ends its process at a chosen compaction: an accident that can be repeated.

Every process counts its own compactions. At the number in the file, the file is gone and the
process (or the one that loaded the plugin, which forked it) gets the signal. Without the file
nothing happens, so that the same command can be given again and goes through.
"""

from pathlib import Path

_PLUGIN = '''
import os
from pathlib import Path

import attrs
from torch import Tensor

from kvpolicy import hookimpl

FUSE = Path(__file__).with_name("fuse")  # so that its code is the same in every folder
PARENT = os.getpid()
COUNTED = []


@attrs.define(eq=False)
class Fused:
    """Keep the newest rows, and burn down."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        if FUSE.exists():
            COUNTED.append(1)
            after, signal, victim = FUSE.read_text().split()
            if len(COUNTED) >= int(after):
                FUSE.unlink()
                os.kill(os.getpid() if victim == "self" else PARENT, int(signal))
        return positions.float()
'''


class Fuse:
    """The plugin file, and the file that says when."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fuse"
        self.plugin = folder / "fused.py"
        self.plugin.write_text(_PLUGIN, encoding="utf-8")

    def light(self, compactions: int, signal: int, victim: str = "self") -> None:
        """At this compaction from now on, ``"self"`` or its ``"parent"`` gets the signal."""
        self._file.write_text(f"{compactions} {int(signal)} {victim}", encoding="utf-8")

    @property
    def is_burning(self) -> bool:
        return self._file.exists()
