"""What a trace is, in figures: the content of ``simulate traces info``. Nothing is printed here."""

from __future__ import annotations

from dataclasses import dataclass

from traces.realism import Realism, realism
from traces.schema import ModelInfo, Provenance, Trace
from traces.validate import named_arrays


@dataclass(frozen=True, slots=True)
class TraceCard:
    """All that ``simulate traces info`` says of a trace."""

    name: str
    target: ModelInfo
    draft: ModelInfo
    drafter: str
    temperature: float
    licence: str
    provenance: Provenance
    overall: Realism
    by_task: dict[str, Realism]
    """By data set, sorted."""
    array_bytes: int
    digest: str


def describe(trace: Trace) -> TraceCard:
    """Measure a valid trace."""
    header = trace.header
    of_task: dict[str, list[int]] = {}
    for q, info in enumerate(header.requests):
        of_task.setdefault(info.task, []).append(q)
    return TraceCard(
        name=header.name,
        target=header.target,
        draft=header.draft,
        drafter=header.drafter,
        temperature=header.temperature,
        licence=header.licence,
        provenance=header.provenance,
        overall=realism(trace, range(trace.num_requests)),
        by_task={task: realism(trace, requests) for task, requests in sorted(of_task.items())},
        array_bytes=sum(array.nbytes for array in named_arrays(trace.arrays).values()),
        digest=trace.digest,
    )
