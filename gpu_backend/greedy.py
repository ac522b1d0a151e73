"""The target's own greedy output, for a few requests at a time.

Shape letters: B requests, S tokens so far.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHAT_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")


class TargetOutput(BaseModel):
    """What the target said to one prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[int]
    """Emitted tokens, and the look-ahead behind them where the output was cut by length."""
    num_emitted: int
    """Tokens of the output proper; a stop token counts."""
    finish_reason: Literal["stop", "length"]


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: the model's, the tokenizer's and the chat template's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = set(configured if isinstance(configured, list) else [configured])
    found.add(tokenizer.eos_token_id)
    vocab = tokenizer.get_vocab()
    found.update(vocab.get(text) for text in _CHAT_ENDS)
    return frozenset(int(token) for token in found if token is not None)


@torch.inference_mode()
def decode_greedy(
    model: PreTrainedModel,
    prompts: list[list[int]],
    *,
    stops: frozenset[int],
    vocab_size: int,
    max_new_tokens: int,
    look_ahead: int,
) -> list[TargetOutput]:
    """Decode a batch at temperature 0.

    Args:
        model: the target.
        prompts: B token lists, none empty.
        stops: tokens that end an output.
        vocab_size: real tokens; logits beyond are padding and never win.
        max_new_tokens: emitted tokens at most.
        look_ahead: tokens decoded past a cut by length, so that the last positions have a path.

    Returns:
        One output per prompt. An equal logit goes to the lowest token id.
    """
    ids, mask = _left_padded(prompts, model.device)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    outputs: list[list[int]] = [[] for _ in prompts]
    active = [True] * len(prompts)
    cache = _empty_cache(model)
    while any(active):
        result = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        )
        # argmax is documented to return the first of equal maxima.
        chosen = result.logits[:, -1, :vocab_size].argmax(dim=1)
        for row, token in enumerate(chosen.tolist()):
            if active[row]:
                outputs[row].append(token)
                active[row] = token not in stops and len(outputs[row]) < max_new_tokens + look_ahead
        ids = chosen[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones((len(prompts), 1))], dim=1)
    return [_finished(tokens, stops, max_new_tokens) for tokens in outputs]


def _empty_cache(model: PreTrainedModel) -> dict[str, Any]:
    """A cache that the forward fills in place, under the name that this model gives it."""
    from transformers import DynamicCache

    # transformers 5.24 renames the argument, and warns about the old name where it has the new.
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


def _finished(tokens: list[int], stops: frozenset[int], max_new_tokens: int) -> TargetOutput:
    """Say how one output ended; a stop token in the look-ahead ends only the look-ahead."""
    emitted = min(len(tokens), max_new_tokens)
    stopped = tokens[emitted - 1] in stops
    return TargetOutput(
        tokens=tokens, num_emitted=emitted, finish_reason="stop" if stopped else "length"
    )


def _left_padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, ``[B, S]`` each; padding is token 0 under a mask of 0."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
