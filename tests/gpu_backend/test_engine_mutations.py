"""Planted faults: each breaks an output that the suite compares, so the suite would notice."""

import dataclasses

import numpy as np
import pytest

from gpu_backend import acceptance, ragged_model, sampling, tree_layout, verifier
from gpu_backend.batch_drafter import BatchDrafter
from gpu_backend.kv_slots import SlotTable
from gpu_backend.sampling import Sampling
from gpu_backend.serving_batch import Serving
from tests.gpu_backend.serve import make_engine, make_pair, requests, serve, true_output
from tests.gpu_backend.tiny import tiny_model

WARM = Sampling(temperature=0.9)
TREE = "eagle3:levels=4,top_k=3,nodes=12"


@pytest.fixture(scope="module")
def close():
    return make_pair(draft="close")


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(8)
    return requests([rng.integers(2, 97, size).tolist() for size in (3, 9, 1, 6)], 12)


@pytest.fixture(scope="module")
def truth(asked):
    return {r.number: true_output(tiny_model(seed=1), r, WARM) for r in asked}


def served(close, asked):
    engine = make_engine(close, TREE, asked, batch=3, sampling=WARM)
    return serve(engine, asked), engine.log.freeze()


def positions_off_by_one(patch):
    original = ragged_model.RaggedModel.branch

    def branch(self, rows):
        moved = [
            ragged_model.Branches(r.key, r.tokens_n, r.depth_n + 1, r.place_n, r.above_nA)
            for r in rows
        ]
        return original(self, moved)

    patch.setattr(ragged_model.RaggedModel, "branch", branch)


def sibling_is_an_ancestor(patch):
    original = tree_layout.ancestors

    def leaking(parent_n, depth_n):
        above_nA = original(parent_n, depth_n)
        siblings = np.where(depth_n == 1, 1, tree_layout.NO_PARENT)  # the first of depth 1
        siblings[:2] = tree_layout.NO_PARENT
        return np.concatenate([above_nA, siblings[:, None]], axis=1)

    patch.setattr(tree_layout, "ancestors", leaking)


def rejected_rows_are_kept(patch):
    """The first rows are taken for the accepted ones: nothing is compacted."""
    original = SlotTable.commit
    patch.setattr(
        SlotTable, "commit", lambda self, key, rows: original(self, key, range(len(rows)))
    )


def accepts_one_too_many(patch):
    original = verifier.accept

    def generous(logits, trees, *rest):
        outcome = original(logits, trees, *rest)
        return [acceptance.Accepted([*part.tokens, part.tokens[-1]], part.rows) for part in outcome]

    patch.setattr(verifier, "accept", generous)


def noise_without_position(patch):
    original = sampling.gumbel
    patch.setattr(sampling, "gumbel", lambda seed, position, token: original(seed, seed, token))


def noise_of_the_row_not_of_the_token(patch):
    """The token after a node is drawn with the node's own noise."""
    patch.setattr(
        sampling.Sampling,
        "choose",
        lambda rule, logits, seed, at: sampling.choose(logits, seed, at - 1, rule),
    )


def a_token_is_emitted_beyond_the_block(patch):
    original = Serving.emit
    patch.setattr(
        Serving, "emit", lambda self, tokens, stops: original(self, [*tokens, tokens[-1]], stops)
    )


FAULTS = [
    positions_off_by_one,
    sibling_is_an_ancestor,
    rejected_rows_are_kept,
    accepts_one_too_many,
    noise_without_position,
    noise_of_the_row_not_of_the_token,
    a_token_is_emitted_beyond_the_block,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_changes_the_output(close, asked, truth, fault, monkeypatch):
    found, _ = served(close, asked)
    assert found == truth
    fault(monkeypatch)
    found, _ = served(close, asked)
    assert found != truth


def stops_are_checked_at_the_end_of_a_block(patch):
    def emit(self, tokens, stops):
        tokens = tokens[: self.remaining]
        self.output.extend(tokens)
        if tokens[-1] in stops:
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return len(tokens)

    patch.setattr(Serving, "emit", emit)


def test_fault_of_stopping_changes_the_output(asked, monkeypatch):
    """A draft that is the target, so that the stop lies inside an accepted block."""
    wanted = [dataclasses.replace(asked[0], max_new_tokens=6)]
    free = true_output(tiny_model(seed=1), wanted[0])
    place = next(i for i in (2, 3, 1) if free[i] not in free[:i])
    pair = make_pair(draft="same", stops={free[place]})

    def found():
        return serve(make_engine(pair, "chain:levels=6", wanted), wanted)[0]

    assert found() == free[: place + 1]
    stops_are_checked_at_the_end_of_a_block(monkeypatch)
    assert found() != free[: place + 1]


def draft_is_one_token_behind(patch):
    """The drafter forgets the bonus token: outputs stay right, acceptance falls."""
    original = BatchDrafter.commit
    patch.setattr(
        BatchDrafter,
        "commit",
        lambda self, slot, tokens, _: original(self, slot, tokens[:-1] or tokens),
    )


def draft_positions_off_by_one(patch):
    original = BatchDrafter._rows

    def rows(self, slot, depth, *rest):
        return original(self, slot, depth + 1, *rest)

    patch.setattr(BatchDrafter, "_rows", rows)


def accepts_one_too_few(patch):
    """The walk stops one node early: outputs stay right, for what is left out is drawn again."""
    original = verifier.accept

    def timid(*args):
        outcome = original(*args)
        return [
            acceptance.Accepted(part.tokens[:-1], part.rows[:-1]) if part.num_drafts else part
            for part in outcome
        ]

    patch.setattr(verifier, "accept", timid)


@pytest.mark.parametrize(
    "fault", [draft_is_one_token_behind, draft_positions_off_by_one, accepts_one_too_few]
)
def test_fault_that_lowers_acceptance_alone(asked, truth, fault, monkeypatch):
    """A draft equal to the target accepts every chain whole under greedy; faults show there."""
    pair = make_pair(draft="same")

    def accepted():
        engine = make_engine(pair, "chain:levels=3", asked, batch=3)
        serve(engine, asked)
        records = engine.log.freeze()
        drafted = np.minimum(records.verified_SB, records.emitted_SB)
        return int(records.accepted_SB.sum()), int(drafted.sum())

    whole, possible = accepted()
    assert whole == possible
    fault(monkeypatch)
    assert accepted()[0] < whole
