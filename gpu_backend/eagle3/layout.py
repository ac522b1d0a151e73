"""From ``config.json`` of a head, in either layout, to what the head is.

The two layouts number features differently, and nothing fails if one is read as the other but
acceptance: the original one names a feature by the layer whose *output* it is, the speculators
library by the layer whose *input* it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from echo_policies.errors import InputError
from gpu_backend.eagle3.config_keys import ConfigKeys
from gpu_backend.eagle3.head_config import MIN_LAYERS, HeadConfig, default_taps
from gpu_backend.eagle3.rope import describe_rope, rope_parameters
from gpu_backend.eagle3.tensors import Layout

_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_MODEL_TYPES: Final = ("llama", "qwen3")
_SPECULATORS_VOCAB: Final = 32000
"""Draft vocabulary where a configuration of the speculators library does not say it."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a head must know of its target."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of its embedding, padding included."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A configuration, understood."""

    config: HeadConfig
    layout: Layout
    tokenizer_sha256: str | None
    """Fingerprint of the tokenizer the head was trained with, where the file says it."""


def read_layout(config: Mapping[str, Any], target: TargetShape, where: str) -> HeadLayout:
    """Resolve every key and default.

    Args:
        config: content of ``config.json``.
        target: what the head is to draft for.
        where: the file, for messages.

    Raises:
        InputError: a key breaks a rule, or the head is for another target or of a kind that is not
            supported.
    """
    top = ConfigKeys(config, where)
    layout: Layout = "speculators" if "speculators_model_type" in top else "original"
    layer = top
    if layout == "speculators":
        _require(top, "speculators_model_type", "eagle3")
        if "transformer_layer_config" not in top:
            raise InputError(f"{where} must have the key 'transformer_layer_config'; it lacks it.")
        layer = top.part("transformer_layer_config")
    _require_plain_layer(layer)
    num_heads, hidden = layer.count("num_attention_heads"), layer.count("hidden_size")
    vocab_size = layer.count("vocab_size")
    taps = _taps(top, layout, target.num_layers)
    resolved = HeadConfig(
        hidden_size=hidden,
        intermediate_size=layer.count("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=layer.count("num_key_value_heads", num_heads),
        head_dim=layer.count("head_dim", max(hidden // num_heads, 1)),
        rms_norm_eps=layer.number("rms_norm_eps"),
        vocab_size=vocab_size,
        draft_vocab_size=top.count(
            "draft_vocab_size", _SPECULATORS_VOCAB if layout == "speculators" else vocab_size
        ),
        target_hidden_size=top.count("target_hidden_size", hidden),
        taps=taps,
        rope_parameters=rope_parameters(layer),
        hidden_act=layer.text("hidden_act", "silu"),
        attention_bias=layer.flag("attention_bias"),
        mlp_bias=layer.flag("mlp_bias"),
        fc_bias=top.flag("bias"),
        qk_norm=layout == "speculators" and layer.text("model_type", "llama") == "qwen3",
        norm_before_residual=top.flag("norm_before_residual"),
        norm_before_fc=top.flag("norm_before_fc"),
        fc_norm=top.flag("fc_norm"),
        norm_output=_norm_output(top, layout),
        shares_target_head=_shares_target_head(top),
    )
    _check_shape(resolved, where)
    _check_target(resolved, top, target)
    sha256 = top.part("metadata").text("tokenizer_sha256", "")
    return HeadLayout(resolved, layout, sha256 or None)


def describe_head(found: HeadLayout, num_layers: int, borrowed: tuple[str, ...]) -> str:
    """One line that says how a head was understood.

    Args:
        found: its configuration.
        num_layers: decoder layers of the target.
        borrowed: what it takes from the target, in words.
    """
    config = found.config
    flags = [
        name
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
        if getattr(config, name)
    ]
    taps = ", ".join(map(str, config.taps))
    words = [
        f"EAGLE-3, {found.layout} layout",
        f"inputs of layers {taps} of {num_layers}",
        describe_rope(config.rope_parameters),
        f"norms: {', '.join(flags)}" if flags else "no norm flags",
        f"{config.draft_vocab_size} of {config.vocab_size} tokens",
    ]
    if borrowed:
        words.append(f"the target's {' and '.join(borrowed)}")
    return "; ".join(words)


def _require(keys: ConfigKeys, key: str, value: object) -> None:
    if keys.raw(key) != value:
        raise keys.refusal(key, repr(value))


def _require_plain_layer(layer: ConfigKeys) -> None:
    """One decoder layer of a known kind that attends to everything before it."""
    if layer.text("model_type", "llama") not in _MODEL_TYPES:
        raise layer.refusal("model_type", " or ".join(map(repr, _MODEL_TYPES)))
    if layer.count("num_hidden_layers", 1) != 1:
        raise layer.refusal("num_hidden_layers", "1, as heads of more layers are not supported")
    kinds = layer.raw("layer_types") or ["full_attention"]
    if kinds != ["full_attention"]:
        raise layer.refusal("layer_types", "['full_attention']")
    # transformers writes the key with a width that use_sliding_window then switches off.
    is_used = layer.flag("use_sliding_window", default="layer_types" not in layer)
    if is_used and "sliding_window" in layer:
        raise layer.refusal("sliding_window", "null, as a head must attend to its whole prefix")


def _taps(top: ConfigKeys, layout: Layout, num_layers: int) -> tuple[int, ...]:
    """Features by the layer whose input they are, ascending as engines concatenate them."""
    nested = top.part("eagle_config")
    if layout == "original" and _IDS in top:
        raise InputError(
            f"{top.where}: {_IDS} must stand in eagle_config, as layer outputs; it stands at the "
            "top, where only the speculators layout has it, as layer inputs."
        )
    if layout == "speculators" and _IDS in nested:
        raise InputError(
            f"{top.where}: {_IDS} must stand at the top, as layer inputs; it stands in "
            "eagle_config, where only the original layout has it, as layer outputs."
        )
    if not nested.flag("use_aux_hidden_state", default=True):
        raise nested.refusal("use_aux_hidden_state", "true")
    keys, shift = (top, 0) if layout == "speculators" else (nested, 1)
    ids = keys.counts_from_zero(_IDS)
    if ids is None:
        if num_layers < MIN_LAYERS:
            raise InputError(
                f"{keys.where} must say {_IDS} for a target of {num_layers} layers; the default "
                f"takes {MIN_LAYERS} or more."
            )
        taps: tuple[int, ...] = default_taps(num_layers)
    else:
        taps = tuple(sorted(value + shift for value in ids))
        if taps[-1] >= num_layers:
            raise keys.refusal(_IDS, f"layers of the target, which has {num_layers}")
    if top.count("num_aux_hidden_states", len(taps)) != len(taps):
        raise top.refusal("num_aux_hidden_states", f"{len(taps)}, the number of features")
    return taps


def _norm_output(top: ConfigKeys, layout: Layout) -> bool:
    """Whether the next step is fed the normalised output.

    SpecForge has a key of the same name, true by default, that only says that a norm precedes the
    output layer; beside ``fc_norm`` it is EAGLE-3.1's.
    """
    said = top.flag("norm_output")
    return said and (layout == "speculators" or top.flag("fc_norm"))


def _shares_target_head(top: ConfigKeys) -> bool:
    if "lm_head" in top:
        _require(top, "lm_head", "target")
    return "lm_head" in top


def _check_shape(config: HeadConfig, where: str) -> None:
    from transformers.activations import ACT2FN

    if config.norm_before_fc and config.fc_norm:
        raise InputError(
            f"{where}: norm_before_fc and fc_norm must not both be true; they norm the same "
            "features."
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"{where}: num_key_value_heads must divide num_attention_heads; it is "
            f"{config.num_key_value_heads} of {config.num_attention_heads}."
        )
    if config.head_dim % 2:
        raise InputError(f"{where}: head_dim must be even; it is {config.head_dim}.")
    if config.draft_vocab_size > config.vocab_size:
        raise InputError(
            f"{where}: draft_vocab_size must be at most vocab_size, {config.vocab_size}; it is "
            f"{config.draft_vocab_size}."
        )
    if config.hidden_act not in ACT2FN:
        raise InputError(
            f"{where}: hidden_act must be a function that transformers knows; it is "
            f"{config.hidden_act!r}."
        )


def _check_target(config: HeadConfig, top: ConfigKeys, target: TargetShape) -> None:
    said = top.count("target_num_hidden_layers", target.num_layers)
    pairs = [
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("target_num_hidden_layers", said, target.num_layers),
    ]
    for key, ours, theirs in pairs:
        if ours != theirs:
            raise InputError(
                f"{top.where}: a head must be made for the target; its {key} is {ours}, the "
                f"target's {theirs}. Give the head of this target."
            )
