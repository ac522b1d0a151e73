"""A file joined from pieces is right or absent, wherever the work on it stopped."""

import hashlib
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import InputError
from gpu_backend.sources import growing_file
from gpu_backend.sources.growing_file import GrowingFile


class Stopping(io.BytesIO):
    """A stream that is interrupted after some bytes."""

    def __init__(self, data, after):
        super().__init__(data)
        self.after = after

    def read(self, size=-1):
        if self.tell() >= self.after:
            raise KeyboardInterrupt
        return super().read(min(size, self.after - self.tell()))


def started(final, content):
    file = GrowingFile(final, hashlib.sha256(content).hexdigest())
    file.open()
    return file


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5),
    stops=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 39)), max_size=4),
)
def test_interrupted_anywhere_it_ends_the_same(pieces, stops):
    content = b"".join(pieces)
    with tempfile.TemporaryDirectory() as folder:
        final = Path(folder) / "m.gguf"
        for piece, after in stops:
            file = started(final, content)
            try:
                for n in range(file.num_pieces, min(piece + 1, len(pieces))):
                    file.append(Stopping(pieces[n], after) if n == piece else io.BytesIO(pieces[n]))
            except KeyboardInterrupt:
                pass
            assert not final.exists()
        file = started(final, content)
        assert file.num_bytes == len(b"".join(pieces[: file.num_pieces]))
        for n in range(file.num_pieces, len(pieces)):
            file.append(io.BytesIO(pieces[n]))
        file.finish(len(content))
        assert final.read_bytes() == content
        assert list(Path(folder).iterdir()) == [final]


@pytest.mark.parametrize("damage", [b"XXXX", b"12", b""])
def test_damaged_beginning_starts_anew(tmp_path, damage):
    """Kind: bytes that changed on the disk after they were written down as whole."""
    final = tmp_path / "m.gguf"
    started(final, b"12345678").append(io.BytesIO(b"1234"))
    assert started(final, b"12345678").num_pieces == 1
    (tmp_path / "m.gguf.parts" / "joined").write_bytes(damage)
    assert started(final, b"12345678").num_bytes == 0


def test_pieces_of_another_version_are_dropped(tmp_path):
    final = tmp_path / "m.gguf"
    started(final, b"12345678").append(io.BytesIO(b"1234"))
    assert started(final, b"1234....").num_pieces == 0


def test_state_lost_between_bytes_and_its_note(tmp_path, monkeypatch):
    final = tmp_path / "m.gguf"
    file = started(final, b"1234")
    file.append(io.BytesIO(b"12"))

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(growing_file, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            file.append(io.BytesIO(b"34"))
    again = started(final, b"1234")
    assert (again.num_pieces, again.num_bytes) == (1, 2)
    assert (tmp_path / "m.gguf.parts" / "joined").read_bytes() == b"12"


@pytest.mark.parametrize(("content", "size"), [(b"1234", 5), (b"1235", 4)])
def test_wrong_content_leaves_nothing(tmp_path, content, size):
    file = started(tmp_path / "m.gguf", b"1234")
    file.append(io.BytesIO(content))
    with pytest.raises(InputError, match=r"m\.gguf must have \d bytes and the SHA-256 03ac"):
        file.finish(size)
    assert list(tmp_path.iterdir()) == []
