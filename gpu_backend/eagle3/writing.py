"""Writes an EAGLE-3 head to a folder, in the layout of the reader's choice."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.eagle3.tensors import EMBEDDING, OUTPUT_LAYER, Layout, name_in_file

if TYPE_CHECKING:
    from gpu_backend.eagle3.head import Eagle3Head
    from gpu_backend.eagle3.head_config import HeadConfig


def save_head(
    head: Eagle3Head,
    folder: Path,
    layout: Layout = "original",
    *,
    target_num_layers: int,
    metadata: Mapping[str, Any] | None = None,
    with_embedding: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``; the folder appears whole or not at all.

    Args:
        head: the output layer is left out if ``head.config.shares_target_head``.
        folder: must not exist yet.
        layout: names and configuration of the published heads or of the speculators library.
        target_num_layers: decoder layers of the target; a loader refuses another target.
        metadata: JSON values kept under the key of this name, such as how it was trained;
            ``tokenizer_sha256`` (:func:`gpu_backend.models.tokenizer_fingerprint`) is checked when
            the head is loaded.
        with_embedding: write the embedding; without it the target's is used.
        dtype: of the weights; the head's own if None.

    Raises:
        InputError: the folder exists, or the layout cannot say what this head is.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already; give the head another folder.")
    described = _CONFIGS[layout](head.config)
    described |= {
        "target_num_hidden_layers": target_num_layers,
        "torch_dtype": str(dtype or head.fc.weight.dtype).removeprefix("torch."),
    }
    if head.config.shares_target_head:
        described["lm_head"] = "target"
    if metadata is not None:
        described["metadata"] = dict(metadata)
    tensors = _tensors(head, layout, dtype, with_embedding=with_embedding)
    _write(folder, json.dumps(described, indent=2) + "\n", tensors)


def _tensors(
    head: Eagle3Head, layout: Layout, dtype: torch.dtype | None, *, with_embedding: bool
) -> dict[str, Tensor]:
    config = head.config
    left_out = set() if with_embedding else {EMBEDDING}
    if config.shares_target_head:
        left_out.add(OUTPUT_LAYER)
    if not with_embedding and config.hidden_size != config.target_hidden_size:
        raise InputError(
            f"A head of width {config.hidden_size} for features of width "
            f"{config.target_hidden_size} must be saved with its embedding: with_embedding=True."
        )
    tensors = {
        name_in_file(name, layout): value.detach().to("cpu", dtype or value.dtype).contiguous()
        for name, value in head.named_parameters()
        if name not in left_out
    }
    if config.draft_vocab_size < config.vocab_size:
        ids = head.token_ids.cpu()
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}
    return tensors


def _layer_keys(config: HeadConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def _head_keys(config: HeadConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "bias": config.fc_bias,
        "tie_word_embeddings": False,
    }
    if config.target_hidden_size != config.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    return keys


def _original(config: HeadConfig) -> dict[str, Any]:
    """Layer ids are of outputs, and rotary parameters stand in two keys."""
    if config.qk_norm:
        raise InputError(
            "The original layout has no norms of queries and keys; save this head in the "
            "speculators layout."
        )
    if config.norm_output and not config.fc_norm:
        raise InputError(
            "In the original layout norm_output counts only beside fc_norm; save this head in the "
            "speculators layout."
        )
    if min(config.taps) < 1:
        raise InputError(
            "The original layout names features by the layer whose output they are, so the "
            f"embedding's output cannot be one; the head takes the inputs of layers "
            f"{list(config.taps)}. Save it in the speculators layout."
        )
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_layer_keys(config),
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        **_head_keys(config),
        "num_aux_hidden_states": len(config.taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
        },
    }


def _speculators(config: HeadConfig) -> dict[str, Any]:
    """Layer ids are of inputs, and the layer's keys stand in a configuration of their own."""
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy"}],
        },
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **_layer_keys(config),
            "rope_parameters": dict(config.rope_parameters),
        },
        **_head_keys(config),
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
    }


_CONFIGS = {"original": _original, "speculators": _speculators}


def _write(folder: Path, config: str, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        part.chmod(0o755)
        (part / "config.json").write_text(config, encoding="utf-8")
        weights = part / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors gives it to its owner alone
        (part / "model.safetensors").chmod(0o644)  # the library writes it for its owner only
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
