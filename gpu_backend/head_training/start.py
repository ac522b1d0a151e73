"""A head before training: its draft vocabulary and its initial values.

Shape letters: V vocabulary, D draft vocabulary, h hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from echo_policies.errors import InputError
from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.head_config import MIN_LAYERS, HeadConfig, default_taps
from gpu_backend.head_training.features import Example
from gpu_backend.head_training.unroll import ATTENTION_NAME, register_unrolled_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROJECTIONS: Final = ("q", "k", "v")

_COPIED: Final = (
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)

_SMALL: Final = 0.02
"""Standard deviation of initial weights that are not copied."""


def taps_of(target: PreTrainedModel) -> tuple[int, int, int]:
    """Features that a head of this target takes.

    Raises:
        InputError: the target has too few layers for an early, a middle and a late one.
    """
    num_layers = target.config.num_hidden_layers
    if num_layers < MIN_LAYERS:
        raise InputError(
            f"target: EAGLE-3 takes features of an early, a middle and a late layer, which needs "
            f"at least {MIN_LAYERS} layers; this one has {num_layers}. Use a deeper target."
        )
    return default_taps(num_layers)


def head_config(target: PreTrainedModel, vocab_size: int, draft_vocab: int) -> HeadConfig:
    """A head as wide as its target, with the target's embedding and rows of its output layer.

    Args:
        target: the model to draft for.
        vocab_size: its real tokens, V.
        draft_vocab: tokens that the head can propose, at most.
    """
    config = target.config
    heads = config.num_attention_heads
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=vocab_size,
        draft_vocab_size=min(draft_vocab, vocab_size),
        target_hidden_size=config.hidden_size,
        taps=taps_of(target),
        rope_parameters=dict(config.rope_parameters),
        shares_target_head=True,
    )


def frequent_tokens(examples: Sequence[Example], vocab_size: int, size: int) -> Tensor:
    """The tokens that the target says most often, int64 ``[size]``, ascending.

    Among equals, and where fewer have occurred, the lowest ids.
    """
    count_V = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        said = example.best_T[max(example.answer_start - 1, 0) :]
        count_V += torch.bincount(said, minlength=vocab_size)[:vocab_size]
        count_V += torch.bincount(example.best_T, minlength=vocab_size)[:vocab_size]
    return count_V.argsort(descending=True, stable=True)[:size].sort().values


def new_head(config: HeadConfig, target: PreTrainedModel, token_ids_D: Tensor) -> Eagle3Head:
    """A head whose embedding and output layer are the target's, frozen.

    Its layer starts as the target's last one, which already turns a late feature into what is said
    next; the projections' halves for the embedding start small.

    Args:
        config: made by :func:`head_config`.
        target: whose weights are shared.
        token_ids_D: int64, tokens that the head can propose, ascending.
    """
    register_unrolled_attention()
    head = Eagle3Head(config, ATTENTION_NAME)
    head.token_ids = token_ids_D
    embedding = cast("nn.Embedding", target.get_input_embeddings()).weight.detach()[
        : config.vocab_size
    ]
    output = target.get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    head.embed_tokens.weight = nn.Parameter(
        embedding[: config.vocab_size].float(), requires_grad=False
    )
    head.lm_head.weight = nn.Parameter(output[token_ids_D].float(), requires_grad=False)
    _start_from_last_layer(head, target)
    return head


@torch.no_grad()
def _start_from_last_layer(head: Eagle3Head, target: PreTrainedModel) -> None:
    """Copy what fits; layers that are made otherwise leave the initial values as they are."""
    decoder: Any = target.get_decoder()  # type: ignore[no-untyped-call]
    size = head.config.hidden_size
    theirs = {name: parameter.data for name, parameter in decoder.layers[-1].named_parameters()}
    ours = {name: parameter.data for name, parameter in head.named_parameters()}
    for name in _PROJECTIONS:
        wide = ours[f"self_attn.{name}_proj.weight"]
        wide.normal_(std=_SMALL)
        _copy(theirs.get(f"self_attn.{name}_proj.weight"), wide[:, size:])
    for name in _COPIED:
        _copy(theirs.get(name), ours[name])
    _copy(theirs.get("input_layernorm.weight"), ours["hidden_norm.weight"])
    _copy(decoder.norm.weight, ours["norm.weight"])
    # The late feature passes through; the others come in as training finds use for them.
    ours["fc.weight"].normal_(std=_SMALL / 10)
    ours["fc.weight"][:, -size:] += torch.eye(size)


def _copy(source: Tensor | None, to: Tensor) -> None:
    if source is not None and source.shape == to.shape:
        to.copy_(source)
