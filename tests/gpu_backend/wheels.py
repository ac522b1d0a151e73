"""Tiny wheels that carry pieces of a file, a catalogue entry for it, and pip off the network."""

import hashlib
import io
import os
import tarfile
import zipfile

from gpu_backend.sources.catalogue import ModelEntry

CONTENT = bytes(range(256)) * 40
MEMBER = "tiny_part{n}/data/part{n:02d}.bin"


def entry(content=CONTENT, pieces=3, name="Tiny/Model", **changes):
    values = {
        "name": name,
        "aliases": ("tiny", "tiny-model"),
        "licence": "Apache-2.0",
        "architecture": "qwen2",
        "quantisation": "F32",
        "file": "tiny.gguf",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "containers": {"package": "tiny-part{n}==1.0", "member": MEMBER, "count": pieces},
    }
    return ModelEntry.model_validate(values | changes)


def write_wheels(folder, content=CONTENT, pieces=3):
    """The content in equal pieces, one wheel for each."""
    folder.mkdir(exist_ok=True)
    step = -(-len(content) // pieces)
    for n in range(1, pieces + 1):
        write_wheel(folder, n, {MEMBER.format(n=n): content[(n - 1) * step : n * step]})
    return folder


def write_wheel(folder, n, members):
    path = folder / f"tiny_part{n}-1.0-py3-none-any.whl"
    info = f"tiny_part{n}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{n}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def write_sdist(folder, n, marker):
    """A source distribution whose setup.py leaves a mark when it is run."""
    folder.mkdir(exist_ok=True)
    code = f"open({str(marker)!r}, 'w')\nfrom setuptools import setup\nsetup()\n".encode()
    with tarfile.open(folder / f"tiny-part{n}-1.0.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(f"tiny-part{n}-1.0/setup.py")
        member.size = len(code)
        archive.addfile(member, io.BytesIO(code))


def cut_off(monkeypatch, links=None):
    """Let pip see a folder of wheels and nothing else, whatever the user's configuration."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    if links is not None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    else:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
