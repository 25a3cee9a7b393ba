"""The command `.ci/gpu`: prepare, or run stages one after another, each in a process of its own."""

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path

from stages import STAGES, Run, run_stages, summary

ROOT = Path(__file__).resolve().parents[2]
PREPARED = ROOT / ".ci" / "gpu_files"


def main() -> int:
    """Run the command; 0 if no stage failed."""
    # A time limit ends the command with a signal: stages are ended, and the summary is printed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog=".ci/gpu", description=__doc__)
    parser.add_argument("out", help="'prepare', or the folder for logs and figures")
    parser.add_argument("--stages", default=",".join(STAGES), help="names, separated by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to rehearse on a CPU")
    asked = parser.parse_args()
    if asked.out == "prepare":
        from prepare import prepare

        return prepare(PREPARED, quick=asked.quick)
    names = asked.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; choose some of {', '.join(STAGES)}")
    if problem := _problem(quick=asked.quick):
        sys.stderr.write(f".ci/gpu: {problem}\n")
        return 2
    out = Path(asked.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvpolicy-gpu-") as scratch:
        run = Run(
            out=out,
            device=asked.device,
            quick=asked.quick,
            environment=_environment(Path(scratch), asked.device),
        )
        outcomes = run_stages(names, run)
    sys.stdout.write(summary(outcomes))
    return int(any(not one.passed for one in outcomes))


def _problem(*, quick: bool) -> str | None:
    """Why what was prepared cannot be used."""
    from prepare import digest_of_sources, prepared_for

    prepared = prepared_for(PREPARED)
    if prepared is None:
        return "nothing is prepared; run .ci/gpu prepare where kvpolicy's tests run"
    if prepared["sources"] != digest_of_sources(ROOT):
        return "the sources have changed since .ci/gpu prepare; run it again"
    if prepared["quick"] != quick:
        return "other sizes were prepared; give --quick to both commands or to none"
    missing = [name for name in ("torch", "transformers", "pytest") if not _is_installed(name)]
    return f"{missing[0]} is not installed for {sys.executable}" if missing else None


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _environment(scratch: Path, device: str) -> dict[str, str]:
    """Environment of the stages: what was prepared comes first, and nothing asks the network."""
    # Tiny tensors, in as many processes as there are cores.
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    return {
        **os.environ,
        "PYTHONPATH": f"{PREPARED / 'site'}",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # One cache of compiled kernels for all stages.
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "KVPOLICY_EXPECTED": str(PREPARED / "expected.json"),
        **threads,
    }


if __name__ == "__main__":
    sys.exit(main())
