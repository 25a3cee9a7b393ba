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


# What a session says of how fast it computes.
_PACE = ("workers", "threads", "cpus", "device")


def add_session(folder: Path, manifest: dict[str, Any], session: dict[str, Any]) -> list[str]:
    """Add a session to a manifest.

    Args:
        folder: The run's folder.
        manifest: What its manifest holds.
        session: The session that begins.

    Returns:
        Notes for the user, if the last session had other versions of packages, or computed with
        other workers or on another machine.
    """
    sessions = manifest["sessions"]
    write_manifest(folder, manifest["run"], [*sessions, session], version=manifest["format"])
    if not sessions:
        return []
    last, notes = sessions[-1], []
    if last.get("versions") != session["versions"]:
        notes.append(
            "this run was begun with other versions of Python or its packages; "
            f"{folder / 'manifest.json'} lists them"
        )
    if changed := [name for name in _PACE if last.get(name) != session.get(name)]:
        before, now = (
            ", ".join(f"{name} {of.get(name)}" for name in changed) for of in (last, session)
        )
        notes.append(
            f"cells of the session before were timed with {before}, and those of this one are with "
            f"{now}: compare their tok/s with care"
        )
    return notes
