"""What the engine tells a policy that weighs costs: what is unread, and what came of proposals."""

from dataclasses import replace

import pytest

from echo_policies.api import ModelDepth
from echo_policies.registry import parse
from echo_policies.schedulers.price import Price
from echo_policies.schedulers.static import Chain
from echo_policies.testing.play import LinearCosts
from gpu_backend.serving import ServeSettings, build_engine
from tests.gpu_backend.serve import GREEDY, Ticks, make_pair, requests, serve

LEVELS = 3
COSTS = LinearCosts()
ASKED = requests([[3, 4, 5, 6], [7, 8], [9, 10, 11]], [12, 9, 3])


class Noting(Chain):
    """Remembers what it is told: contexts and feedback of every step."""

    uses_costs = True

    levels: int = LEVELS

    def start(self):
        return [], []

    def begin(self, ctx, memory):
        memory[0].append(ctx)
        return super().begin(ctx, memory)

    def observe(self, memory, feedback):
        memory[1].append(feedback)
        return memory


class Careless(Noting):
    """Does not weigh costs."""

    uses_costs = False


def told(pair, *, batch=2, kind=Noting):
    """Contexts and feedback of a run."""
    return last_memory(pair, kind(), batch=batch)


def last_memory(pair, scheduler, *, batch=2):
    policy = parse("chain").model_copy(update={"scheduler": scheduler, "name": "noting"})
    settings = ServeSettings(
        num_slots=batch,
        k_max=0,
        max_tokens=max(request.num_tokens for request in ASKED),
        sampling=GREEDY,
        costs=COSTS,
    )
    engine = build_engine(pair, policy, settings, Ticks())
    serve(engine, ASKED)
    return engine._memory


@pytest.fixture(scope="module")
def same():
    """A draft that is the target: whatever it proposes is accepted."""
    return make_pair(draft="same")


def test_what_the_model_proposed_and_the_target_accepted(same):
    """Kind: drafts behind the end of an output that count as misses."""
    _, feedback = told(same)
    assert any(step.num_accepted for step in feedback)
    for step in feedback:
        for depth in step.model:
            assert depth.asked == depth.verified == depth.accepted
        asked = [depth.asked for depth in step.model]
        assert asked == sorted(asked, reverse=True)
        assert sum(asked) == step.num_verified


def test_a_lookup_is_no_models():
    pair = make_pair(draft="lookup")
    _, feedback = told(pair)
    assert {depth for step in feedback for depth in step.model} <= {ModelDepth()}
    both = replace(make_pair(draft="same"), looks_up=True, confidence=1.0)
    _, feedback = told(both)
    assert sum(depth.accepted for step in feedback for depth in step.model) > 0


def test_for_who_weighs_no_costs_nothing_is_counted(same):
    """Kind: looks at the device that nobody needs."""
    _, feedback = told(same, kind=Careless)
    assert any(step.num_verified for step in feedback)
    assert all((step.model, step.promised) == ((), 0.0) for step in feedback)


def test_what_scores_promise_is_held_against_what_was_accepted(same):
    """A draft that is the target proposes its likeliest tokens: all are accepted."""
    memory = last_memory(same, Price(levels=LEVELS, window=10**6))
    assert 0 < memory.promised < memory.paid
    other = last_memory(make_pair(draft="different"), Price(levels=LEVELS, window=10**6))
    assert 0 == other.paid < other.promised


def test_what_the_model_has_not_read(same):
    """First the prompt and an output token, later what the step before has emitted."""
    contexts, feedback = told(same, batch=1)
    number, first, emitted = 0, True, 0
    for ctx, step in zip(contexts, feedback, strict=True):
        (unread,), (remaining,) = ctx.unread, ctx.remaining
        assert remaining == int(ctx.remaining_B)
        if first:
            assert unread == len(ASKED[number].prompt) + 1
            assert remaining == ASKED[number].max_new_tokens - 1
        else:
            assert unread == emitted
        emitted = step.num_accepted + 1
        first = emitted >= remaining
        number += first
    assert number == len(ASKED)
    assert not any(ctx.looks_up for ctx in contexts)


@pytest.mark.parametrize("draft", [None, "same"])
def test_whether_candidates_are_looked_up(draft):
    pair = make_pair(draft="lookup") if draft is None else make_pair(draft=draft)
    contexts, _ = told(replace(pair, looks_up=True))
    assert all(ctx.looks_up for ctx in contexts)
    assert all(bool(ctx.unread) == (draft is not None) for ctx in contexts)
