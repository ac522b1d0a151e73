"""Parts joined into one: the content of the whole, nothing dropped of where it comes from."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError
from tests.traces.build import random_trace, subset, traces
from traces.merge import SAME, merge
from traces.schema import Provenance, Trace
from traces.store import digest, make_trace
from traces.validate import check

RECORDED = Provenance(
    kind="recorded",
    generator="run_gpu record 0.1.0",
    date="2026-02-01",
    device="cuda, H200",
    libraries={"torch": "2.13.0", "numpy": "2.4"},
)


def changed(trace: Trace, **update: object) -> Trace:
    return make_trace(trace.header.model_copy(update=update), trace.arrays)


def same_content(one: Trace, other: Trace) -> bool:
    return digest(one.header, one.arrays) == digest(one.header, other.arrays)


@pytest.fixture(scope="module")
def whole() -> Trace:
    return random_trace(np.random.default_rng(5), 6)


@pytest.fixture(scope="module")
def parts(whole: Trace) -> list[Trace]:
    return [subset(whole, [0, 1]), subset(whole, [2, 3, 4, 5])]


@settings(deadline=None)
@given(trace=traces(max_requests=5), data=st.data())
def test_shards_make_the_whole(trace: Trace, data: st.DataObject) -> None:
    size = trace.num_requests
    order = data.draw(st.permutations(range(size)))
    assume(size > 1)
    cuts = data.draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=3))
    edges = [0, *sorted(cuts), size]
    shards = [order[a:b] for a, b in itertools.pairwise(edges)]
    merged = merge([subset(trace, shard) for shard in shards], list(map(str, shards)), "all")
    assert check(merged) == []
    assert same_content(merged, subset(trace, order))
    assert merged.header.requests == subset(trace, order).header.requests


def test_in_recorded_order_it_is_the_recording(whole: Trace, parts: list[Trace]) -> None:
    merged = merge(parts, ["a", "b"], whole.header.name)
    assert same_content(merged, whole)
    again = merged.header.model_copy(update={"provenance": whole.header.provenance})
    assert digest(again, merged.arrays) == whole.digest


def test_every_differing_fact_is_listed(parts: list[Trace]) -> None:
    later = RECORDED.model_copy(
        update={"date": "2026-01-31", "device": "", "libraries": {"torch": "2.12.0"}}
    )
    merged = merge(
        [changed(parts[0], provenance=RECORDED), changed(parts[1], provenance=later)],
        ["one.safetensors", "two.safetensors"],
        "joined",
    )
    origin = merged.header.provenance
    assert (origin.kind, origin.generator) == ("recorded", RECORDED.generator)
    assert origin.date == "2026-01-31; 2026-02-01"
    assert origin.device == "cuda, H200; not stated"
    assert origin.libraries == {"numpy": "2.4; not stated", "torch": "2.13.0; 2.12.0"}
    assert len(origin.notes) == 2
    assert origin.notes[0].startswith("requests 0 to 1 joined from one.safetensors, digest ")
    assert "2026-02-01" in origin.notes[0]
    assert "2 to 5 joined from two.safetensors" in origin.notes[1]
    assert "torch 2.12.0" in origin.notes[1]


def test_equal_facts_are_stated_once(parts: list[Trace]) -> None:
    merged = merge([changed(part, provenance=RECORDED) for part in parts], ["a", "b"], "x")
    origin = merged.header.provenance
    assert origin.model_copy(update={"notes": ()}) == RECORDED
    assert not any("torch" in note for note in origin.notes)


@pytest.mark.parametrize(
    ("licences", "joined"),
    [
        (("MIT", "MIT"), "MIT"),
        (("MIT", "Apache-2.0"), "MIT\nApache-2.0"),
        (("", "MIT"), "MIT\nNot stated for what comes from a."),
        (("", ""), ""),
    ],
)
def test_licences(parts: list[Trace], licences: tuple[str, str], joined: str) -> None:
    told = [changed(part, licence=text) for part, text in zip(parts, licences, strict=True)]
    assert merge(told, ["a", "b"], "x").header.licence == joined


OTHER: dict[str, object] = {
    "drafter": "eagle3",
    "recorded_as": "other",
    "tokenizer": "other",
    "vocab_size": 501,
    "temperature": 0.5,
    "levels": 5,
    "beam_width": 4,
    "root_width": 9,
    "top_k": 5,
    "chain_levels": 9,
}


@pytest.mark.parametrize("field", SAME)
def test_parts_of_other_pairs_are_refused(parts: list[Trace], field: str) -> None:
    header = parts[1].header
    nested = {
        "target": header.target.model_copy(update={"dtype": "bfloat16"}),
        "draft": header.draft.model_copy(update={"digest": "abc"}),
        "costing": header.costing.model_copy(update={"tp": 2}),
        "provenance": RECORDED,
    }
    name = field.partition(".")[0]
    other = changed(parts[1], **{name: OTHER.get(name, nested.get(name))})
    with pytest.raises(InputError, match=rf"must agree in {field}.* in a and .* in b\."):
        merge([parts[0], other], ["a", "b"], "x")


def test_the_first_differing_field_is_named(parts: list[Trace]) -> None:
    other = changed(parts[1], top_k=9, tokenizer="other")
    with pytest.raises(InputError, match="agree in tokenizer; got '' in a and 'other' in b"):
        merge([parts[0], other], ["a", "b"], "x")


def test_a_request_twice_is_refused_by_name(whole: Trace, parts: list[Trace]) -> None:
    with pytest.raises(InputError, match="code/1 is in a and in b"):
        merge([parts[0], subset(whole, [2, 1])], ["a", "b"], "x")
    with pytest.raises(InputError, match="b holds maths/2 as requests 0 and 1"):
        merge([parts[0], subset(whole, [2, 2])], ["a", "b"], "x")


def test_entropies_in_one_part_only_are_refused(whole: Trace, parts: list[Trace]) -> None:
    entropies = random_trace(np.random.default_rng(5), 6, entropies=True)
    with pytest.raises(InputError, match="root_entropy is in b and not in a"):
        merge([parts[0], subset(entropies, [2])], ["a", "b"], "x")
    arrays = dataclasses.replace(entropies.arrays, root_entropy=None)
    with pytest.raises(InputError, match="slot_entropy"):
        merge([parts[0], subset(make_trace(whole.header, arrays), [2])], ["a", "b"], "x")


def test_one_part_is_no_join(whole: Trace) -> None:
    with pytest.raises(InputError, match="Two or more"):
        merge([whole], ["a"], "x")
