"""Loads an EAGLE-3 head for a target; whatever does not fit exactly is refused.

Nothing is ever filled in: a head with a random tensor or a shifted map drafts, and only its
acceptance tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echo_policies.errors import InputError
from gpu_backend import models
from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.head_files import read_config, read_tensors
from gpu_backend.eagle3.layout import HeadLayout, TargetShape, describe_head, read_layout
from gpu_backend.eagle3.tensors import (
    EMBEDDING,
    OUTPUT_LAYER,
    HeadTensors,
    check_weights,
    sort_tensors,
)
from gpu_backend.half_products import needs_widening, widen_linear_layers
from gpu_backend.model_files import reading_errors
from gpu_backend.packed_linear import PackedLinear, pack_linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from gpu_backend.eagle3.head_config import HeadConfig


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head, ready to draft for its target."""

    head: Eagle3Head
    summary: str
    """One line that says how its files were understood."""


def load_head(
    folder: Path,
    target: PreTrainedModel,
    *,
    vocab_size: int,
    attention: str = "sdpa",
    tokenizer: PreTrainedTokenizerBase | None = None,
    packs: bool = False,
) -> LoadedHead:
    """Load a head in the target's dtype onto the target's device.

    Args:
        folder: ``config.json`` and weights, in either layout.
        target: what it drafts for; it may lend its embedding and its output layer, so its layers
            must not be packed yet (:func:`gpu_backend.model_preparation.prepare_model`).
        vocab_size: real tokens of the target; the head proposes none beyond.
        attention: name of the attention function, as transformers knows it.
        tokenizer: the target's, to be compared with what the folder says of its own.
        packs: pack its linear layers on a CPU, for good.

    Raises:
        InputError: naming the key or the tensor that breaks a rule.
    """
    embedding = _embedding(target)
    shape = TargetShape(target.config.num_hidden_layers, embedding.shape[1], embedding.shape[0])
    found = read_layout(read_config(folder), shape, str(folder / "config.json"))
    if tokenizer is not None:
        _check_tokenizer(folder, found, tokenizer)
    tensors = sort_tensors(read_tensors(folder), str(folder))
    found = replace(found, config=_lending(found.config, tensors))
    _check_widths(found.config, tensors, folder)
    check_weights(tensors.weights, _expected(found.config, tensors), str(folder))
    ids = token_ids(tensors, found.config, str(folder))
    summary = describe_head(found, shape.num_layers, _borrowed(tensors))

    # Ids ascend, so the tokens that do not exist are the last ones.
    ids = ids[ids < vocab_size]
    config = replace(found.config, draft_vocab_size=len(ids))
    weights = dict(tensors.weights)
    if tensors.owns_output_layer:
        weights[OUTPUT_LAYER] = weights[OUTPUT_LAYER][: len(ids)]
    else:
        weights[OUTPUT_LAYER] = _output_rows(target, ids, folder)
    weights = {name: value.to(target.device, target.dtype) for name, value in weights.items()}
    weights.setdefault(EMBEDDING, embedding)  # shared with the target, not copied
    head = _assemble(config, weights, ids, attention)
    if packs:
        pack_linear_layers(head)
    return LoadedHead(head, summary)


def token_ids(tensors: HeadTensors, config: HeadConfig, where: str) -> Tensor:
    """The target's id of every draft token: int64 [Vd], ascending.

    Args:
        tensors: with the maps.
        config: says the sizes of both vocabularies.
        where: the file, for messages.

    Raises:
        InputError: a map is missing, out of range, out of order, or the two disagree.
    """
    num_draft, num_target = config.draft_vocab_size, config.vocab_size
    ids = torch.arange(num_draft)
    if tensors.d2t is not None:
        _require_map("d2t", tensors.d2t, num_draft, where)
        ids = ids + tensors.d2t.long()
    elif num_draft < num_target:
        raise InputError(
            f"{where}: a head for {num_draft} of {num_target} tokens must hold d2t, which says "
            "which; it is missing."
        )
    if int(ids.min()) < 0 or int(ids.max()) >= num_target:
        raise InputError(
            f"{where}: d2t must lead to tokens below {num_target}; it leads from {int(ids.min())} "
            f"to {int(ids.max())}."
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        raise InputError(f"{where}: d2t must lead to every token once, in ascending order.")
    if tensors.t2d is not None:
        _require_map("t2d", tensors.t2d, num_target, where)
        if not torch.equal(tensors.t2d.nonzero()[:, 0], ids):
            raise InputError(f"{where}: t2d and d2t must name the same tokens; they differ.")
    return ids


def _require_map(name: str, values: Tensor, length: int, where: str) -> None:
    if values.shape != (length,) or values.is_floating_point():
        raise InputError(
            f"{where}: {name} must hold {length} whole numbers; it is {values.dtype} of shape "
            f"{list(values.shape)}."
        )


def _lending(config: HeadConfig, tensors: HeadTensors) -> HeadConfig:
    """Without an output layer of its own, a head over the whole vocabulary takes the target's."""
    if not tensors.owns_output_layer and config.draft_vocab_size == config.vocab_size:
        return replace(config, shares_target_head=True)
    return config


def _check_widths(config: HeadConfig, tensors: HeadTensors, folder: Path) -> None:
    lent = [] if tensors.owns_embedding else [EMBEDDING]
    lent += [OUTPUT_LAYER] if config.shares_target_head else []
    if lent and config.hidden_size != config.target_hidden_size:
        raise InputError(
            f"{folder}: a head without {lent[0]} takes the target's and must be as wide; it is "
            f"{config.hidden_size} wide, the target {config.target_hidden_size}."
        )


def _expected(config: HeadConfig, tensors: HeadTensors) -> dict[str, Tensor]:
    """Parameters that must be in the file, without storage."""
    with torch.device("meta"):
        expected: dict[str, Tensor] = dict(Eagle3Head(config).named_parameters())
    if not tensors.owns_embedding:
        del expected[EMBEDDING]
    if config.shares_target_head:
        del expected[OUTPUT_LAYER]
    return expected


def _borrowed(tensors: HeadTensors) -> tuple[str, ...]:
    embedding = () if tensors.owns_embedding else ("embedding",)
    return embedding if tensors.owns_output_layer else (*embedding, "output layer")


def _check_tokenizer(folder: Path, found: HeadLayout, tokenizer: PreTrainedTokenizerBase) -> None:
    theirs = models.tokenizer_fingerprint(tokenizer)
    if found.tokenizer_sha256 is not None and found.tokenizer_sha256 != theirs:
        raise InputError(
            f"{folder}: the head must have been trained with the target's tokenizer; its "
            f"fingerprint is {found.tokenizer_sha256[:12]}..., the target's {theirs[:12]}..."
        )
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        path = str(folder / "tokenizer.json")
        with reading_errors(folder, "tokenizer"):
            own = PreTrainedTokenizerFast(tokenizer_file=path)  # type: ignore[no-untyped-call]
        models.require_same_tokens(tokenizer, own)


def _embedding(target: PreTrainedModel) -> Tensor:
    weight = target.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _output_rows(target: PreTrainedModel, ids: Tensor, folder: Path) -> Tensor:
    layer = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(layer, nn.Linear), "a causal language model's head is one linear layer"
    assert not isinstance(layer, PackedLinear), "a head is loaded before its target is packed"
    if layer.bias is not None:
        raise InputError(
            f"{folder}: a head can only share an output layer without bias; the target's has one."
        )
    return layer.weight.detach()[ids.to(layer.weight.device)]


def _assemble(
    config: HeadConfig, weights: dict[str, Tensor], ids: Tensor, attention: str
) -> Eagle3Head:
    with torch.device("meta"):
        head = Eagle3Head(config, attention)
    head.load_state_dict(weights, assign=True)
    device = weights[EMBEDDING].device
    head.reset_buffers(ids.to(device))
    head.eval()
    if needs_widening(weights[EMBEDDING].dtype, device):
        widen_linear_layers(head)
    return head
