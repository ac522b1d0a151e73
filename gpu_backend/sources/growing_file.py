"""A file that is put together from pieces, and can be left and taken up again at any moment."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import IO, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_policies.errors import InputError
from traces.store import write_whole

_CHUNK_BYTES: Final = 1 << 20


class _State(BaseModel):
    """How far the joined file is known to be whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expected: str
    pieces: int = 0
    length: int = 0
    digest: str = hashlib.sha256().hexdigest()


class GrowingFile:
    """Pieces joined in ``FINAL.parts/joined``; ``FINAL`` itself appears whole or not at all.

    After every piece the number of pieces, the length and the SHA-256 so far are written down.
    What a killed run left beyond that is cut off; where the rest is not as written down, the file
    starts anew. Joining in place keeps the need for disk space at the file's own size.

    Args:
        final: the file to make.
        sha256: its digest; pieces of a file with another digest are dropped.
    """

    def __init__(self, final: Path, sha256: str) -> None:
        """Keep the names; :meth:`open` touches the disk."""
        self.folder = final.with_name(final.name + ".parts")
        self._final = final
        self._joined = self.folder / "joined"
        self._state_path = self.folder / "state.json"
        self._state = _State(expected=sha256)
        self._digest = hashlib.sha256()

    @property
    def num_pieces(self) -> int:
        """Pieces that are joined."""
        return self._state.pieces

    @property
    def num_bytes(self) -> int:
        """Bytes that are joined."""
        return self._state.length

    def open(self) -> None:
        """Take up what an earlier run left, or start.

        Raises:
            OSError: the folder cannot be made or written.
        """
        self.folder.mkdir(exist_ok=True)
        fresh = self._state
        self._state = self._read_state() or fresh
        self._joined.touch()
        os.truncate(self._joined, min(self._state.length, self._joined.stat().st_size))
        with self._joined.open("rb") as file:
            self._digest = hashlib.file_digest(file, "sha256")
        if self._digest.hexdigest() != self._state.digest:
            self._state = fresh
            self._digest = hashlib.sha256()
            os.truncate(self._joined, 0)

    def append(self, piece: IO[bytes]) -> None:
        """Join one piece and write down that it is there.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        length = self._state.length
        with self._joined.open("r+b") as file:
            file.seek(length)
            while chunk := piece.read(_CHUNK_BYTES):
                file.write(chunk)
                self._digest.update(chunk)
                length += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        self._state = _State(
            expected=self._state.expected,
            pieces=self._state.pieces + 1,
            length=length,
            digest=self._digest.hexdigest(),
        )
        write_whole(self._state_path, self._state.model_dump_json().encode())

    def finish(self, size_bytes: int) -> None:
        """Check the whole and give it its final name.

        Raises:
            InputError: size or SHA-256 are not the expected ones; the pieces are removed.
        """
        length, digest = self._state.length, self._state.digest
        if (length, digest) != (size_bytes, self._state.expected):
            shutil.rmtree(self.folder)
            raise InputError(
                f"{self._final.name} must have {size_bytes} bytes and the SHA-256 "
                f"{self._state.expected}; what was fetched has {length} bytes and {digest}. It was "
                "removed: the source offers other content than the catalogue; use another source."
            )
        self._joined.replace(self._final)
        shutil.rmtree(self.folder)

    def _read_state(self) -> _State | None:
        try:
            state = _State.model_validate_json(self._state_path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return state if state.expected == self._state.expected else None
