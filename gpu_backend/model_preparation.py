"""What a loaded model needs before its rows can be those of many requests' trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from echo_policies.errors import InputError
from gpu_backend.attention import ATTENTION_NAME, register_tree_attention
from gpu_backend.packed_linear import pack_linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_model(model: PreTrainedModel, vocab_size: int, role: str = "draft") -> None:
    """Switch a loaded decoder-only model to tree attention and cut its head, for good.

    On a CPU its linear layers are packed (:func:`gpu_backend.packed_linear.pack_linear_layers`),
    so a model must be on its device by then.

    Args:
        model: draft or target.
        vocab_size: tokens that it may propose, those of the lowest ids; its logits end there.
        role: what messages call the model.

    Raises:
        InputError: the model has layers that do not attend to their whole prefix.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.config, "sliding_window", None):
        raise InputError(
            f"{role}: every layer must attend to its whole prefix; this model has "
            f"{', '.join(sorted(kinds))} layers and sliding_window "
            f"{getattr(model.config, 'sliding_window', None)}. Use a full-attention model."
        )
    register_tree_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    _cut_head(model, vocab_size)
    # The cut head's weights are a view of the whole; packed, they are a copy of the cut.
    pack_linear_layers(model)


def _cut_head(model: PreTrainedModel, size: int) -> None:
    """Let the head compute the first ``size`` logits only; the weights are shared, not copied."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(head, nn.Linear), "a causal language model's head is one linear layer"
    cut = type(head)(head.in_features, size, bias=head.bias is not None, device="meta")
    for name, parameter in head.named_parameters(recurse=False):
        setattr(cut, name, nn.Parameter(parameter[:size], requires_grad=False))
    model.set_output_embeddings(cut)  # type: ignore[no-untyped-call]
