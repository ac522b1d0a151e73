"""Synthetic traces: published figures are met, refused where they cannot be, and said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echo_policies.errors import InputError, UnknownNameError
from tests.traces.build import Sizes, random_trace
from traces.card import describe
from traces.chain_walk import chain_walk
from traces.published import QWEN235B, SyntheticSpec
from traces.schema import SOURCE_MARK, PositionArrays, Trace
from traces.store import load, make_trace, save
from traces.synthetic import SPLITS, fit_report, main, make_synthetic
from traces.validate import check

TASKS = tuple(published.task for published in QWEN235B.sets)
RECORDED = (*TASKS, "cnn_dm")
"""Data sets of the recording: one of them only stands in for another."""
PER_TASK = 9
SIZES = Sizes(chain_levels=9, min_tokens=150, max_tokens=220)


def recording_of(agreement: Callable[[int], float], seed: int = 0) -> Trace:
    """A "recording" whose chain agrees to a geometric level, by a rate of each request's own."""
    base = random_trace(
        np.random.default_rng(seed), PER_TASK * len(RECORDED), SIZES, entropies=True
    )
    rng = np.random.default_rng(seed + 1)
    rank, logp = base.arrays.path_rank.copy(), base.arrays.path_logp.copy()
    infos = []
    for q, info in enumerate(base.header.requests):
        where = base.positions(q)
        level = rng.geometric(1 - agreement(q), where.stop - where.start) - 1
        depth = np.arange(SIZES.chain_levels)
        agreed = (depth < level[:, None]) & (rank[where] >= 0)
        missed = (depth == level[:, None]) & (rank[where] == 0)
        rank[where] = np.where(agreed, 0, np.where(missed, 1, rank[where]))
        turn, place = divmod(q, len(RECORDED))
        task, split = RECORDED[place], "calibration" if turn % 4 == 1 else "evaluation"
        infos.append(info.model_copy(update={"task": task, "split": split}))
    root = rank[:, 0]
    stored = (root >= 0) & (root < SIZES.root_width)
    logp[stored, 0] = base.arrays.root_logp[np.flatnonzero(stored), root[stored]]
    arrays = dataclasses.replace(base.arrays, path_rank=rank, path_logp=logp)
    provenance = base.header.provenance.model_copy(update={"kind": "recorded", "seed": None})
    update = {"requests": tuple(infos), "provenance": provenance, "licence": "Apache-2.0"}
    return make_trace(base.header.model_copy(update=update), arrays)


@pytest.fixture(scope="module")
def recording() -> Trace:
    trace = recording_of(lambda q: 0.55 + 0.03 * (q % 7))
    assert check(trace) == []
    return trace


@pytest.fixture(scope="module")
def synthetic(recording: Trace) -> Trace:
    return make_synthetic(recording)


def only(*sets: int) -> SyntheticSpec:
    return dataclasses.replace(QWEN235B, sets=tuple(QWEN235B.sets[i] for i in sets))


def test_every_published_figure_is_met(synthetic: Trace) -> None:
    rows = fit_report(synthetic)
    assert [(row.task, row.steps, row.target) for row in rows] == [
        (published.task, *pair) for published in QWEN235B.sets for pair in published.acceptance
    ]
    for row in rows:
        assert row.drawn == pytest.approx(row.target, rel=0.01)
        assert row.walked == pytest.approx(row.target, rel=0.02)
        assert row.emitted == pytest.approx(row.target, rel=0.035)  # ends of short requests


@pytest.mark.parametrize("split", SPLITS)
def test_each_split_meets_them_alone(synthetic: Trace, split: str) -> None:
    for row in fit_report(synthetic, split=split):  # type: ignore[arg-type]
        assert row.walked == pytest.approx(row.target, rel=0.03)


@pytest.mark.parametrize("seed", range(1, 4))
def test_long_traces_meet_the_figures_closely(recording: Trace, seed: int) -> None:
    trace = make_synthetic(recording, only(1), seed=seed, requests=16, positions=1024)
    for row in fit_report(trace, only(1)):
        assert row.drawn == pytest.approx(row.target, rel=0.002)
        assert row.emitted == pytest.approx(row.target, rel=0.01)


def test_the_report_agrees_with_the_trace_card(recording: Trace) -> None:
    trace = make_synthetic(recording, only(2))
    for row in fit_report(trace, only(2)):
        assert row.emitted == pytest.approx(chain_walk(trace, row.steps).acceptance_length)


def test_it_is_valid_and_survives_a_file(synthetic: Trace, tmp_path: Path) -> None:
    assert check(synthetic) == []
    save(synthetic, tmp_path / "qwen235b.safetensors")
    assert load(tmp_path / "qwen235b.safetensors").digest == synthetic.digest
    assert describe(synthetic).provenance == synthetic.header.provenance


def test_everything_of_a_position_travels_together(recording: Trace, synthetic: Trace) -> None:
    names = [field.name for field in dataclasses.fields(PositionArrays) if field.name != "tokens"]
    assert "slot_entropy" in names
    rows = {bytes_of(recording, names, p) for p in range(recording.num_positions)}
    assert all(bytes_of(synthetic, names, p) in rows for p in range(synthetic.num_positions))


def bytes_of(trace: Trace, names: list[str], position: int) -> bytes:
    return b"".join(getattr(trace.arrays, name)[position].tobytes() for name in names)


def test_requests_draw_from_one_request_of_their_split(recording: Trace, synthetic: Trace) -> None:
    infos = recording.header.requests
    source = {f"{info.task}/{info.question_id}": q for q, info in enumerate(infos)}
    first_logp = [
        {row.tobytes() for row in recording.arrays.root_logp[recording.positions(q)]}
        for q in range(recording.num_requests)
    ]
    used: dict[str, set[int]] = {split: set() for split in SPLITS}
    for q, info in enumerate(synthetic.header.requests):
        origin = source[info.question_id.rpartition(SOURCE_MARK)[0]]
        assert infos[origin].split == info.split
        drawn = {row.tobytes() for row in synthetic.arrays.root_logp[synthetic.positions(q)]}
        assert drawn <= first_logp[origin]
        used[info.split].add(origin)
    assert used["calibration"].isdisjoint(used["evaluation"])
    assert len(set(synthetic.header.requests)) == 24
    assert all(len(synthetic.split("calibration", task)) == 3 for task in TASKS)
    assert all(len(synthetic.split("evaluation", task)) == 5 for task in TASKS)


def test_requests_are_cut_by_length_with_look_ahead(recording: Trace) -> None:
    trace = make_synthetic(recording, only(0), requests=2, positions=40)
    assert trace.num_positions == 80
    assert {(info.finish_reason, info.max_new_tokens) for info in trace.header.requests} == {
        ("length", 41)
    }
    assert np.diff(trace.arrays.token_offset).tolist() == [41 + SIZES.chain_levels] * 2


def test_seeds_decide_everything(recording: Trace) -> None:
    first, again, other = (make_synthetic(recording, only(0), seed=seed) for seed in (3, 3, 4))
    assert first.digest == again.digest != other.digest
    assert other.header.provenance.seed == 4


def test_provenance_is_complete(recording: Trace, synthetic: Trace) -> None:
    header = synthetic.header
    given, notes = header.provenance, " ".join(header.provenance.notes)
    assert given.kind == "synthetic"
    assert given.generator.startswith("traces.synthetic ")
    assert given.seed == 0
    for published in QWEN235B.sets:
        for steps, value in published.acceptance:
            figure = f"{published.label}: acceptance length {value:g} at {steps}-1-{steps + 1} "
            assert sum(figure in source and "SpecForge" in source for source in given.sources) == 1
    assert len(given.sources) == 9
    assert recording.digest in notes
    for said in ("independent", "placeholders", "rank 0", "not an EAGLE-3 head"):
        assert said in notes
    assert (header.costing.target, header.costing.hardware, header.costing.tp) == (
        "qwen3-235b",
        "h100",
        8,
    )
    assert (header.target.name, header.drafter, header.recorded_as) == (
        "Qwen3-235B-A22B",
        "eagle3",
        "",
    )
    assert header.licence == "Apache-2.0; published figures: MIT"


# What is refused, and the command line.


def test_a_recording_that_never_agrees_deeply_is_refused() -> None:
    with pytest.raises(InputError, match=r"MT-Bench, calibration requests: .* of 3 steps"):
        make_synthetic(recording_of(lambda _: 1e-9))


def test_requests_without_deep_agreement_are_passed_over() -> None:
    trace = recording_of(lambda q: 0.1 if q < 9 else 0.7)
    synthetic = make_synthetic(trace, only(0))
    infos = synthetic.header.requests
    assert {info.question_id.rpartition(SOURCE_MARK)[0] for info in infos}.isdisjoint(
        f"{info.task}/{info.question_id}" for info in trace.header.requests[:9]
    )


def test_impossible_requests_are_refused(recording: Trace, synthetic: Trace) -> None:
    with pytest.raises(InputError, match="requests must be at least 2"):
        make_synthetic(recording, requests=1)
    with pytest.raises(InputError, match="positions must be at least 1"):
        make_synthetic(recording, positions=0)
    with pytest.raises(InputError, match="must be a real recording"):
        make_synthetic(synthetic)
    shallow = random_trace(np.random.default_rng(0))
    provenance = shallow.header.provenance.model_copy(update={"kind": "recorded"})
    header = shallow.header.model_copy(update={"provenance": provenance})
    with pytest.raises(UnknownNameError, match="No data set of the recording named 'mt_bench'"):
        make_synthetic(make_trace(header, shallow.arrays))
    with pytest.raises(InputError, match="a chain of 7 levels or more"):
        make_synthetic(make_trace(header.model_copy(update={"chain_levels": 6}), shallow.arrays))


def test_short_recorded_requests_are_passed_over() -> None:
    sizes = dataclasses.replace(SIZES, min_tokens=20, max_tokens=30)
    short = random_trace(np.random.default_rng(0), 9, sizes)
    infos = tuple(info.model_copy(update={"task": "gsm8k"}) for info in short.header.requests)
    provenance = short.header.provenance.model_copy(update={"kind": "recorded"})
    header = short.header.model_copy(update={"provenance": provenance, "requests": infos})
    with pytest.raises(InputError, match="calibration request of gsm8k with 32 positions"):
        make_synthetic(make_trace(header, short.arrays), only(2))


def test_the_command_writes_a_trace(
    recording: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "recorded.safetensors", tmp_path / "out.safetensors"
    save(recording, source)
    assert main([str(source), str(out), "--seed", "5", "--positions", "64"]) == 0
    trace = load(out)
    assert trace.digest == make_synthetic(recording, seed=5, positions=64).digest
    printed = capsys.readouterr().out
    assert printed.count("gsm8k") == 3
    assert trace.digest in printed
    assert main([str(tmp_path / "missing"), str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err
