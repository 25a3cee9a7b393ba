"""The manifest of a run's folder: what the run is, and the sessions in which it was worked on."""

import json
from pathlib import Path
from typing import Any

from kvpolicy.files import atomic_write


def write_manifest(
    folder: Path, run: dict[str, Any], sessions: list[dict[str, Any]], *, version: int
) -> None:
    """Write ``manifest.json``.

    Args:
        folder: The run's folder.
        run: Everything that its results depend on.
        sessions: When, how and with which versions it was worked on.
        version: Version of the folder's format.
    """
    manifest = {"format": version, "run": run, "sessions": sessions}
    atomic_write(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def add_session(folder: Path, manifest: dict[str, Any], session: dict[str, Any]) -> str | None:
    """Add a session to a manifest.

    Args:
        folder: The run's folder.
        manifest: What its manifest holds.
        session: The session that begins.

    Returns:
        A note for the user if the last session had other versions of packages.
    """
    sessions = manifest["sessions"]
    write_manifest(folder, manifest["run"], [*sessions, session], version=manifest["format"])
    if sessions and sessions[-1].get("versions") != session["versions"]:
        return (
            "this run was begun with other versions of Python or its packages; "
            f"{folder / 'manifest.json'} lists them"
        )
    return None
