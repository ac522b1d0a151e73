"""The card of a trace: every group, overall and by data set, adds up."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings

from tests.traces.build import Sizes, random_trace, traces
from traces.card import describe
from traces.realism import realism
from traces.schema import Trace


def test_the_card_of_a_trace() -> None:
    sizes = Sizes(root_width=16, chain_levels=6, min_tokens=100, max_tokens=100)
    trace = random_trace(np.random.default_rng(0), 9, sizes)
    card = describe(trace)
    assert list(card.by_task) == ["chat", "code", "maths"]
    splits = {
        task: {name: (size.requests, size.positions) for name, size in group.splits.items()}
        for task, group in card.by_task.items()
    }
    assert splits == {
        "chat": {"calibration": (0, 0), "evaluation": (3, 297)},
        "code": {"calibration": (3, 297), "evaluation": (0, 0)},
        "maths": {"calibration": (0, 0), "evaluation": (3, 297)},
    }
    overall = card.overall
    assert (overall.requests, overall.positions) == (9, 891)
    assert overall.output_tokens.quartiles == (100, 100, 100)
    assert [walk.levels for walk in overall.walks] == [3, 5]
    chain = overall.within_first[1].cumulative
    assert list(chain) == sorted(chain, reverse=True)
    assert 0.5 < chain[0] == overall.ranks[0]["1"]
    # The builder draws the target from the draft, so that it is about calibrated.
    assert overall.reliability[0].ece_equal_mass < 0.15
    assert overall.reliability[0].auc > 0.7
    assert card.digest == trace.digest
    assert card.array_bytes > 297 * 3 * 16 * 2


def test_lengths_of_hand_made_requests() -> None:
    trace = random_trace(np.random.default_rng(2), 3)
    group = realism(trace, [0, 2])
    prompts = [trace.header.requests[q].prompt_tokens for q in (0, 2)]
    outputs = [len(trace.output_tokens(q)) for q in (0, 2)]
    for lengths, tokens in ((group.prompt_tokens, prompts), (group.output_tokens, outputs)):
        assert (lengths.least, lengths.most) == (min(tokens), max(tokens))
        assert lengths.mean == lengths.quartiles[1] == sum(tokens) / 2
    reasons = [trace.header.requests[q].finish_reason for q in (0, 2)]
    assert group.finish_reasons == {reason: reasons.count(reason) for reason in set(reasons)}


@settings(deadline=None, max_examples=20)
@given(trace=traces())
def test_data_sets_add_up(trace: Trace) -> None:
    card = describe(trace)
    groups = list(card.by_task.values())
    overall = card.overall
    assert overall.positions == trace.num_positions == sum(g.positions for g in groups)
    assert overall.requests == sum(g.requests for g in groups)
    assert sum(overall.finish_reasons.values()) == overall.requests
    assert sum(size.positions for size in overall.splits.values()) == overall.positions
    for level, report in enumerate(overall.reliability):
        assert report.accepted == overall.within_first[1].succeeded[level]
        assert report.accepted == sum(g.reliability[level].accepted for g in groups)
        assert math.isnan(report.ece) or 0 <= report.ece <= 1
    correlation = overall.position_autocorrelation.pooled
    assert math.isnan(correlation) or -1 <= correlation <= 1
