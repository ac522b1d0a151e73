"""Synthetic traces of models that were not recorded: a recording's positions, drawn anew.

How confidence, rank and acceptance hang together is the recording's; how far the greedy chain
agrees meets published acceptance lengths. ``python -m traces.synthetic RECORDING OUT`` writes one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from echo_policies.errors import EchoError, InputError, UnknownNameError
from traces.published import QWEN235B, PublishedSet, SyntheticSpec, fit_note, synthetic_header
from traces.resample import Tilt, arrange, chain_levels, draw, fit_tilt, walk
from traces.schema import PAST_END, SOURCE_MARK, RequestInfo, Trace, TraceArrays
from traces.store import load, make_trace, save

Split = Literal["calibration", "evaluation"]
Int = npt.NDArray[np.int64]

SPLITS: Final[tuple[Split, ...]] = ("calibration", "evaluation")
MIN_POSITIONS: Final = 32
"""Recorded requests with fewer usable positions are passed over: they would only be repeated."""

NOT_PER_POSITION: Final = frozenset({"position_offset", "token_offset", "tokens"})


@dataclass(frozen=True, slots=True)
class FitRow:
    """One published acceptance length and what a synthetic trace makes of it.

    All four are tokens per step of a chain, bonus token included.
    """

    task: str
    steps: int
    target: float
    drawn: float
    """Over all positions, each request weighted by its steps: without the noise of a walk."""
    walked: float
    """Of the walk from every request's first position; each last step counts in full."""
    emitted: float
    """Of the same walk with nothing emitted past the end, as `traces.chain_walk` counts."""


def make_synthetic(
    recording: Trace,
    spec: SyntheticSpec = QWEN235B,
    *,
    seed: int = 0,
    requests: int = 8,
    positions: int = 128,
) -> Trace:
    """Draw a synthetic trace from a recording; equal arguments give equal traces.

    Every synthetic request draws from the positions of one recorded request of its split and of
    the data sets that stand in for its own, the recorded ones in turn. Passed over are those too
    short and, where there are others, those without both a position where the longest chain agrees
    and one where the first token does not. Data sets and splits are fitted each for itself.

    Args:
        recording: the real recording; it is not modified.
        spec: what the trace stands for.
        seed: of every draw.
        requests: requests per data set; 3 in 8 of them are for calibration, at least one.
        positions: positions per request.

    Raises:
        InputError: the recording is synthetic or too shallow, a data set has too few positions, or
            a published figure is beyond what they can reach.
        UnknownNameError: the recording lacks a data set.
    """
    _check(recording, spec, requests, positions)
    calibration = max(1, requests * 3 // 8)
    counts = {"calibration": calibration, "evaluation": requests - calibration}
    rng_draw, rng_tokens = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    usable_P = (recording.arrays.path_rank != PAST_END).all(axis=1)
    infos: list[RequestInfo] = []
    chosen: list[Int] = []
    fits: list[str] = []
    for published in spec.sets:
        for split in SPLITS:
            pool = _pool(recording, published, split, usable_P, counts[split])
            tilt = _fit(recording, published, split, pool)
            drawn = [_drawn(recording, index, tilt, positions, rng_draw) for _, index in pool]
            fits.append(fit_note(published, split, tilt, len(np.unique(np.concatenate(drawn)))))
            chosen += drawn
            infos += _infos(recording, published, [q for q, _ in pool], positions)
    header = synthetic_header(recording, spec, tuple(infos), seed, fits)
    arrays = _arrays(recording, chosen, positions, rng_tokens)
    return make_trace(header, arrays)


def fit_report(
    trace: Trace, spec: SyntheticSpec = QWEN235B, split: Split | None = None
) -> tuple[FitRow, ...]:
    """Compare a synthetic trace, or one split of it, with the published figures."""
    rows = []
    for published in spec.sets:
        ids = [q for s in SPLITS if split in (None, s) for q in trace.split(s, published.task)]
        for steps, target in published.acceptance:
            ranks = [trace.arrays.path_rank[trace.positions(q)] for q in ids]
            levels = [chain_levels(rank, steps) for rank in ranks]
            size = sum(len(level) for level in levels)
            drawn = size / sum(len(level) / (1 + level.mean()) for level in levels)
            walks = np.array([walk(level[None], steps) for level in levels])[..., 0].sum(axis=0)
            walked, emitted = float(walks[1] / walks[0]), float(size / walks[0])
            rows.append(FitRow(published.task, steps, target, float(drawn), walked, emitted))
    return tuple(rows)


def _check(recording: Trace, spec: SyntheticSpec, requests: int, positions: int) -> None:
    header = recording.header
    if requests < len(SPLITS):
        raise InputError(f"requests must be at least 2, one for each split; got {requests}.")
    if positions < 1:
        raise InputError(f"positions must be at least 1; got {positions}.")
    if header.provenance.kind != "recorded":
        raise InputError(
            f"recording {header.name!r} must be a real recording; its provenance is "
            f"{header.provenance.kind!r}. Give the file that it was made from."
        )
    longest = max(steps for published in spec.sets for steps, _ in published.acceptance)
    if header.chain_levels < longest:
        raise InputError(
            f"recording {header.name!r} must have a chain of {longest} levels or more, as the "
            f"published figures do; got {header.chain_levels}. Record with more chain levels."
        )
    tasks = {info.task for info in header.requests}
    for published in spec.sets:
        if published.task not in tasks:
            raise UnknownNameError("data set of the recording", published.task, tasks)


def _pool(
    recording: Trace,
    published: PublishedSet,
    split: Split,
    usable_P: npt.NDArray[np.bool_],
    count: int,
) -> list[tuple[int, Int]]:
    """Recorded request and its usable positions for each of ``count`` synthetic requests."""
    found = []
    for q in recording.split(split, published.task):
        where = recording.positions(q)
        index = np.flatnonzero(usable_P[where]) + where.start
        if len(index) >= MIN_POSITIONS:
            found.append((q, index))
    if not found:
        raise InputError(
            f"recording {recording.header.name!r} must have a {split} request of "
            f"{published.task} with {MIN_POSITIONS} positions whose output goes on for "
            f"{recording.header.chain_levels} tokens; it has none. Record more requests, or longer "
            "outputs."
        )
    # A request that cannot go all the way up and down would push its share on the others.
    longest = max(steps for steps, _ in published.acceptance)
    agrees_PK = recording.arrays.path_rank[:, :longest] == 0
    whole_P, none_P = agrees_PK.all(axis=1), ~agrees_PK[:, 0]
    supported = [(q, i) for q, i in found if whole_P[i].any() and none_P[i].any()] or found
    return [supported[turn % len(supported)] for turn in range(count)]


def _fit(
    recording: Trace, published: PublishedSet, split: Split, pool: list[tuple[int, Int]]
) -> Tilt:
    targets = dict(published.acceptance)
    path_rank = recording.arrays.path_rank
    levels = [chain_levels(path_rank[index], max(targets)) for _, index in pool]
    share = np.full(len(pool), 1 / len(pool))
    return fit_tilt(levels, share, targets, f"{published.label}, {split} requests")


def _drawn(
    recording: Trace, index: Int, tilt: Tilt, positions: int, rng: np.random.Generator
) -> Int:
    """Recorded positions of one synthetic request, in its order."""
    level = chain_levels(recording.arrays.path_rank[index], max(tilt.chain_lengths))
    chosen = draw(rng, level, tilt.weights(level), positions)
    return index[chosen][arrange(rng, level[chosen], tilt.chain_lengths)]


def _infos(
    recording: Trace, published: PublishedSet, sources: list[int], positions: int
) -> list[RequestInfo]:
    """What is known of synthetic requests that are drawn from these recorded ones."""
    infos = []
    for turn, q in enumerate(sources):
        info = recording.header.requests[q]
        number = sources[:turn].count(q)
        update = {
            "task": published.task,
            "question_id": f"{info.task}/{info.question_id}{SOURCE_MARK}{number}",
            "max_new_tokens": positions + 1,
            "finish_reason": "length",
        }
        infos.append(info.model_copy(update=update))
    return infos


def _arrays(
    recording: Trace, chosen: Sequence[Int], positions: int, rng: np.random.Generator
) -> TraceArrays:
    header, given = recording.header, recording.arrays
    size = len(chosen)
    # The look-ahead is as long as the paths, so that none of them ends.
    tokens = positions + 1 + header.chain_levels
    index = np.concatenate(chosen)
    per_position = {}
    for field in fields(TraceArrays):
        array = getattr(given, field.name)
        if field.name not in NOT_PER_POSITION and array is not None:
            per_position[field.name] = array[index]
    return TraceArrays(
        position_offset=np.arange(size + 1, dtype=np.int64) * positions,
        token_offset=np.arange(size + 1, dtype=np.int64) * tokens,
        tokens=rng.integers(0, header.vocab_size, size * tokens, dtype=np.int32),
        **per_position,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write a synthetic trace and print how it meets the published figures."""
    parser = argparse.ArgumentParser(prog="python -m traces.synthetic", description=__doc__)
    parser.add_argument("recording")
    parser.add_argument("out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=8, help="per data set")
    parser.add_argument("--positions", type=int, default=128, help="per request")
    given = parser.parse_args(argv)
    try:
        trace = make_synthetic(
            load(given.recording),
            seed=given.seed,
            requests=given.requests,
            positions=given.positions,
        )
        save(trace, given.out)
    except EchoError as error:
        print(error, file=sys.stderr)
        return 2
    print("data set      K  target  drawn   walked  emitted")
    for row in fit_report(trace):
        figures = f"{row.target:.3f}   {row.drawn:.3f}   {row.walked:.3f}   {row.emitted:.3f}"
        print(f"{row.task:12} {row.steps:2}  {figures}")
    print(f"digest {trace.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
