"""Stage 1: versions, the card, and how fast its memory is."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import stage_report
from stage_report import Report

PACKAGES = (
    *("kvpolicy", "torch", "triton", "transformers", "numpy", "scipy"),
    *("cattrs", "numba", "pytest", "pytest-xdist"),
)


def stage(report: Report) -> None:
    """Note everything that a figure depends on."""
    import torch

    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    report.note("versions", versions, "  ".join(f"{k} {v}" for k, v in versions.items() if v))
    import kvpolicy

    report.note("kvpolicy", kvpolicy.__file__, f"kvpolicy is {kvpolicy.__file__}")
    if report.device == "cuda":
        if not torch.cuda.is_available():
            report.fail("torch sees no GPU")
            return
        card = torch.cuda.get_device_properties(0)
        about = {
            "name": card.name,
            "memory_bytes": card.total_memory,
            "capability": [card.major, card.minor],
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
        report.note("card", about, f"card: {about}")
    from kvpolicy.lab.bench.roofline import memory_bandwidth

    num_bytes = 2**24 if report.quick else None
    bytes_per_s = memory_bandwidth(torch.device(report.device), num_bytes)
    report.note("bytes_per_s", bytes_per_s, f"memory: {bytes_per_s / 1e12:.2f} TB/s")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0]


if __name__ == "__main__":
    stage_report.main("versions", stage)
