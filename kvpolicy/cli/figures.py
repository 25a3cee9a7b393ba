"""The figures of a generation, in words."""

from typing import TYPE_CHECKING

from kvpolicy.cli.units import human_bytes

if TYPE_CHECKING:
    from kvpolicy.engine.results import Result, RunReport
    from kvpolicy.plan.resolved import ResolvedPlan


def describe_result(result: "Result", plan: "ResolvedPlan") -> str:
    """What one generation kept and lost.

    Args:
        result: How it ended.
        plan: What was run.
    """
    return (
        f"{len(result.tokens)} tokens ({result.finish_reason}) after a prompt of "
        f"{result.prompt_len}; {_what_was_kept(result, plan)}; at most {result.peak_rows:,} rows "
        f"in a layer, {human_bytes(result.peak_bytes)} of keys and values in all."
    )


def _what_was_kept(result: "Result", plan: "ResolvedPlan") -> str:
    budgets = sorted({(layer.budget, layer.buffer) for layer in plan.layers if layer.bounded})
    if not budgets:
        return "no budget"
    times = "once" if result.compactions == 1 else f"{result.compactions} times"
    return (
        f"budget {', '.join(f'{budget} + {buffer}' for budget, buffer in budgets)}, "
        f"compacted {times}, {result.rows_evicted:,} rows evicted"
    )


def describe_run(report: "RunReport") -> str:
    """What a run cost.

    Args:
        report: Its report.
    """
    shared = f" in each of {report.num_processes} processes" if report.num_processes > 1 else ""
    failed = f", {report.num_errors} of them failed," if report.num_errors else ""
    return (
        f"{report.num_requests} done{failed} in {report.elapsed_s:.1f} s: "
        f"{report.new_tokens:,} tokens, {report.throughput_tok_s:.0f}/s; "
        f"policies took {report.policy_share:.1%} of the decode time; "
        f"the cache was at most {human_bytes(report.peak_kv_bytes)}{shared}."
    )
