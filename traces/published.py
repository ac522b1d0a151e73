"""Published chain acceptance lengths that synthetic traces meet, and what their headers say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from traces.resample import ORDERS, Tilt
from traces.schema import Costing, ModelInfo, Provenance, RequestInfo, Trace, TraceHeader
from traces.version import package_version


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """Published chain acceptance lengths on one data set, bonus token included."""

    task: str
    """Name of the data set in the recording."""
    label: str
    """Name of the data set in the source."""
    acceptance: tuple[tuple[int, float], ...]
    """Draft steps and acceptance length."""


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """What a synthetic trace stands for, and the figures it meets."""

    name: str
    target: ModelInfo
    draft: ModelInfo
    costing: Costing
    source: str
    """Where the figures are published, and under which licence."""
    sets: tuple[PublishedSet, ...]


QWEN235B: Final = SyntheticSpec(
    name="qwen235b",
    target=ModelInfo(name="Qwen3-235B-A22B"),
    draft=ModelInfo(name="EAGLE-3 head (SpecForge)"),
    costing=Costing(target="qwen3-235b", hardware="h100", tp=8),
    source=(
        "Qwen3-235B-A22B-Instruct-2507 with its SpecForge EAGLE-3 head, SGLang, batch 8; "
        "sgl-project/SpecForge published benchmark data (SpecBundle), MIT licence"
    ),
    sets=(
        PublishedSet("mt_bench", "MT-Bench", ((3, 2.345), (5, 2.572), (7, 2.670))),
        PublishedSet("humaneval", "HumanEval", ((3, 3.239), (5, 4.084), (7, 4.487))),
        PublishedSet("gsm8k", "GSM8K", ((3, 2.876), (5, 3.352), (7, 3.511))),
    ),
)


NOTES: Final = (
    (
        "Method: positions are drawn with weights exp(sum of multiplier_K * min(level, K)) within "
        "one recorded request of the same split, by systematic resampling, fitted per data set "
        "and split so that chains of K steps together reach the published figures. Short "
        "requests are passed over, and those without both a position where the longest chain "
        "agrees and one where its first token does not, unless there are no others."
    ),
    (
        "Order: of {orders} random orders of a request's positions, the one whose chain walks come "
        "nearest to the mean of all its positions, to keep sampling noise out of few requests."
    ),
    (
        "Not right: positions are independent, so there is no correlation between the steps of a "
        "request beyond the request's own level, and neighbouring positions do not continue one "
        "another's paths."
    ),
    (
        "Not right: the draft is a resampled small language model, not an EAGLE-3 head; its "
        "confidences are not refitted, and it is called and costed as a head."
    ),
    (
        "Not right: everything beyond rank 0 (the ranks of missed tokens, and so what trees gain "
        "over chains) is the recording's; nothing is published for it."
    ),
    (
        "Not right: the spread between requests, prompt lengths and vocabulary size are the "
        "recording's; requests drawn from one recorded request are not independent of each other."
    ),
    (
        "Not right: tokens are placeholders drawn by seed, unfit for drafters that look at text, "
        "and every request is cut at one length."
    ),
    (
        "The published figures state neither the sampling settings nor the hardware, and their "
        "GSM8K prompts are few-shot; no result of the ECHO paper is fitted."
    ),
)
"""What was done, and what is not right about it."""


def synthetic_header(
    recording: Trace,
    spec: SyntheticSpec,
    infos: tuple[RequestInfo, ...],
    seed: int,
    fits: list[str],
) -> TraceHeader:
    """Header of a synthetic trace; ``fits`` are the notes of `fit_note`."""
    given = recording.header
    provenance = Provenance(
        kind="synthetic",
        generator=f"traces.synthetic {package_version()}",
        date=given.provenance.date,
        seed=seed,
        sources=tuple(
            f"{published.label}: acceptance length {value:g} at {steps}-1-{steps + 1} "
            f"(steps-topk-draft tokens); {spec.source}"
            for published in spec.sets
            for steps, value in published.acceptance
        ),
        notes=(*_notes(recording), *fits),
    )
    return given.model_copy(
        update={
            "name": spec.name,
            "target": spec.target,
            "draft": spec.draft,
            "drafter": "eagle3",
            "recorded_as": "",
            "costing": spec.costing,
            "tokenizer": "",
            "licence": "; ".join(filter(None, (given.licence, "published figures: MIT"))),
            "provenance": provenance,
            "requests": infos,
        }
    )


def fit_note(published: PublishedSet, split: str, tilt: Tilt, distinct: int) -> str:
    """What one fit came to, and from how many recorded positions it draws."""
    pairs = zip(tilt.chain_lengths, tilt.multipliers, strict=True)
    values = ", ".join(f"{multiplier:.3f} at {length}" for length, multiplier in pairs)
    return (
        f"Fit of {published.label}, {split}, drawn from {published.task}: "
        f"multipliers {values} steps; {tilt.kl_nats:.3f} nats "
        f"from the recording; {distinct} distinct recorded positions."
    )


def _notes(recording: Trace) -> tuple[str, ...]:
    given = recording.header
    pair = f"{given.draft.name} drafting for {given.target.name}"
    return (
        f"Drawn from the recording {given.name!r}, {pair}, SHA-256 {recording.digest}; its date.",
        *(note.format(orders=ORDERS) for note in NOTES),
    )
