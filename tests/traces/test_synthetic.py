"""Synthetic traces: published figures are met, refused where they cannot be, and said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError, UnknownNameError
from tests.traces.build import Sizes, random_trace
from traces.card import chain_walk, describe
from traces.published import QWEN235B, SyntheticSpec
from traces.resample import ORDERS, arrange, chain_levels, draw, fit_tilt, gains, walk
from traces.schema import Trace, TraceArrays
from traces.store import load, make_trace, save
from traces.synthetic import SOURCE_MARK, SPLITS, fit_report, main, make_synthetic
from traces.validate import check

TASKS = tuple(published.task for published in QWEN235B.sets)
PER_TASK = 9
STEPS = (3, 5, 7)
SIZES = Sizes(chain_levels=9, min_tokens=150, max_tokens=220)


def recording_of(agreement: Callable[[int], float], seed: int = 0) -> Trace:
    """A "recording" whose chain agrees to a geometric level, by a rate of each request's own."""
    base = random_trace(np.random.default_rng(seed), PER_TASK * len(TASKS), SIZES, entropies=True)
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
        task, split = TASKS[q % len(TASKS)], "calibration" if q % 4 == 1 else "evaluation"
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
    names = [field.name for field in dataclasses.fields(TraceArrays)][3:]
    assert "slot_entropy" in names
    rows = {bytes_of(recording, names, p) for p in range(recording.num_positions)}
    assert all(bytes_of(synthetic, names, p) in rows for p in range(synthetic.num_positions))


def bytes_of(trace: Trace, names: list[str], position: int) -> bytes:
    return b"".join(getattr(trace.arrays, name)[position].tobytes() for name in names)


def test_requests_draw_from_one_request_of_their_split(recording: Trace, synthetic: Trace) -> None:
    infos = recording.header.requests
    source = {(info.task, info.question_id): q for q, info in enumerate(infos)}
    first_logp = [
        {row.tobytes() for row in recording.arrays.root_logp[recording.positions(q)]}
        for q in range(recording.num_requests)
    ]
    used: dict[str, set[int]] = {split: set() for split in SPLITS}
    for q, info in enumerate(synthetic.header.requests):
        origin = source[info.task, info.question_id.rpartition(SOURCE_MARK)[0]]
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


# The fit.


def levels_of(recording: Trace, task: str) -> list[np.ndarray]:
    ids = recording.split("evaluation", task)
    return [chain_levels(recording.arrays.path_rank[recording.positions(q)], 7) for q in ids]


def pooled(levels: list[np.ndarray], weights: list[np.ndarray], steps: int) -> float:
    """Tokens per step of requests that emit equally many tokens."""
    lengths = [1 + np.minimum(x, steps) @ w for x, w in zip(levels, weights, strict=True)]
    return len(lengths) / sum(1 / length for length in lengths)


def test_own_figures_leave_the_weights_uniform(recording: Trace) -> None:
    levels = levels_of(recording, TASKS[0])
    uniform = [np.full(len(level), 1 / len(level)) for level in levels]
    targets = {steps: pooled(levels, uniform, steps) for steps in STEPS}
    tilt = fit_tilt(levels, np.full(len(levels), 1 / len(levels)), targets, "own")
    assert tilt.multipliers == pytest.approx((0, 0, 0), abs=1e-5)
    assert tilt.kl_nats == pytest.approx(0, abs=1e-9)
    for level, flat in zip(levels, uniform, strict=True):
        assert tilt.weights(level) == pytest.approx(flat, rel=1e-4)


def test_a_known_tilt_is_found() -> None:
    level = np.repeat([0, 1, 2], [10, 20, 30])
    weights = np.exp(0.7 * np.minimum(level, 1) - 0.4 * level)
    weights /= weights.sum()
    targets = {k: 1 + float(np.minimum(level, k) @ weights) for k in (1, 2)}
    tilt = fit_tilt([level], np.ones(1), targets, "known")
    assert tilt.multipliers == pytest.approx((0.7, -0.4), abs=1e-5)
    assert tilt.weights(level) == pytest.approx(weights)
    assert tilt.kl_nats == pytest.approx(float(weights @ np.log(weights * 60)))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), wanted=st.sampled_from(QWEN235B.sets))
def test_weights_meet_the_targets_in_tokens_per_step(seed: int, wanted: object) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.3, 0.8, 4)
    levels = [np.minimum(rng.geometric(1 - rate, 400) - 1, 7) for rate in rates]
    levels[0] = np.minimum(levels[0], 2)  # it lacks the support, so the others make up for it
    targets = dict(wanted.acceptance)  # type: ignore[attr-defined]
    tilt = fit_tilt(levels, np.full(4, 0.25), targets, "random")
    weights = [tilt.weights(level) for level in levels]
    for steps, value in targets.items():
        assert pooled(levels, weights, steps) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("deepest", "steps", "value"), [(1, 3, 3.239), (3, 5, 4.084), (5, 7, 4.487)]
)
def test_targets_out_of_reach_are_named(deepest: int, steps: int, value: float) -> None:
    level = np.arange(200) % (deepest + 1)
    with pytest.raises(InputError, match=rf"HumanEval.* of {steps} steps must be {value}, but"):
        fit_tilt([level], np.ones(1), dict(QWEN235B.sets[1].acceptance), "HumanEval")


def test_a_recording_that_never_agrees_deeply_is_refused() -> None:
    with pytest.raises(InputError, match=r"MT-Bench, calibration requests: .* of 3 steps"):
        make_synthetic(recording_of(lambda _: 1e-9))


def test_systematic_draws_keep_expected_counts() -> None:
    rng = np.random.default_rng(0)
    level = rng.integers(0, 8, 300)
    weights = rng.random(300)
    weights /= weights.sum()
    drawn = draw(rng, level, weights, 128)
    for value in range(8):
        expected = 128 * weights[level == value].sum()
        assert abs((level[drawn] == value).sum() - expected) <= 1


def test_walks_count_the_last_step_in_full() -> None:
    steps, tokens = walk(np.array([[2, 0, 0, 3], [0, 1, 0, 0]]), 2)
    assert steps.tolist() == [2, 3]  # 0, 3; and 0, 1, 3
    assert tokens.tolist() == [6, 4]


def test_the_order_is_a_permutation_with_a_typical_walk() -> None:
    rng = np.random.default_rng(0)
    level = rng.integers(0, 8, 128)
    order = arrange(rng, level, STEPS)
    assert sorted(order.tolist()) == list(range(128))
    for steps, mean in zip(STEPS, 1 + gains(level, STEPS).mean(axis=0), strict=True):
        walked_steps, tokens = walk(level[order][None], steps)
        assert float(tokens[0] / walked_steps[0]) == pytest.approx(mean, rel=0.05)
    assert ORDERS > 1


# What is refused, and the command line.


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
