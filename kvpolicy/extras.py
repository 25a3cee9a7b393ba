"""The command that installs an extra of kvpolicy, from where kvpolicy itself was installed."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit


def install_extra(*names: str) -> str:
    """A line for a shell, such as ``pip install -e '/home/me/kvpolicy[ray]'``.

    Args:
        names: The extras.
    """
    try:
        source = distribution("kvpolicy").read_text("direct_url.json")
    except PackageNotFoundError:  # run from a folder
        source = None
    return command_for(names, source)


def command_for(names: tuple[str, ...], source: str | None) -> str:
    """The line for an installation.

    Args:
        names: The extras.
        source: What ``direct_url.json`` says of it (PEP 610); ``None``: it came from an index.
    """
    extras = f"[{','.join(names)}]"
    found = json.loads(source) if source else {}
    url = str(found.get("url", ""))
    folder = Path(unquote(urlsplit(url).path))
    if url.startswith("file:") and folder.is_dir():
        editable = "-e " if found.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}{quote(f'{folder}{extras}')}"
    version_control = found.get("vcs_info", {}).get("vcs")
    if version_control:
        return f"pip install {quote(f'kvpolicy{extras} @ {version_control}+{url}')}"
    return f"pip install {quote(f'kvpolicy{extras}')}"
