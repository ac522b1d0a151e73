"""Traces by name: files first, then the bundled ones, under every suffix."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from echo_policies.errors import TraceError, UnknownNameError
from tests.traces.build import random_trace
from traces.library import available, open_trace, resolve, resolve_calibration
from traces.store import save


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two bundled traces, and an empty working directory."""
    root = tmp_path / "package"
    (root / "data").mkdir(parents=True)
    for seed, name in enumerate(("qwen235b", "qwen3-0.6b")):
        trace = random_trace(np.random.default_rng(seed))
        save(trace, root / "data" / f"{name}.safetensors")
    monkeypatch.setattr(resources, "files", lambda _: root)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return available()


def test_bundled_traces_are_listed_by_name(bundled: dict[str, Path]) -> None:
    assert list(bundled) == ["qwen235b", "qwen3-0.6b"]


@pytest.mark.parametrize("suffix", ["", ".pkl", ".pt", ".safetensors"])
def test_a_bundled_name_has_any_suffix(bundled: dict[str, Path], suffix: str) -> None:
    for name, path in bundled.items():
        assert resolve(name + suffix) == path
        assert open_trace(name + suffix).header.name == "random"


def test_a_bundled_calibration_goes_by_its_trace(bundled: dict[str, Path]) -> None:
    path = bundled["qwen235b"].with_name("qwen235b.calibration.json")
    path.write_text("{}")
    assert resolve_calibration("qwen235b") == path
    Path("own.json").write_text("{}")
    assert resolve_calibration("own.json") == Path("own.json")
    with pytest.raises(UnknownNameError, match="qwen235b"):
        resolve_calibration("qwen235")


def test_an_existing_file_wins(bundled: dict[str, Path]) -> None:
    own = random_trace(np.random.default_rng(9))
    save(own, "qwen235b.pkl")
    assert open_trace("qwen235b.pkl").digest == own.digest
    assert resolve("qwen235b") == bundled["qwen235b"]


def test_a_folder_of_the_same_name_does_not(bundled: dict[str, Path]) -> None:
    Path("qwen235b").mkdir()
    assert resolve("qwen235b") == bundled["qwen235b"]


@pytest.mark.usefixtures("bundled")
def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'qwen235b'.* Known: qwen235b, qwen3"):
        resolve("qwen253b.pkl")
    with pytest.raises(UnknownNameError, match="No trace named 'data/qwen235b'"):
        resolve("data/qwen235b")


@pytest.mark.usefixtures("bundled")
def test_a_bad_file_is_named() -> None:
    Path("bad.pkl").write_text("no")
    with pytest.raises(TraceError, match=r"^bad\.pkl: "):
        open_trace("bad.pkl")


def test_every_shipped_trace_is_valid() -> None:
    for name, path in available().items():
        assert path.is_file()
        assert open_trace(name).num_positions > 0
