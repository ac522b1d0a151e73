"""Folders of finished pieces, so that a long job that was stopped can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from echo_policies.errors import InputError
from traces.store import write_whole


def claim_folder(folder: Path, job: Mapping[str, object], what: str, otherwise: str) -> None:
    """Make a folder for the pieces of a job, or check that those in it are of this very job.

    Args:
        folder: made if it is missing; its parent must exist.
        job: everything that decides the content of the pieces.
        what: what the folder holds where it is not of this job, in words.
        otherwise: what to do where they are of another job.

    Raises:
        InputError: the parent is missing, or the pieces are of another job.
    """
    if not folder.parent.is_dir():
        raise InputError(
            f"{folder} cannot be made: the folder {folder.parent} does not exist; create it."
        )
    folder.mkdir(exist_ok=True)
    text = json.dumps(job, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    marker = folder / "job"
    if not marker.exists():
        write_whole(marker, fingerprint.encode())
    elif marker.read_text() != fingerprint:
        raise InputError(f"{folder} holds {what}; {otherwise}.")
