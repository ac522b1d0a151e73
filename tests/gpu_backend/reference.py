"""The slow truth: every node by a plain forward over its whole text, without cache or batch."""

import numpy as np
import torch

from traces.schema import OUTSIDE_VOCAB


class PlainDraft:
    """The distribution after a text, from the model as transformers runs it."""

    def __init__(self, model, vocab):
        self.model = model
        self.vocab = vocab

    @torch.inference_mode()
    def log_probs(self, text):
        logits = self.model(torch.tensor([text])).logits[0, -1, : self.vocab]
        return torch.log_softmax(logits.double(), dim=0).numpy()

    def children(self, text, width):
        """Token ids and log-probs by (log-prob descending, token id ascending)."""
        logp = self.log_probs(text)
        order = np.argsort(-logp, kind="stable")[:width]
        return order.tolist(), logp[order]


def check_position(draft, arrays, p, *, text, output, config):
    """Compare position ``p``, whose committed text is ``text``, with the slow truth.

    Values must be near; choices must follow exactly from the recorded (rounded) values.
    """
    tokens, logp = draft.children(text, config.root_width)
    near(arrays.root_logp[p], logp)
    full = draft.log_probs(text)
    near(arrays.root_entropy[p], -(np.exp(full) * full).sum())
    candidates = [
        (np.float32(value), [*text, token])
        for value, token in zip(arrays.root_logp[p], tokens, strict=False)
    ]
    eligible = len(candidates)
    chain = 0
    for d in range(config.levels - 1):
        slots = expected_slots([c[0] for c in candidates], eligible, chain, config.beam_width)
        assert arrays.slot_child[p, d].tolist() == slots
        following = []
        for w, slot in enumerate(slots):
            following += check_slot(
                draft, arrays, (p, d, w), slot=slot, candidates=candidates, config=config
            )
        chain = slots.index(chain) * config.top_k
        candidates = following
        eligible = config.beam_width * config.top_k
    check_chain(draft, arrays.chain_logp[p], text)
    check_path(draft, arrays, p, text, output)


def check_slot(draft, arrays, where, *, slot, candidates, config):
    stored = arrays.child_logp[where]
    if slot == -1:
        assert (stored == -np.inf).all()
        assert arrays.slot_entropy[where] == 0
        return [(np.float32(-np.inf), None)] * config.top_k
    score, text = candidates[slot]
    tokens, logp = draft.children(text, config.top_k)
    near(stored, logp)
    full = draft.log_probs(text)
    near(arrays.slot_entropy[where], -(np.exp(full) * full).sum())
    tokens += [None] * (config.top_k - len(tokens))
    return [
        (np.float32(score + np.float32(value)), None if token is None else [*text, token])
        for value, token in zip(stored, tokens, strict=True)
    ]


def expected_slots(scores, eligible, chain, beam_width):
    order = sorted(range(min(eligible, len(scores))), key=lambda i: (-scores[i], i))
    beam = [i if scores[i] > -np.inf else -1 for i in order[:beam_width]]
    beam += [-1] * (beam_width - len(beam))
    return [*beam, -1 if chain in beam else chain]


def check_chain(draft, stored, text):
    text = list(text)
    for value in stored:
        tokens, logp = draft.children(text, 1)
        near(value, logp[0])
        text.append(tokens[0])


def check_path(draft, arrays, p, text, output):
    """Rank and log-prob of every true token behind position ``p``."""
    for d in range(arrays.path_rank.shape[1]):
        if p + 1 + d >= len(output):
            assert arrays.path_rank[p, d] == -2
            assert arrays.path_logp[p, d] == -np.inf
            continue
        logp = draft.log_probs([*text, *output[p + 1 : p + 1 + d]])
        token = output[p + 1 + d]
        if token >= len(logp):
            assert arrays.path_rank[p, d] == OUTSIDE_VOCAB
            assert arrays.path_logp[p, d] == -np.inf
            continue
        order = np.argsort(-logp, kind="stable").tolist()
        assert arrays.path_rank[p, d] == order.index(token)
        near(arrays.path_logp[p, d], logp[token])


def near(stored, true):
    """Equal up to float16 rounding and float32 arithmetic; the stored row may be padded."""
    stored = np.atleast_1d(stored).astype(np.float64)
    true = np.atleast_1d(true)
    np.testing.assert_allclose(stored[: len(true)], true, rtol=1e-3, atol=2e-4)
    assert (stored[len(true) :] == -np.inf).all()
