"""Every invariant is broken once, alone, and named with its array, index and value."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from echo_policies.errors import TraceError
from tests.traces.plants import BROKEN, put, sample
from traces.schema import Trace, TraceArrays, TraceHeader
from traces.validate import STAGES, check, validate


@pytest.fixture(scope="module")
def trace() -> Trace:
    return sample()


def test_the_sample_is_valid(trace: Trace) -> None:
    validate(trace)
    assert check(trace) == []


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_invariant_is_named(trace: Trace, case: str) -> None:
    change, message = BROKEN[case]
    broken = change(trace)
    found = check(broken)
    assert any(re.search(message, line) for line in found), found
    with pytest.raises(TraceError, match=r"^Trace 'random': .*record or generate it again"):
        validate(broken)


def test_check_collects_and_validate_raises_the_first(trace: Trace) -> None:
    broken = put("chain_logp", (2, 7), 0.25)(put("tokens", 0, -1)(trace))
    found = check(broken)
    assert [line.split("[")[0] for line in found] == ["tokens", "chain_logp"]
    with pytest.raises(TraceError, match="tokens"):
        validate(broken)


def test_further_violations_are_counted(trace: Trace) -> None:
    (message,) = check(put("tokens", slice(0, 3), -1)(trace))
    assert message.endswith("got -1 (2 more like it)")


def test_every_invariant_finds_a_planted_violation(trace: Trace) -> None:
    silent = {
        invariant
        for stage in STAGES
        for invariant in stage
        if not any(_finds(invariant, change(trace)) for change, _ in BROKEN.values())
    }
    assert not silent


def _finds(invariant: Callable[[TraceHeader, TraceArrays], str | None], broken: Trace) -> bool:
    try:
        with np.errstate(invalid="ignore"):
            return invariant(broken.header, broken.arrays) is not None
    except (IndexError, TypeError, ValueError):
        return False  # an earlier stage had refused it
