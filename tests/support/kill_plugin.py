"""A policy that kills its process at a given compaction.

Every process counts its compactions. At the number in the file, the plugin deletes the file and
sends the signal to the process (or to its parent, which loaded the plugin). Without the file
nothing happens, so the same command can run again to completion.
"""

from pathlib import Path

_PLUGIN = '''
import os
from pathlib import Path

import attrs
from torch import Tensor

from kvpolicy import hookimpl

FUSE = Path(__file__).with_name("fuse")  # relative: equal code in every folder
PARENT = os.getpid()
COUNTED = []


@attrs.define(eq=False)
class Fused:
    """Keep the newest rows; send the signal at the given compaction."""

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor) -> Tensor:
        if FUSE.exists():
            COUNTED.append(1)
            after, signal, victim = FUSE.read_text().split()
            if len(COUNTED) >= int(after):
                FUSE.unlink()
                os.kill(os.getpid() if victim == "self" else PARENT, int(signal))
        return positions.float()
'''


class Fuse:
    """The plugin file and the file that activates it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fuse"
        self.plugin = folder / "fused.py"
        self.plugin.write_text(_PLUGIN, encoding="utf-8")

    def light(self, compactions: int, signal: int, victim: str = "self") -> None:
        """Send the signal to ``"self"`` or the ``"parent"`` at this compaction."""
        self._file.write_text(f"{compactions} {int(signal)} {victim}", encoding="utf-8")

    @property
    def is_burning(self) -> bool:
        return self._file.exists()
