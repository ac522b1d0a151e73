"""Files: round trips, and one clear sentence for every kind of bad one."""

from __future__ import annotations

import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError, TraceError
from tests.traces.build import random_trace, traces
from traces.header import header_json
from traces.schema import Trace
from traces.store import METADATA_KEY, digest, load, make_trace, save, write_whole
from traces.validate import named_arrays


@pytest.fixture
def trace() -> Trace:
    return random_trace(np.random.default_rng(1), entropies=True)


@pytest.fixture
def good(trace: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    save(trace, path)
    return path


def write(path: Path, trace: Trace, header: Any = None, **changed: Any) -> Path:
    """A safetensors file with other arrays (None drops one) or another header."""
    arrays = named_arrays(trace.arrays) | changed
    kept = {name: array for name, array in arrays.items() if array is not None}
    text = header if isinstance(header, str) else json.dumps(header or raw_header(trace))
    path.write_bytes(safetensors.numpy.save(kept, {METADATA_KEY: text}))
    return path


def raw_header(trace: Trace) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(header_json(trace.header))
    return header


def refusal(path: Path) -> str:
    """The message of the refusal, which must name the file and be one line."""
    with pytest.raises(TraceError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# Round trips.


def test_saved_twice_the_bytes_are_identical(trace: Trace, tmp_path: Path) -> None:
    contents = set()
    for i in range(10):
        save(trace, tmp_path / f"{i}.safetensors")
        contents.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(contents) == 1


@settings(deadline=None, max_examples=25)
@given(trace=traces())
def test_formats_convert_without_loss(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("round")
    save(trace, folder / "a.safetensors")
    save(load(folder / "a.safetensors"), folder / "b.pkl")
    again = load(folder / "b.pkl")
    save(again, folder / "c.safetensors")
    assert load(folder / "c.safetensors").digest == again.digest == trace.digest
    assert again.header == trace.header
    assert (folder / "a.safetensors").read_bytes() == (folder / "c.safetensors").read_bytes()


def test_the_reader_goes_by_content(trace: Trace, tmp_path: Path) -> None:
    save(trace, tmp_path / "a.pkl")
    save(trace, tmp_path / "a.safetensors")
    (tmp_path / "a.pkl").rename(tmp_path / "b.safetensors")
    (tmp_path / "a.safetensors").rename(tmp_path / "b.pkl")
    assert load(tmp_path / "b.pkl").digest == trace.digest
    assert load(str(tmp_path / "b.safetensors")).digest == trace.digest


def test_arrays_are_read_only_copies(trace: Trace, good: Path) -> None:
    for one in (trace, load(good)):
        for array in named_arrays(one.arrays).values():
            assert not array.flags.writeable
            assert array.flags.c_contiguous
    mine = trace.arrays.tokens.copy()
    made = make_trace(trace.header, replace(trace.arrays, tokens=mine))
    mine[0] += 1
    assert made.arrays.tokens[0] == mine[0] - 1


def test_fortran_order_is_no_trap(trace: Trace, tmp_path: Path) -> None:
    turned = replace(trace.arrays, root_logp=np.asfortranarray(trace.arrays.root_logp))
    made = make_trace(trace.header, turned)
    save(Trace(trace.header, turned, made.digest), tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").digest == trace.digest == made.digest


def test_the_digest_covers_header_and_content(trace: Trace) -> None:
    renamed = trace.header.model_copy(update={"name": "other"})
    tokens = trace.arrays.tokens.copy()
    tokens[0] ^= 1
    others = {
        digest(renamed, trace.arrays),
        digest(trace.header, replace(trace.arrays, tokens=tokens)),
        digest(trace.header, replace(trace.arrays, root_entropy=None)),
        digest(trace.header, replace(trace.arrays, tokens=trace.arrays.tokens.astype(np.int64))),
    }
    assert len(others | {trace.digest}) == 5
    assert digest(trace.header, trace.arrays) == trace.digest


# Bad files.


def test_truncated_anywhere(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    for size in (1, 7, 8, 9, 20, 500, len(data) // 2, len(data) - 1):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(data[:size])
        assert "neither" in refusal(path) or "truncated" in refusal(path)


@settings(deadline=None, max_examples=60)
@given(noise=st.binary(max_size=64))
def test_noise_is_refused(noise: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("noise") / "x.pkl"
    for head in (b"", b"\x80\x05", b"\x10\0\0\0\0\0\0\0{"):
        path.write_bytes(head + noise)
        refusal(path)


def test_empty_and_foreign(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    assert "the file is empty" in refusal(path)
    path.write_text("position,rank\n0,1\n")
    assert "neither" in refusal(path)
    path.write_bytes(safetensors.numpy.save(named_arrays(trace.arrays), {"format": "pt"}))
    assert "no metadata key 'echo_trace'" in refusal(path)


def test_bfloat16_is_refused(tmp_path: Path, trace: Trace) -> None:
    import safetensors.torch
    import torch

    path = tmp_path / "x.safetensors"
    tensors = {"tokens": torch.zeros(3, dtype=torch.bfloat16)}
    path.write_bytes(safetensors.torch.save(tensors, {METADATA_KEY: header_json(trace.header)}))
    refusal(path)


def test_missing_folder_or_directory(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere.pkl")
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads and writes everything")
def test_unreadable_file(good: Path) -> None:
    good.chmod(0)
    assert "Permission denied" in refusal(good)


def test_missing_and_surplus_arrays(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "x.safetensors"
    assert "array 'path_rank' is missing" in refusal(write(path, trace, path_rank=None))
    assert "array 'extra' is not part" in refusal(write(path, trace, extra=np.zeros(1)))
    optional = write(path, trace, root_entropy=None, slot_entropy=None)
    assert load(optional).arrays.slot_entropy is None


def test_wrong_content_is_named(tmp_path: Path, trace: Trace) -> None:
    path, arrays = tmp_path / "x.safetensors", trace.arrays
    nan = arrays.child_logp.copy()
    nan[0, 0, 0, 1] = np.nan
    above = arrays.path_logp.copy()
    above[arrays.path_rank >= 0] = 1
    offset = arrays.position_offset.copy()
    offset[1] = 10**6
    for changed, message in (
        ({"tokens": arrays.tokens.astype(np.int64)}, "tokens must have dtype int32; got int64"),
        ({"tokens": arrays.tokens[:-1]}, r"token_offset[6] must be"),
        ({"chain_logp": arrays.chain_logp[:, :-1]}, "chain_logp must have shape"),
        ({"child_logp": nan}, "child_logp[0, 0, 0, 1] must not be NaN; got nan"),
        ({"path_logp": above}, "is a log-probability, at most 0; got 1.0"),
        ({"position_offset": offset}, "position_offset must be non-decreasing; entry 2"),
    ):
        assert message in refusal(write(path, trace, **changed))


def test_headers_that_do_not_parse(tmp_path: Path, trace: Trace) -> None:
    path, raw = tmp_path / "x.safetensors", raw_header(trace)
    missing = {key: value for key, value in raw.items() if key != "levels"}
    nested = json.loads(json.dumps(raw))
    nested["requests"][2]["split"] = "test"
    for header, message in (
        ("{", "the header is not JSON"),
        ("[]", "the header must be an object; got list"),
        (raw | {"schema_version": 2}, "schema version 2 .* reads up to 1: upgrade echo-spec"),
        (raw | {"schema_version": 0}, "header.schema_version: input should be 1; got 0"),
        (raw | {"top_k": 0}, "header.top_k: .* greater than or equal to 1; got 0"),
        (raw | {"topk": 4}, "header.topk: extra inputs are not permitted; got 4"),
        (missing, "header.levels: field required. Fix"),
        (nested, "header.requests.2.split: input should be 'calibration' or .*; got 'test'"),
    ):
        text = refusal(write(path, trace, header))
        assert re.search(message, text), text


# Writing.


def test_unwritable_paths(tmp_path: Path, trace: Trace) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="create the folder"):
        save(trace, tmp_path / "none" / "x.safetensors")
    with pytest.raises(InputError, match=r"cannot be written .*choose another path"):
        save(trace, tmp_path / "folder")
    with pytest.raises(InputError, match="cannot be written"):
        save(trace, tmp_path / ("x" * 300))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_pickles_of_other_content(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps([1, 2]))
    assert "must be a dict of 'header' and 'arrays'; got list" in refusal(path)
