"""The recorder equals plain forwards over every node's whole text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.config import RecordConfig
from gpu_backend.draft_tree import DraftTree
from gpu_backend.greedy import TargetOutput
from gpu_backend.model_preparation import prepare_model
from gpu_backend.prompts import Prompt
from gpu_backend.ragged_model import RaggedModel
from gpu_backend.recording import record_request
from tests.gpu_backend.reference import PlainDraft, check_position
from tests.gpu_backend.tiny import VOCAB, tiny_model
from traces.schema import OUTSIDE_VOCAB

PROMPT = [3, 0, 4, 2, 4, 3, 1]


def small_config(**changes):
    return RecordConfig(
        **{
            "levels": 4,
            "beam_width": 3,
            "root_width": 6,
            "top_k": 4,
            "chain_levels": 7,
            "row_chunk": 5,
            **changes,
        }
    )


def mostly_agreeing(draft, count, seed=0):
    """An output that the draft would often have written itself, as a real target's is."""
    generator = np.random.default_rng(seed)
    text = list(PROMPT)
    for _ in range(count):
        rank = int(generator.choice([0, 0, 0, 1, 2, 20]))
        text.append(draft.children(text, VOCAB)[0][min(rank, draft.vocab - 1)])
    return text[len(PROMPT) :]


def recorded(
    config, output, num_emitted, *, kind="qwen2", vocab=VOCAB, width=VOCAB, dtype=torch.float32
):
    draft = tiny_model(kind, seed=3, vocab=width).to(dtype)
    prepare_model(draft, vocab)
    prompt = Prompt(task="t", question_id="1", token_ids=PROMPT, split="evaluation")
    said = TargetOutput(tokens=output, num_emitted=num_emitted, finish_reason="length")
    return record_request(draft, prompt, said, config)


def check_all(config, output, num_emitted, *, kind="qwen2", vocab=VOCAB, width=VOCAB):
    arrays = recorded(config, output, num_emitted, kind=kind, vocab=vocab, width=width)
    plain = PlainDraft(tiny_model(kind, seed=3, vocab=width), vocab)
    assert len(arrays.root_logp) == num_emitted - 1
    assert arrays.tokens.tolist() == output
    for p in range(num_emitted - 1):
        text = [*PROMPT, *output[: p + 1]]
        check_position(plain, arrays, p, text=text, output=output, config=config)


@pytest.mark.parametrize("kind", ["llama", "olmo2", "qwen2"])
def test_equals_plain_forwards(kind):
    config = small_config()
    output = mostly_agreeing(PlainDraft(tiny_model(kind, seed=3), VOCAB), 8 + config.chain_levels)
    check_all(config, output, 8, kind=kind)


def test_output_that_ended_by_itself():
    output = [*mostly_agreeing(PlainDraft(tiny_model(seed=3), VOCAB), 5), 1]
    check_all(small_config(), output, 6)


def test_look_ahead_that_ended_by_itself():
    output = [*mostly_agreeing(PlainDraft(tiny_model(seed=3), VOCAB), 6), 1]
    check_all(small_config(), output, 4)


def test_vocabulary_smaller_than_the_widths():
    output = mostly_agreeing(PlainDraft(tiny_model(seed=3, vocab=5), 5), 12, seed=1)
    config = small_config(root_width=8, top_k=7, beam_width=6, levels=3)
    check_all(config, output, 5, vocab=5, width=5)


def test_padding_rows_of_the_vocabulary_never_win():
    width = VOCAB + 40
    output = mostly_agreeing(PlainDraft(tiny_model(seed=3, vocab=width), VOCAB), 12)
    check_all(small_config(), output, 4, width=width)


def test_head_cut_to_the_first_tokens():
    """Tokens outside the draft's vocabulary get -inf and the sentinel; the rest share all mass."""
    output = mostly_agreeing(PlainDraft(tiny_model(seed=3), VOCAB), 12)
    check_all(small_config(), output, 4, vocab=VOCAB - 30, width=VOCAB)
    arrays = recorded(small_config(), output, 4, vocab=VOCAB - 30)
    assert (arrays.path_rank == OUTSIDE_VOCAB).any()


@settings(max_examples=10)
@given(
    vocab=st.integers(2, VOCAB),
    sizes=st.fixed_dictionaries(
        {
            "levels": st.integers(1, 4),
            "chain_levels": st.integers(4, 7),
            "beam_width": st.integers(1, 4),
            "root_width": st.integers(1, 8),
            "top_k": st.integers(1, 4),
        }
    ),
    ranks=st.lists(st.sampled_from([0, 0, 0, 1, 5]), min_size=1, max_size=9),
    cut=st.integers(0, 4),
)
def test_any_recording_equals_plain_forwards(vocab, sizes, ranks, cut):
    config = small_config(**sizes)
    plain = PlainDraft(tiny_model(seed=3), vocab)
    text = list(PROMPT)
    for rank in ranks:
        text.append(plain.children(text, vocab)[0][min(rank, vocab - 1)])
    output = text[len(PROMPT) :]
    check_all(config, output, max(1, len(output) - cut), vocab=vocab)


def test_one_level():
    output = mostly_agreeing(PlainDraft(tiny_model(seed=3), VOCAB), 12)
    check_all(small_config(levels=1), output, 4)


def test_one_token_has_no_positions():
    config = small_config()
    arrays = recorded(config, [1], 1)
    assert arrays.root_logp.shape == (0, config.root_width)
    assert arrays.child_logp.shape == (0, 3, 4, 4)
    assert arrays.path_rank.shape == (0, config.chain_levels)
    assert arrays.tokens.tolist() == [1]


def test_chunks_do_not_matter():
    """Rows are independent: any chunking gives the same choices and nearly the same values."""
    output = mostly_agreeing(PlainDraft(tiny_model(seed=3), VOCAB), 15)
    small = recorded(small_config(row_chunk=1), output, 8)
    large = recorded(small_config(row_chunk=4096), output, 8)
    assert np.array_equal(small.path_rank, large.path_rank)
    assert np.array_equal(small.slot_child, large.slot_child)
    np.testing.assert_allclose(small.child_logp, large.child_logp, rtol=2e-3, atol=1e-3)


def test_nodes_are_shared_between_positions(monkeypatch):
    """A node that two positions reach, on or off the path, is computed once."""
    rows = []
    expand = DraftTree.expand

    def counting(self, nodes):
        rows.append(len(nodes.tokens_K))
        return expand(self, nodes)

    monkeypatch.setattr(DraftTree, "expand", counting)
    plain = PlainDraft(tiny_model(seed=3), VOCAB)
    text = list(PROMPT)
    for _ in range(15):
        text.append(plain.children(text, 1)[0][0])
    config = small_config(beam_width=1, levels=4)
    recorded(config, text[len(PROMPT) :], 8)
    assert sum(rows) == 0  # the draft agrees everywhere, so beam and chain never leave the path


def test_forwards_are_as_few_as_their_rows_allow(monkeypatch):
    """Kind: a forward for a position or a depth of a chunk, where rows of all could share one."""
    nodes, rows = [], []
    expand, forward = DraftTree.expand, RaggedModel._forward

    def asking(self, new):
        nodes.append(len(new.tokens_K))
        # So that few chunks are laid out to the longest prefix.
        assert (np.diff(new.visible_K) >= 0).all()
        return expand(self, new)

    def counting(self, tokens, placed, kept):
        rows.append(len(tokens))
        return forward(self, tokens, placed, kept)

    monkeypatch.setattr(DraftTree, "expand", asking)
    monkeypatch.setattr(RaggedModel, "_forward", counting)
    output = mostly_agreeing(PlainDraft(tiny_model(seed=3), VOCAB), 15)
    chunk = 8
    recorded(small_config(row_chunk=chunk), output, 8)
    assert max(nodes) > chunk
    expected = []
    for count in [len(PROMPT) + 15, *nodes]:
        expected += [chunk] * (count // chunk) + [count % chunk] * (count % chunk > 0)
    assert rows == expected


def test_half_precision_is_near():
    output = mostly_agreeing(PlainDraft(tiny_model(seed=3), VOCAB), 15)
    exact = recorded(small_config(), output, 8)
    half = recorded(small_config(), output, 8, dtype=torch.bfloat16)
    assert np.abs(half.root_logp[:, 0] - exact.root_logp[:, 0]).max() < 0.7
    assert (half.path_rank[:, 0] == exact.path_rank[:, 0]).mean() > 0.5


def test_model_is_not_switched_back():
    draft = tiny_model()
    prepare_model(draft, VOCAB)
    with pytest.raises(TypeError, match="tree_rows"), torch.inference_mode():
        draft(torch.tensor([[1, 2]]))
