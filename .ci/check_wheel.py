"""Check a wheel: its import packages, the files it must and must not contain, its size."""

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
    "kvpolicy_reasoner/weights/reasoner/config.json",
    "kvpolicy_reasoner/weights/reasoner/model.safetensors",
    "kvpolicy_reasoner/weights/reasoner/chat_template.jinja",
    "kvpolicy_reasoner/weights/reasoner/tokenizer.json",
    "kvpolicy_reasoner/weights/reasoner-verbose/config.json",
    "kvpolicy_reasoner/weights/reasoner-verbose/model.safetensors",
    "kvpolicy_reasoner/weights/reasoner-verbose/tokenizer.json",
    "kvpolicy_reasoner/presets/baselines.toml",
    "skipkv_plugin/README.md",
    "skipkv_plugin/plans/skipkv.toml",
    "kvpolicy_reasoner/plans/skipkv-reasoner.toml",
    "kvpolicy/lab/report/assets/page.html",
    "kvpolicy/lab/report/assets/main.js",
    "kvpolicy/lab/report/assets/kept.css",
    "kvpolicy/serve/assets/page.html",
    "kvpolicy/serve/assets/chat.js",
    "kvpolicy_reasoner/vectors/reasoner-verbose.safetensors",
]
NOT_INSIDE = ["kvpolicy_reasoner/train/"]
MAX_BYTES = 14 << 20  # the weights take up to 12 MiB of it


def main(path: str) -> None:
    """Exit with a message if the wheel at ``path`` has other contents than expected."""
    with ZipFile(path) as wheel:
        names = wheel.namelist()
        size = sum(info.compress_size for info in wheel.infolist())
    folders = {name.partition("/")[0] for name in names}
    top_level = {folder for folder in folders if not folder.endswith(".dist-info")}
    if top_level != TOP_LEVEL:
        sys.exit(f"{path} installs {sorted(top_level)}; expected {sorted(TOP_LEVEL)}")
    missing = [name for name in INSIDE if name not in names]
    if missing:
        sys.exit(f"{path} does not contain {', '.join(missing)}")
    extra = [name for name in names if name.startswith(tuple(NOT_INSIDE))]
    if extra:
        sys.exit(f"{path} contains {', '.join(extra)}, which must stay out of it")
    if size > MAX_BYTES:
        sys.exit(f"{path} has {size:,} bytes; the limit is {MAX_BYTES:,}")
    sys.stdout.write(f"{len(names)} files, {size:,} bytes, {', '.join(sorted(top_level))}\n")


if __name__ == "__main__":
    main(sys.argv[1])
