"""The target's greedy output equals one plain forward per token."""

import pytest
import torch

from gpu_backend.greedy import decode_greedy, stop_tokens
from tests.gpu_backend.tiny import STOP, VOCAB, tiny_model, tiny_tokenizer

PROMPTS = [[3, 9, 40], [5, 6, 7, 8, 9, 10, 11], [60]]


@torch.inference_mode()
def slow_output(model, prompt, stops, limit, vocab=VOCAB):
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        logits = model(torch.tensor([text])).logits[0, -1, :vocab]
        text.append(int(logits.argmax()))
        if text[-1] in stops:
            break
    return text[len(prompt) :]


def decode(model, prompts, stops, **changes):
    settings = {"vocab_size": VOCAB, "max_new_tokens": 6, "look_ahead": 4, **changes}
    return decode_greedy(model, prompts, stops=frozenset(stops), **settings)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_batch_equals_plain_forwards(kind):
    model = tiny_model(kind, seed=5)
    outputs = decode(model, PROMPTS, {STOP})
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.tokens == slow_output(model, prompt, {STOP}, 10)
        assert (output.num_emitted, output.finish_reason) == (6, "length")


def test_stop_token_ends_one_output_and_counts():
    model = tiny_model(seed=5)
    free = slow_output(model, PROMPTS[1], set(), 10)
    stop = free[2]
    [output] = decode(model, [PROMPTS[1]], {stop})
    assert output.tokens == free[: free.index(stop) + 1]
    assert output.num_emitted == len(output.tokens)
    assert output.finish_reason == "stop"


def test_stop_token_in_the_look_ahead_ends_only_that():
    model = tiny_model(seed=5)
    free = slow_output(model, PROMPTS[1], set(), 10)
    stop = free[4]
    assert free.index(stop) == 4
    [output] = decode(model, [PROMPTS[1]], {stop}, max_new_tokens=3)
    assert output.tokens == free[:5]
    assert (output.num_emitted, output.finish_reason) == (3, "length")


def test_padding_of_the_vocabulary_never_wins():
    model = tiny_model(seed=5)
    [output] = decode(model, [PROMPTS[0]], set(), vocab_size=4)
    assert max(output.tokens) < 4
    assert output.tokens == slow_output(model, PROMPTS[0], set(), 10, vocab=4)


def test_stop_tokens_come_from_model_and_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    model = tiny_model()
    model.generation_config.eos_token_id = [STOP, 8]
    assert stop_tokens(model, tokenizer) == {STOP, 8, tokenizer.convert_tokens_to_ids("<|im_end|>")}
