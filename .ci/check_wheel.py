"""Look into a wheel: the names it makes importable, and what must be inside."""

import sys
from zipfile import ZipFile

TOP_LEVEL = {
    "kvpolicy",
    "kvpolicy_baselines",
    "kvpolicy_plugins",
    "kvpolicy_reasoner",
    "skipkv_plugin",
}
INSIDE = [
    "kvpolicy/__init__.pyi",
    *(f"{package}/py.typed" for package in sorted(TOP_LEVEL)),
    "kvpolicy_reasoner/weights/config.json",
    "kvpolicy_reasoner/weights/model.safetensors",
    "kvpolicy_reasoner/weights/tokenizer.json",
    "kvpolicy_reasoner/verbose/weights/config.json",
    "kvpolicy_reasoner/verbose/weights/model.safetensors",
    "kvpolicy_reasoner/verbose/weights/tokenizer.json",
    "kvpolicy_reasoner/presets/baselines.toml",
    "skipkv_plugin/README.md",
    "skipkv_plugin/plans/skipkv.toml",
    "kvpolicy_reasoner/plans/skipkv-reasoner.toml",
    "kvpolicy/lab/report/assets/page.html",
    "kvpolicy/lab/report/assets/main.js",
    "kvpolicy/lab/report/assets/kept.css",
    "kvpolicy_reasoner/vectors/reasoner-verbose.safetensors",
]
MOST_BYTES = 14 << 20  # of which weights take 12 MiB at most


def main(path: str) -> None:
    """Exit with a sentence if the wheel at ``path`` is not as it should be."""
    with ZipFile(path) as wheel:
        names = wheel.namelist()
        size = sum(info.compress_size for info in wheel.infolist())
    folders = {name.partition("/")[0] for name in names}
    top_level = {folder for folder in folders if not folder.endswith(".dist-info")}
    if top_level != TOP_LEVEL:
        sys.exit(f"{path} installs {sorted(top_level)}; wanted is {sorted(TOP_LEVEL)}")
    missing = [name for name in INSIDE if name not in names]
    if missing:
        sys.exit(f"{path} lacks {', '.join(missing)}")
    if size > MOST_BYTES:
        sys.exit(f"{path} takes {size:,} bytes; at most {MOST_BYTES:,} are wanted")
    sys.stdout.write(f"{len(names)} files, {size:,} bytes, {', '.join(sorted(top_level))}\n")


if __name__ == "__main__":
    main(sys.argv[1])
