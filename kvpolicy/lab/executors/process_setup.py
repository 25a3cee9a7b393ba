"""What processes on other machines take over from the one that starts them."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import attrs
import torch

import kvpolicy
from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.discovery import load_policy_file, registered_files


@attrs.frozen
class ProcessSetup:
    """How a process is set up like the one that starts it.

    Attributes:
        version: Version of kvpolicy; a process with another one refuses.
        folder: Working directory. Where a machine has this folder, relative paths mean the same
            there.
        plugins: Name and content of each file given with ``--plugin``.
        threads: Threads to compute with.
    """

    version: str
    folder: str
    plugins: tuple[tuple[str, bytes], ...]
    threads: int

    @classmethod
    def of_this_process(cls, *, threads: int) -> "ProcessSetup":
        """Make the set-up that matches this process."""
        return cls(
            version=kvpolicy.__version__,
            folder=os.getcwd(),
            plugins=tuple((path.name, path.read_bytes()) for path in registered_files()),
            threads=threads,
        )

    def apply(self) -> None:
        """Set this process up.

        Raises:
            KVPolicyError: This process has another version of kvpolicy.
        """
        if kvpolicy.__version__ != self.version:
            msg = (
                f"kvpolicy is {kvpolicy.__version__} there and {self.version} here; "
                "install the same version on every machine"
            )
            raise KVPolicyError(msg)
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        for name, content in self.plugins:
            folder = tempfile.mkdtemp(prefix="kvpolicy-plugin-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder) / name
            path.write_bytes(content)
            load_policy_file(path)
        torch.set_num_threads(self.threads)
