"""Options of commands that reuse prefixes, and the store that they stand for."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.errors import KVPolicyError
from kvpolicy.quantities import parse_bytes

if TYPE_CHECKING:
    from kvpolicy.engine.reuse.store import PrefixStore, StoreStats

REUSE = "Reuse"  # the panel in ``--help``

PrefixCache = Annotated[
    str | None,
    typer.Option(
        "--prefix-cache",
        metavar="BYTES",
        help="Memory for beginnings of prompts that are not computed again: 256MiB.",
        rich_help_panel=REUSE,
    ),
]
PrefixBlock = Annotated[
    int,
    typer.Option(
        "--prefix-block",
        min=1,
        help="Tokens of the blocks by which prompts share a beginning.",
        rich_help_panel=REUSE,
    ),
]
PrefixEviction = Annotated[
    str,
    typer.Option(
        "--prefix-eviction",
        metavar="NAME",
        help="What leaves when it is full, one of `kvpolicy list --blocks`.",
        rich_help_panel=REUSE,
    ),
]
PrefixPromptsOnly = Annotated[
    bool,
    typer.Option(
        "--prefix-prompts-only",
        help="Store prompts only, and not conversations at the ends of their answers.",
        rich_help_panel=REUSE,
    ),
]
PrefixSpill = Annotated[
    Path | None,
    typer.Option(
        "--prefix-spill",
        metavar="FOLDER",
        help="A folder for what leaves memory; it is found again later.",
        rich_help_panel=REUSE,
    ),
]
PrefixSpillBytes = Annotated[
    str | None,
    typer.Option(
        "--prefix-spill-bytes",
        metavar="BYTES",
        help="The most bytes in that folder. [default: 16 times --prefix-cache]",
        rich_help_panel=REUSE,
    ),
]

DEFAULT_BLOCK, DEFAULT_EVICTION = 64, "lru"


@attrs.frozen
class PrefixOptions:
    """Options of the commands that reuse prefixes."""

    prefix_cache: PrefixCache = None
    prefix_block: PrefixBlock = DEFAULT_BLOCK
    prefix_eviction: PrefixEviction = DEFAULT_EVICTION
    prefix_prompts_only: PrefixPromptsOnly = False
    prefix_spill: PrefixSpill = None
    prefix_spill_bytes: PrefixSpillBytes = None

    def arguments(self) -> dict[str, Any] | None:
        """The arguments of `PrefixStore` that they describe; ``None`` if there is no store.

        Raises:
            KVPolicyError: A value is wrong, or an option needs another one.
        """
        spill, spill_bytes = self.prefix_spill, self.prefix_spill_bytes
        given = {
            "--prefix-block": self.prefix_block != DEFAULT_BLOCK,
            "--prefix-eviction": self.prefix_eviction != DEFAULT_EVICTION,
            "--prefix-prompts-only": self.prefix_prompts_only,
            "--prefix-spill": spill is not None,
            "--prefix-spill-bytes": spill_bytes is not None,
        }
        if self.prefix_cache is None:
            idle = next((name for name, is_given in given.items() if is_given), None)
            if idle is not None:
                msg = f"{idle} was given without --prefix-cache; add --prefix-cache 256MiB."
                raise KVPolicyError(msg)
            return None
        if spill_bytes is not None and spill is None:
            msg = (
                "--prefix-spill-bytes was given without --prefix-spill; add --prefix-spill FOLDER."
            )
            raise KVPolicyError(msg)
        arguments: dict[str, Any] = {
            "capacity": parse_bytes("--prefix-cache", self.prefix_cache),
            "block_tokens": self.prefix_block,
            "eviction": self.prefix_eviction,
            "conversations": not self.prefix_prompts_only,
        }
        if spill is not None:
            arguments["spill"] = spill
        if spill_bytes is not None:
            arguments["spill_bytes"] = parse_bytes("--prefix-spill-bytes", spill_bytes)
        return arguments


def prefix_store(arguments: Mapping[str, Any] | None) -> "PrefixStore | None":
    """The store with some arguments, if there is one.

    Args:
        arguments: Those of `PrefixOptions.arguments`.

    Raises:
        KVPolicyError: As for `PrefixStore`.
    """
    from kvpolicy.engine.reuse.store import PrefixStore

    return None if arguments is None else PrefixStore(**arguments)


def format_reuse(reused_tokens: int, prompt_tokens: int, stores: "Sequence[StoreStats]") -> str:
    """One sentence about what prefix stores have saved.

    Args:
        reused_tokens: Prompt tokens that were not computed.
        prompt_tokens: All prompt tokens.
        stores: What each store holds.
    """
    from kvpolicy.quantities import format_bytes, format_count

    def total(count: Callable[["StoreStats"], int]) -> int:
        return sum(map(count, stores))

    share = reused_tokens / prompt_tokens if prompt_tokens else 0.0
    found = total(lambda one: one.hits)
    asked = found + total(lambda one: one.misses)
    several = f"{len(stores)} prefix stores hold" if len(stores) > 1 else "the prefix store holds"
    blocks = format_count(total(lambda one: one.num_blocks), "block")
    memory = format_bytes(total(lambda one: one.num_bytes))
    spilled, files = total(lambda one: one.spilled_blocks), total(lambda one: one.spilled_bytes)
    in_files = f", and {spilled:,} in files of {format_bytes(files)}"
    problems = dict.fromkeys(filter(None, map(_problem, stores)))
    return (
        f"reused {reused_tokens:,} of {prompt_tokens:,} prompt tokens ({share:.1%}); "
        f"{several} {blocks} in {memory}"
        f"{in_files if any(one.spill_capacity for one in stores) else ''}; "
        f"{found / asked if asked else 0.0:.1%} of the blocks asked for were there"
        f"{''.join(f'; {one}' for one in problems)}."
    )


def _problem(stats: "StoreStats") -> str | None:
    if stats.problem is not None:
        return f"nothing is stored any more: {stats.problem}"
    if stats.spill_problem is not None:
        return f"no more blocks are written to {stats.spill_problem}"
    return None
