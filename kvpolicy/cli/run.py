"""Generate and print: text to stdout, figures to stderr.

With ``--json``, one object per line: ``{"kind": "result", ...}`` with the fields of `Result`
for each prompt as it finishes, its ``id`` that of the JSON line, if any, and its ``index`` the
number of the prompt from 0, and a last ``{"kind": "run", "plan_digest", ...}`` with those
of `RunReport`, and with ``"prefix_store"``, the fields of `StoreStats`, if there is a store.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.options import Generation, GenerationOptions, prepare
from kvpolicy.cli.output import info, print_exact, print_json, print_text
from kvpolicy.cli.prefix_options import format_reuse
from kvpolicy.errors import KVPolicyError, RequestError
from kvpolicy.quantities import format_bytes, format_seconds
from kvpolicy.text import visible

if TYPE_CHECKING:
    from kvpolicy.engine.requests.results import Result, RunReport
    from kvpolicy.engine.reuse.store import PrefixStore, StoreStats
    from kvpolicy.plan.resolved import ResolvedPlan


def print_results(
    options: GenerationOptions,
    *,
    keep_going: bool,
    in_order: bool,
    tensor_parallel: bool,
    store: "PrefixStore | None",
    json: bool,
) -> bool:
    """Generate for one prompt, or for all of a file, and print the results.

    Args:
        options: The options given.
        keep_going: Whether a policy that fails ends only the affected prompts.
        in_order: Whether results are printed in the order of the prompts.
        tensor_parallel: Whether the processes of torchrun share the model.
        store: The prefix store to use.
        json: Whether to print JSON.

    Returns:
        Whether a prompt failed.

    Raises:
        KVPolicyError: An option is wrong, or two contradict each other.
    """
    with first_process_prints() if tensor_parallel else nullcontext():
        task = prepare(
            options, keep_going=keep_going, tensor_parallel=tensor_parallel, prefix_store=store
        )
        try:
            if json:
                return _print_json_lines(task, in_order=in_order)
            if options.file is None:
                return _stream(task)
            return _print_texts(task, in_order=in_order)
        finally:
            _flushed(task)


@contextmanager
def first_process_prints() -> Iterator[None]:
    """Silence all processes of torchrun but the first; each still reports its own errors.

    Raises:
        KVPolicyError: This is a single process, or it has failed.
    """
    if "RANK" not in os.environ:
        msg = (
            "--tensor-parallel was given to a single process; start several: "
            "torchrun --nproc-per-node N -m kvpolicy run --tensor-parallel ..."
        )
        raise KVPolicyError(msg)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from torch import distributed as dist

    try:
        with ExitStack() as stack:
            if rank > 0:
                devnull = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(devnull))
                stack.enter_context(redirect_stderr(devnull))
            yield
    except KVPolicyError as error:
        if rank == 0:
            raise
        msg = f"process {rank} of {size} (counted from 0): {error}"
        raise KVPolicyError(msg) from error
    except RuntimeError as error:
        if "onnection" not in str(error):
            raise
        msg = f"process {rank} of {size} (counted from 0) lost its connection to the others."
        raise KVPolicyError(msg) from error
    if dist.is_initialized():
        dist.destroy_process_group()


def _flushed(task: Generation) -> "StoreStats | None":
    """What the prefix store holds, in files, too, if there is one."""
    if task.engine.prefixes is None:
        return None
    task.engine.prefixes.store.flush()
    return task.engine.prefixes.store.stats


def _stream(task: Generation) -> bool:
    stream = task.engine.stream(task.requests[0])
    last = ""
    try:
        for piece in stream:
            print_exact(piece)
            last = piece or last
    except KeyboardInterrupt:
        print_text("\n")
        msg = f"interrupted after {stream.report.new_tokens} tokens."
        raise Interrupted(msg) from None
    result = stream.result
    assert result is not None, "a stream that has ended has its result"
    if result.error is not None:
        raise RequestError(result.error)
    print_text("" if last.endswith("\n") else "\n")
    if (reason := why_empty(result)) is not None:
        info(reason)
    info(format_result(result, task.engine.plan))
    _print_report(stream.report, task)
    return False


def _print_texts(task: Generation, *, in_order: bool) -> bool:
    run = task.start()
    failed = False
    for result in _until_interrupted(run, task, in_order=in_order):
        name = task.prompts[result.id].id
        if result.error is not None:
            failed = True
            info(f"prompt {name}: {result.error}.")
            continue
        head = f"[{visible(str(name))}] {result.finish_reason}, {len(result.tokens)} tokens"
        print_text(f"{head}\n{result.text}\n\n")
        if (reason := why_empty(result)) is not None:
            info(f"prompt {name}: {reason}")
    _print_report(run.report, task)
    return failed


def _print_json_lines(task: Generation, *, in_order: bool) -> bool:
    run = task.start()
    failed = False
    for result in _until_interrupted(run, task, in_order=in_order):
        failed = failed or result.error is not None
        named = {"id": task.prompts[result.id].id, "index": result.id}
        print_json({"kind": "result", **result.to_dict(), **named})
    digest, stats = task.engine.plan.digest(), _flushed(task)
    of_store = {} if stats is None else {"prefix_store": stats.to_dict()}
    print_json({"kind": "run", "plan_digest": digest, **run.report.to_dict(), **of_store})
    return failed


def _until_interrupted(
    results: "Iterable[Result]", task: Generation, *, in_order: bool
) -> "Iterator[Result]":
    done = 0
    try:
        for result in _in_order(results) if in_order else results:
            yield result
            done += 1
    except KeyboardInterrupt:
        msg = f"interrupted; {done} of {len(task.prompts)} results are above, the others are lost."
        raise Interrupted(msg) from None


def _in_order(results: "Iterable[Result]") -> "Iterator[Result]":
    """Hold back each result until those of all prompts before it are out.

    If the run ends early, what is held back comes out too.
    """
    held: dict[int, Result] = {}
    following = 0
    try:
        for result in results:
            held[result.id] = result
            while following in held:
                yield held.pop(following)
                following += 1
    except (KeyboardInterrupt, KVPolicyError):
        yield from (held[number] for number in sorted(held))
        raise


def _print_report(report: "RunReport", task: Generation) -> None:
    from kvpolicy.engine.requests.savings import nothing_evicted

    info(format_report(report))
    if (stats := _flushed(task)) is not None:
        info(format_reuse(report.reused_tokens, report.prompt_tokens, [stats]))
    plan, evicted, longest = task.engine.plan, report.rows_evicted, report.peak_rows
    note = nothing_evicted(plan, evicted, longest, lambda key, value: f"--{key} {value}")
    if note is None and report.full_bytes > report.held_bytes:
        info(format_savings(report))
    note = note or report.note
    if note is not None:
        info(f"{note}.")


def why_empty(result: "Result") -> str | None:
    """Why an answer shows nothing; ``None`` if it shows something.

    Args:
        result: Its result.
    """
    if (result.text or "").strip():
        return None
    num = len(result.tokens)
    if result.finish_reason == "stop" and num <= 1:
        return (
            "the answer is empty, because the model ended at once: its first token is one that "
            "ends an answer; word the prompt differently, or give --min-new-tokens."
        )
    return f"the answer shows nothing: its {num} tokens are white space or control tokens."


def format_result(result: "Result", plan: "ResolvedPlan") -> str:
    """One sentence about what a sequence kept and evicted.

    Args:
        result: Its result.
        plan: The plan of the run.
    """
    budgets = sorted({(layer.budget, layer.buffer) for layer in plan.layers if layer.bounded})
    behind = " behind the prompt" if plan.keeps_prompts else ""
    evicted = "no budget"
    if budgets:
        times = "once" if result.compactions == 1 else f"{result.compactions} times"
        evicted = (
            f"budget {', '.join(f'{budget} + {buffer}' for budget, buffer in budgets)}{behind}, "
            f"compacted {times}, {result.rows_evicted:,} rows evicted"
        )
    return (
        f"{len(result.tokens)} tokens ({result.finish_reason}) after a prompt of "
        f"{result.prompt_len}; {evicted}; at most {result.peak_rows:,} rows in a layer, "
        f"{format_bytes(result.peak_bytes)} of cache in all."
    )


def format_savings(report: "RunReport") -> str:
    """One sentence about the memory that a run did not need.

    Args:
        report: Its report.
    """
    held, full = report.held_bytes, report.full_bytes
    return (
        f"saved {report.saved_share:.1%} of a full cache: at most {format_bytes(held)} of keys and "
        f"values instead of {format_bytes(full)}, {format_bytes(full - held)} less."
    )


def format_report(report: "RunReport") -> str:
    """One sentence about what a run cost.

    Args:
        report: Its report.
    """
    shared = f" in each of {report.num_processes} processes" if report.num_processes > 1 else ""
    failed = f", {report.num_errors} of them failed," if report.num_errors else ""
    return (
        f"{report.num_requests} done{failed} in "
        f"{format_seconds(report.elapsed_s, report.compile_s)}: "
        f"{report.new_tokens:,} tokens, {report.throughput_tok_s:.0f}/s; "
        f"policies took {report.policy_share:.1%} of the decode time; "
        f"peak KV bytes {format_bytes(report.peak_kv_bytes)}{shared}, with positions, "
        "what policies track, and copies."
    )
