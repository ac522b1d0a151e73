"""A recording of a head equals forwards by hand, self-fed from every position."""

import numpy as np
import pytest
import torch

from gpu_backend.attention import ATTENTION_NAME
from gpu_backend.eagle3.head_recording import HeadRecorder, target_features
from gpu_backend.greedy import TargetOutput
from gpu_backend.model_preparation import prepare_model
from gpu_backend.prompts import Prompt
from tests.gpu_backend.eagle3.heads import (
    DRAFTED,
    SlowDraft,
    features,
    head_config,
    tiny_head,
    tiny_target,
)
from tests.gpu_backend.reference import check_position
from tests.gpu_backend.test_recorder import PROMPT, small_config
from tests.gpu_backend.tiny import VOCAB
from traces.schema import OUTSIDE_VOCAB, PAST_END


class FromPosition:
    """What a head says of any text that goes on from one position, over the whole vocabulary."""

    def __init__(self, slow, text):
        self.slow = slow
        self.text = list(text)

    def log_probs(self, text):
        assert text[: len(self.text)] == self.text
        logits = self.slow.logits(self.text, tuple(text[len(self.text) :])).double()
        # Far below anything, yet a number, so that its share of an entropy is zero.
        whole = torch.full((VOCAB,), -1e4, dtype=torch.float64)
        whole[self.slow.token_ids] = torch.log_softmax(logits, 0)
        return whole.numpy()

    def children(self, text, width):
        logp = self.log_probs(text)
        order = np.argsort(-logp, kind="stable")[:width]
        return order.tolist(), logp[order]


@pytest.fixture(scope="module")
def target():
    model = tiny_target()
    prepare_model(model, VOCAB)
    return model


def recorded(target, head, output, num_emitted, config):
    prompt = Prompt(task="t", question_id="1", token_ids=PROMPT, split="evaluation")
    said = TargetOutput(tokens=output, num_emitted=num_emitted, finish_reason="length")
    return HeadRecorder(target, head, config).record(prompt, said)


def often_right(slow, count):
    """An output that the head would often have written itself."""
    rng, text = np.random.default_rng(3), list(PROMPT)
    for _ in range(count):
        text.append(slow.children(text, (), 40)[0][int(rng.choice([0, 0, 1, 2, 30]))])
    return text[len(PROMPT) :]


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "taps": (1, 6)}], ids=str)
def test_equals_forwards_by_hand(target, changes):
    head = tiny_head(head_config(**changes), attention=ATTENTION_NAME)
    slow = SlowDraft(head, tiny_target())
    config = small_config()
    output = often_right(slow, 4 + config.chain_levels)
    arrays = recorded(target, head, output, 4, config)
    assert len(arrays.root_logp) == 3
    for p in range(3):
        text = [*PROMPT, *output[: p + 1]]
        draft = FromPosition(slow, text)
        check_position(draft, arrays, p, text=text, output=output, config=config)


def test_tokens_that_the_head_cannot_propose(target):
    """They get the sentinel and -inf; the head goes on from them all the same."""
    head = tiny_head(attention=ATTENTION_NAME)
    slow = SlowDraft(head, tiny_target())
    output = often_right(slow, 8)
    output[3] = next(i for i in range(VOCAB) if i not in DRAFTED)
    arrays = recorded(target, head, output, 5, small_config())
    assert arrays.path_rank[:3, [2, 1, 0]].diagonal().tolist() == [OUTSIDE_VOCAB] * 3
    assert (arrays.path_logp[0, 2], arrays.path_logp[2, 0]) == (-np.inf, -np.inf)
    text = [*PROMPT, *output[:2]]
    logp = FromPosition(slow, text).log_probs([*text, *output[2:4]])
    np.testing.assert_allclose(arrays.path_logp[1, 2], logp[output[4]], rtol=1e-3)
    assert (arrays.path_rank[3, 4:] == PAST_END).all()


def test_features_in_chunks_are_transformers_own(target):
    text = [*PROMPT, 40, 41, 42]
    for taps in ((2, 4, 5), (0, 7, 7)):
        found = target_features(target, text, taps, 4)
        torch.testing.assert_close(found, features(tiny_target(), text, taps))
