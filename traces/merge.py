"""Recordings of one pair, made in parts, joined into one.

The parts may differ in when, where and with which libraries they were made; all of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from echo_policies.errors import InputError
from traces.header import differing_fields
from traces.request_key import RequestKey, key_label, requests_by_key
from traces.schema import Provenance, Trace, TraceArrays
from traces.store import make_trace
from traces.validate import named_arrays, validate

SAME: Final = (
    "target",
    "draft",
    "drafter",
    "recorded_as",
    "costing",
    "tokenizer",
    "vocab_size",
    "temperature",
    "levels",
    "beam_width",
    "root_width",
    "top_k",
    "chain_levels",
    "provenance.kind",
)
"""Header fields in which parts must agree, nested ones with all that is below them."""

OFFSETS: Final = ("position_offset", "token_offset")
NOT_STATED: Final = "not stated"


def merge(parts: Sequence[Trace], labels: Sequence[str], name: str) -> Trace:
    """Join recordings; requests keep their order, part after part.

    Args:
        parts: valid traces of the same pair with the same widths and levels.
        labels: what messages and the note of the result call each part, such as its file's name.
        name: name of the result.

    Raises:
        InputError: fewer than two parts, parts of different pairs or formats, or a request that
            occurs twice.
        TraceError: the parts together break an invariant, such as one question in both splits.
    """
    if len(parts) < 2:  # noqa: PLR2004 - two is what joining means
        raise InputError(f"Two or more traces must be given to join them; got {len(parts)}.")
    first = parts[0]
    for part, label in zip(parts[1:], labels[1:], strict=True):
        _check_same(first, part, labels[0], label)
    _check_once(parts, labels)
    header = first.header.model_copy(
        update={
            "name": name,
            "licence": _licence(parts, labels),
            "provenance": _provenance(parts, labels),
            "requests": tuple(info for part in parts for info in part.header.requests),
        }
    )
    merged = make_trace(header, _joined_arrays(parts))
    validate(merged)
    return merged


def _check_same(first: Trace, part: Trace, first_label: str, label: str) -> None:
    for difference in differing_fields(first.header, part.header):
        field = difference.field
        if any(field == same or field.startswith(f"{same}.") for same in SAME):
            raise InputError(
                f"Traces that are joined must agree in {field}; got {difference.one!r} in "
                f"{first_label} and {difference.other!r} in {label}. Record the parts alike."
            )
    names = [set(named_arrays(trace.arrays)) for trace in (first, part)]
    for array in sorted(names[0] ^ names[1]):
        has, lacks = (first_label, label) if array in names[0] else (label, first_label)
        raise InputError(
            f"Traces that are joined must hold the same arrays; {array} is in {has} and not in "
            f"{lacks}. Record the parts alike."
        )


def _check_once(parts: Sequence[Trace], labels: Sequence[str]) -> None:
    seen: dict[RequestKey, str] = {}
    for part, label in zip(parts, labels, strict=True):
        for key in requests_by_key(part, label):
            if key in seen:
                raise InputError(
                    f"A request must be in one of the joined traces only; {key_label(key)} is in "
                    f"{seen[key]} and in {label}. Leave one of them out."
                )
            seen[key] = label


def _joined_arrays(parts: Sequence[Trace]) -> TraceArrays:
    named = [named_arrays(part.arrays) for part in parts]
    joined: dict[str, npt.NDArray[Any]] = {}
    for name in named[0]:
        arrays = [part[name] for part in named]
        if name in OFFSETS:
            sizes = np.concatenate([np.diff(array) for array in arrays])
            joined[name] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        else:
            joined[name] = np.concatenate(arrays)
    return TraceArrays(**joined)


def _provenance(parts: Sequence[Trace], labels: Sequence[str]) -> Provenance:
    """Join what the parts say; where they differ, every value is listed."""
    origins = [part.header.provenance for part in parts]
    libraries = sorted({library for origin in origins for library in origin.libraries})
    devices = [origin.device for origin in origins]
    if any(devices):
        devices = [device or NOT_STATED for device in devices]
    seeds = {origin.seed for origin in origins}
    differ = any(_facts(origin) != _facts(origins[0]) for origin in origins)
    notes = _distinct(note for origin in origins for note in origin.notes)
    return Provenance(
        kind=origins[0].kind,
        generator=_listed(origin.generator for origin in origins),
        date=_listed(sorted(origin.date for origin in origins)),
        device=_listed(devices),
        libraries={
            library: _listed(origin.libraries.get(library, NOT_STATED) for origin in origins)
            for library in libraries
        },
        seed=seeds.pop() if len(seeds) == 1 else None,
        sources=_distinct(source for origin in origins for source in origin.sources),
        notes=(*notes, *_part_notes(parts, labels, states_facts=differ)),
    )


def _facts(origin: Provenance) -> str:
    """When, where and with what a part was made, in one line."""
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(origin.libraries.items()))
    seed = "" if origin.seed is None else f", seed {origin.seed}"
    made = f"{origin.date} by {origin.generator} on {origin.device or 'a device not stated'}{seed}"
    return f"{made}; {libraries or 'libraries not stated'}"


def _part_notes(
    parts: Sequence[Trace], labels: Sequence[str], *, states_facts: bool
) -> Iterable[str]:
    """One note per part: which requests came from it, its digest and, where asked, its facts."""
    for (part, label), (start, stop) in zip(
        zip(parts, labels, strict=True), _request_ranges(parts), strict=True
    ):
        facts = f"; made {_facts(part.header.provenance)}" if states_facts else ""
        yield f"requests {start} to {stop} joined from {label}, digest {part.digest}{facts}"


def _request_ranges(parts: Sequence[Trace]) -> list[tuple[int, int]]:
    """First and last request of every part in the result."""
    stops = np.cumsum([part.num_requests for part in parts]).tolist()
    return [(stop - part.num_requests, stop - 1) for stop, part in zip(stops, parts, strict=True)]


def _licence(parts: Sequence[Trace], labels: Sequence[str]) -> str:
    """The parts' licence texts, a line for each different one."""
    texts = [part.header.licence for part in parts]
    silent = [label for label, text in zip(labels, texts, strict=True) if not text]
    lines = list(_distinct(text for text in texts if text))
    if lines and silent:
        lines.append(f"Not stated for what comes from {', '.join(silent)}.")
    return "\n".join(lines)


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _listed(values: Iterable[str]) -> str:
    return "; ".join(_distinct(values))
