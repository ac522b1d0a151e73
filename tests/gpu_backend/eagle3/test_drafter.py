"""Drafts of a batch are those of one request at a time, computed anew by hand for every node."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from echo_policies.api import DraftPlan
from echo_policies.presets import PRESETS
from gpu_backend import verifier
from gpu_backend.acceptance import Accepted
from gpu_backend.attention import ATTENTION_NAME
from gpu_backend.eagle3.drafter import EagleDrafter
from gpu_backend.eagle3.loading import load_head
from gpu_backend.eagle3.pending import PendingPairs
from gpu_backend.eagle3.ragged_head import RaggedHead
from gpu_backend.eagle3.writing import save_head
from gpu_backend.parity import check_parity
from gpu_backend.ragged_pool import Extension, RaggedPool
from gpu_backend.sampling import Sampling
from gpu_backend.serving import ServeSettings
from gpu_backend.tree_layout import NO_PARENT
from tests.gpu_backend.eagle3.heads import (
    LAYERS,
    SlowDraft,
    features,
    head_config,
    head_pair,
    tiny_head,
    tiny_target,
)
from tests.gpu_backend.serve import calibrated, make_engine, requests, serve, true_output
from tests.gpu_backend.tiny import VOCAB

LENGTHS = (1, 9, 2, 23)
LIMITS = (14, 18, 12, 16)
CHAIN = "chain:levels=4"
TREE = "eagle3:levels=3,top_k=3,nodes=8"
WIDE = "eagle3:levels=3,top_k=30,nodes=90"
"""So wide that even a random head is right now and then."""


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(5)
    return requests([rng.integers(2, VOCAB, size).tolist() for size in LENGTHS], LIMITS)


@pytest.fixture(scope="module")
def pair():
    return head_pair(tiny_head(attention=ATTENTION_NAME))


@pytest.fixture(scope="module")
def truth(asked):
    plain = tiny_target()
    return {request.number: true_output(plain, request) for request in asked}


class Witness:
    """Notes every node that a run expanded: (request, text, branch) to children."""

    def __init__(self, engine):
        self.drafter = engine.drafter
        self.nodes = {}
        engine.observer = self

    def decided(self, step):
        layers = step.decision.forest.layers
        if not layers:
            return
        for slot, held in step.served.items():
            text = (*held.request.prompt, *held.output)
            branches = [()]
            for depth, (children, frontier) in enumerate(self.drafter.revealed):
                if frontier is not None:
                    branches = self.below(layers, slot, depth)
                    places = torch.nonzero(frontier.mask_BF[slot])[:, 0].tolist()
                else:
                    places = [0] if (children.logp_BFk[slot] > -np.inf).any() else []
                for place in places:
                    index = 0 if frontier is None else int(frontier.index_BF[slot, place])
                    key = (held.request.number, text, branches[index])
                    self.nodes[key] = (
                        children.token_BFk[slot, place].tolist(),
                        children.logp_BFk[slot, place].tolist(),
                    )

    def below(self, layers, slot, depth):
        """Branches of the candidates of a depth."""
        branches = [()]
        for layer, tokens in zip(layers[:depth], self.drafter.token_layers, strict=False):
            parents = layer.parent_BW
            above = [0] * layer.width if parents is None else parents[slot].tolist()
            branches = [
                (*branches[parent], token)
                for parent, token in zip(above, tokens[slot].tolist(), strict=True)
            ]
        return branches


def accept_at_random(monkeypatch, seed=0):
    """Let the target accept a random path of every tree, so that any head is often right."""
    rng = np.random.default_rng(seed)

    def some_path(logits, trees, *rest):
        del logits, rest
        outcome = []
        for tree in trees:
            rows, tokens = [0], []
            while True:
                children = np.flatnonzero(tree.parent_n == rows[-1])
                if not len(children) or rng.random() < 0.2:
                    break
                rows.append(int(rng.choice(children)))
                tokens.append(int(tree.tokens_n[rows[-1]]))
            outcome.append(Accepted([*tokens, int(rng.integers(2, VOCAB))], rows))
        return outcome

    assert NO_PARENT < 0
    monkeypatch.setattr(verifier, "accept", some_path)


def drafted(pair, asked, spec, *, batch=3, **changes):
    engine = make_engine(pair, spec, asked, batch=batch, k_max=300, **changes)
    witness = Witness(engine)
    out = serve(engine, asked)
    return witness.nodes, out, engine.log.freeze()


def first_difference(nodes, slow):
    """The first node whose children are not the slow draft's; None if there is none."""
    for (_, text, branch), (tokens, logp) in nodes.items():
        wanted_tokens, wanted_logp = slow.children(text, branch, len(tokens))
        is_near = np.allclose(logp, wanted_logp, rtol=2e-3, atol=2e-3)
        # Two tokens as good as equal may stand either way round.
        if not is_near or (
            tokens != wanted_tokens and np.diff(wanted_logp).max(initial=-1) < -2e-3
        ):
            return text, branch
        if set(tokens[:-1]) - set(wanted_tokens):
            return text, branch
    return None


@pytest.mark.parametrize("spec", [CHAIN, TREE, "static:tree=0/1/2/00/01/10/000/001/0000"])
def test_drafts_are_those_of_one_request_by_hand(pair, asked, spec, monkeypatch):
    """Whatever path was accepted before, and none at all too; requests come and go."""
    accept_at_random(monkeypatch)
    nodes, _, log = drafted(pair, asked, spec)
    assert len({len(text) for _, text, _ in nodes}) > 10
    assert set(np.unique(log.accepted_SB)) >= {0, 1, 2}
    assert first_difference(nodes, SlowDraft(pair.head, tiny_target())) is None


VARIANTS = [
    {"norm_before_residual": True, "taps": (0, 3, 7)},
    {"fc_norm": True, "norm_output": True, "taps": (2, 3, 3)},
    {"hidden_size": 24, "num_key_value_heads": 4, "head_dim": 8},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_variants_of_the_head(asked, changes, monkeypatch):
    accept_at_random(monkeypatch)
    pair = head_pair(tiny_head(head_config(**changes), attention=ATTENTION_NAME))
    nodes, _, _ = drafted(pair, asked, TREE, batch=2)
    assert first_difference(nodes, SlowDraft(pair.head, tiny_target())) is None


@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_a_head_from_files_drafts_beyond_its_trained_length(
    tmp_path, pair, asked, layout, monkeypatch
):
    accept_at_random(monkeypatch)
    head = tiny_head(head_config(rope_parameters={"rope_type": "default", "rope_theta": 50.0}))
    save_head(head, tmp_path / "head", layout, target_num_layers=LAYERS, with_embedding=True)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 4}))
    found = load_head(tmp_path / "head", pair.target, vocab_size=VOCAB, attention=ATTENTION_NAME)
    nodes, _, _ = drafted(dataclasses.replace(pair, head=found.head), asked, TREE)
    assert max(len(text) for _, text, _ in nodes) > 20
    assert first_difference(nodes, SlowDraft(head, tiny_target())) is None


def test_chunks_of_the_prompt_change_no_draft(pair, asked):
    whole, outputs, _ = drafted(pair, asked, TREE, prefill_chunk=None)
    for chunk in (1, 7, 64):
        nodes, same, _ = drafted(pair, asked, TREE, prefill_chunk=chunk)
        assert same == outputs
        assert nodes.keys() == whole.keys()
        for key, (tokens, logp) in nodes.items():
            assert tokens == whole[key][0]
            np.testing.assert_allclose(logp, whole[key][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", PRESETS)
def test_output_is_the_targets_own(pair, asked, truth, policy):
    engine = make_engine(pair, policy, asked, pool_requests=2)
    assert isinstance(engine.drafter, EagleDrafter) == (policy != "autoregressive")
    assert serve(engine, asked) == truth


@pytest.mark.parametrize("batch", [1, 4])
def test_output_is_the_targets_own_where_drafts_are_accepted(pair, asked, truth, batch):
    _, out, log = drafted(pair, asked, WIDE, batch=batch)
    assert out == truth
    assert log.accepted_SB.sum() >= 5


def test_replay_takes_the_same_decisions(pair, asked):
    settings = ServeSettings(num_slots=3, k_max=40, max_tokens=40, sampling=Sampling())
    for spec in ("eagle3:levels=3,top_k=20,nodes=40", "echo:levels=3,top_k=16"):
        report = check_parity(pair, calibrated(spec), settings, asked)
        assert report.first is None
        assert report.accepted > 0


def embedding_and_hidden_swapped(head, patch):
    del patch
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.self_attn, name).weight
        weight.data = weight.data.roll(head.config.hidden_size, dims=1)


def map_dropped(head, patch):
    del patch
    head.token_ids = torch.arange(len(head.token_ids))


def map_permuted(head, patch):
    del patch
    head.token_ids = head.token_ids.flip(0)


def taps_off_by_one(head, patch):
    del patch
    head.config = dataclasses.replace(head.config, taps=tuple(tap + 1 for tap in head.config.taps))


def norm_before_residual_flipped(head, patch):
    del patch
    head.config = dataclasses.replace(head.config, norm_before_residual=True)


def normed_output_is_fed(head, patch):
    del patch
    head.config = dataclasses.replace(head.config, norm_output=True)


def positions_off_by_one(head, patch):
    del head
    original = EagleDrafter._rows
    patch.setattr(
        EagleDrafter,
        "_rows",
        lambda self, slot, depth, *rest: original(self, slot, depth + 1, *rest),
    )


def sibling_is_an_ancestor(head, patch):
    del head
    original = RaggedPool.branching

    def leaking(self, requests):
        if int(requests[0].depth_n[0]) == 0:  # the first of depth 1 is seen by all of depth 1
            requests = [
                dataclasses.replace(
                    r,
                    above_nA=np.concatenate(
                        [r.above_nA, np.where(r.place_n > 0, 0, -1)[:, None]], axis=1
                    ),
                )
                for r in requests
            ]
        return original(self, requests)

    patch.setattr(RaggedPool, "branching", leaking)


def features_of_the_position_before(head, patch):
    del head
    original = PendingPairs.take

    def shifted(self, count):
        tokens, features = original(self, count)
        return tokens, features.roll(1, dims=0)

    patch.setattr(PendingPairs, "take", shifted)


def parents_are_mixed_up(head, patch):
    del head
    original = EagleDrafter._run
    patch.setattr(
        EagleDrafter,
        "_run",
        lambda self, rows, parent_BF, mask_BF: original(self, rows, 0 * parent_BF, mask_BF),
    )


def features_of_the_first_rows(head, patch):
    """Kind: what was verified first is taken for what was accepted."""
    del head
    original = verifier.TargetVerifier.verify

    def verify(self, forest, keep_BN):
        accepted_B = original(self, forest, keep_BN)
        rows = {slot: np.arange(len(part.rows)) for slot, part in self.accepted.items()}
        start = 0
        for slot, part in self.features.items():
            count = 1 + int(keep_BN[slot].sum())
            self.features[slot] = self.target.features[start : start + count][rows[slot]]
            assert self.features[slot].shape == part.shape
            start += count
        return accepted_B

    patch.setattr(verifier.TargetVerifier, "verify", verify)


FAULTS = [
    embedding_and_hidden_swapped,
    map_dropped,
    map_permuted,
    taps_off_by_one,
    norm_before_residual_flipped,
    normed_output_is_fed,
    positions_off_by_one,
    sibling_is_an_ancestor,
    features_of_the_position_before,
    parents_are_mixed_up,
    features_of_the_first_rows,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_shows(pair, asked, fault, monkeypatch):
    accept_at_random(monkeypatch)
    slow = SlowDraft(pair.head, tiny_target())
    faulty = copy.deepcopy(pair.head)
    fault(faulty, monkeypatch)
    nodes, _, _ = drafted(dataclasses.replace(pair, head=faulty), asked, TREE)
    assert first_difference(nodes, slow) is not None


@torch.inference_mode()
def test_what_was_committed_without_drafting_is_read_before_the_next_draft(pair):
    """Kind: steps that draft nothing, after which the head is many pairs behind."""
    text = np.random.default_rng(1).integers(2, VOCAB, 30).tolist()
    taken = features(tiny_target(), text, pair.head.config.taps)
    drafter = EagleDrafter(RaggedHead(pair.head, num_slots=60), 2, tree_rows=4, row_chunk=3)
    assert drafter.admit(1, 40)
    drafter.read([Extension(1, text[:5])], [taken[:5]])
    drafter.commit(1, text[5:6])
    slow, drafting = SlowDraft(pair.head, tiny_target()), torch.tensor([False, True])
    for start, stop in ((6, 7), (7, 10), (10, 11), (11, 24), (24, 30)):
        drafter.commit(1, text[start:stop], taken[start - 1 : stop - 1])
        if stop in {10, 30}:
            layer = drafter.begin(DraftPlan(levels=1, top_k=3), drafting)
            tokens, logp = slow.children(text[:stop], (), 3)
            assert drafter.tokens()[1].tolist() == tokens
            np.testing.assert_allclose(layer.path_logp_BW[1], logp, rtol=2e-3, atol=2e-3)
            assert not layer.exists_BW[0].any()
    drafter.check_integrity([1])
    drafter.release(1)
    drafter.check_integrity([])


def test_half_precision(tmp_path, asked):
    target = tiny_target().to(torch.bfloat16)
    save_head(tiny_head(), tmp_path / "head", target_num_layers=LAYERS)
    head = load_head(
        tmp_path / "head", target, vocab_size=VOCAB, attention=ATTENTION_NAME, packs=True
    ).head
    settings = ServeSettings(num_slots=3, k_max=40, max_tokens=42, sampling=Sampling())
    policy = calibrated("eagle3:levels=3,top_k=20,nodes=40")
    report = check_parity(head_pair(head, target), policy, settings, asked)
    assert report.first is None
    assert report.accepted > 0
