"""A draft model reads the prompt of a request when it is first asked to draft for it."""

import itertools

import pytest

from echo_policies.api import DraftPlan
from echo_policies.registry import parse
from echo_policies.schedulers.static import Chain
from gpu_backend.serving import ServeSettings, build_engine
from tests.gpu_backend.serve import GREEDY, Ticks, make_engine, make_pair, requests, serve

LEVELS = 4
ASKED = requests(
    [list(range(3, 3 + n)) for n in (1, 19, 8, 30, 2, 7, 23)], [30, 22, 9, 17, 12, 25, 14]
)


class Sometimes(Chain):
    """Drafts in every sixth step."""

    def begin(self, ctx, memory):
        plan, state = super().begin(ctx, memory)
        return (plan, state) if ctx.step % 6 == 0 else (DraftPlan(0), None)


@pytest.fixture(scope="module")
def same():
    """A draft that is the target, so that drafts are accepted whole if it has read the text."""
    return make_pair(draft="same")


def engine_of(pair, *, batch, chunk, row_chunk):
    policy = parse("chain").model_copy(
        update={"scheduler": Sometimes(levels=LEVELS), "name": "sometimes"}
    )
    settings = ServeSettings(
        num_slots=batch,
        k_max=0,
        max_tokens=max(request.num_tokens for request in ASKED),
        sampling=GREEDY,
        prefill_chunk=chunk,
    )
    engine = build_engine(pair, policy, settings, Ticks())
    engine.drafter._row_chunk = row_chunk
    return engine


@pytest.mark.parametrize(
    ("batch", "chunk", "row_chunk"), list(itertools.product((1, 3), (1, 7, None), (2, 512)))
)
def test_drafts_are_those_of_a_draft_that_has_read_everything(same, batch, chunk, row_chunk):
    """Kind: a prompt that is read in part, twice, or behind what was emitted since."""
    engine = engine_of(same, batch=batch, chunk=chunk, row_chunk=row_chunk)
    served = serve(engine, ASKED)
    assert served == serve(make_engine(same, "autoregressive", ASKED), ASKED)
    drafted = 0
    left = {request.number: request.max_new_tokens - 1 for request in ASKED}
    for request_B, emitted_B, accepted_B, verified_B, *_ in engine.log.slots:
        for slot in (verified_B > 0).nonzero()[0]:
            drafted += 1
            assert accepted_B[slot] == min(LEVELS, left[request_B[slot]] - 1)
        for slot in (request_B >= 0).nonzero()[0]:
            left[request_B[slot]] -= emitted_B[slot]
    assert drafted >= len(ASKED)


def test_a_request_that_is_never_asked_for_is_never_read(same, monkeypatch):
    """Kind: work for drafts that nobody makes."""
    rows = []
    original = type(engine_of(same, batch=1, chunk=7, row_chunk=8).drafter.draft).extend

    def counted(self, extensions, **options):
        if options.get("scores") is False:
            rows.append(sum(len(extension.tokens) for extension in extensions))
        return original(self, extensions, **options)

    engine = engine_of(same, batch=1, chunk=None, row_chunk=512)
    monkeypatch.setattr(Sometimes, "begin", lambda *_: (DraftPlan(0), None))
    monkeypatch.setattr(type(engine.drafter.draft), "extend", counted)
    serve(engine, ASKED)
    assert not rows
