"""One command in several processes: all do the same work, and the first speaks for all.

If all fail for the same reason, the first says it. If only another one fails, that one says
it, and the first says nothing of what it notices of it. torchrun ends those that are left.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta

import typer

from kvpolicy.cli.interrupt import Interrupted
from kvpolicy.errors import KVPolicyError

_FAILED = 2
_FIRST_HAS_FAILED, _ANOTHER_HAS_SPOKEN = "first has failed", "another has spoken"
# Processes that fail for the same reason do so at about the same time.
_PATIENCE = timedelta(seconds=10)


@contextmanager
def together() -> Iterator[None]:
    """Do in a block what all processes do that torchrun has started, this one among them.

    Raises:
        KVPolicyError: It was started alone; or it has failed alone.
        typer.Exit: It has failed, and another tells the user.
    """
    if "RANK" not in os.environ:
        msg = (
            "--tensor-parallel was given to a single process; start several: "
            "torchrun --nproc-per-node N -m kvpolicy run --tensor-parallel ..."
        )
        raise KVPolicyError(msg)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with _muted(rank > 0):
            yield
        _part()
    except typer.Exit:  # all leave alike
        _part()
        raise
    except BaseException as error:
        is_interrupt = isinstance(error, (Interrupted, KeyboardInterrupt))
        if (rank and is_interrupt) or _is_said_by_another(rank):
            raise typer.Exit(_FAILED) from None
        if rank and isinstance(error, KVPolicyError):
            msg = f"process {rank} of {size} (counted from 0): {error}"
            raise KVPolicyError(msg) from error
        raise


@contextmanager
def _muted(muted: bool) -> Iterator[None]:
    with ExitStack() as block:
        if muted:
            nowhere = block.enter_context(open(os.devnull, "w", encoding="utf-8"))
            block.enter_context(redirect_stdout(nowhere))
            block.enter_context(redirect_stderr(nowhere))
        yield


def _is_said_by_another(rank: int) -> bool:
    """Whether another process tells the user why all of them end."""
    import torch.distributed as dist

    try:
        # Of torchrun; if somebody else has started the processes, that of the first.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        notes = dist.PrefixStore(f"kvpolicy/{attempt}", store)  # type: ignore[attr-defined]
        if rank == 0:
            notes.set(_FIRST_HAS_FAILED, "")
            return bool(notes.check([_ANOTHER_HAS_SPOKEN]))
        try:
            notes.wait([_FIRST_HAS_FAILED], _PATIENCE)
        except dist.DistStoreError:  # none of its business, so far
            notes.set(_ANOTHER_HAS_SPOKEN, "")
            return False
        return True
    except (RuntimeError, KeyError):
        return False  # nobody can be asked: better said twice than not at all


def _part() -> None:
    from torch import distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
