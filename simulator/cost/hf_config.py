"""Shapes of any model from its Hugging Face ``config.json``, EAGLE-3 heads included.

Keys are those of llama, mistral, qwen2, qwen3, mixtral and their mixture-of-experts relatives. An
unknown architecture is taken if it has them, as a decoder of full attention and gated feed-forward
blocks. What such a shape cannot express (latent or linear attention, dense layers among sparse
ones) is refused; sliding windows are costed as full attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final

from echo_policies.errors import InputError
from simulator.cost.models import CostedPair, Eagle3Head, Experts, Transformer

QK_NORM_TYPES: Final = ("qwen3", "gemma3", "olmo2")
"""Beginnings of ``model_type`` whose attention normalises q and k."""
TIED_BY_DEFAULT: Final = ("gemma", "cohere")
"""Beginnings of ``model_type`` that tie the head unless the file says otherwise."""
FULL_OR_SLIDING: Final = ("full_attention", "sliding_attention", "chunked_attention")
EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def read_hf_config(path: str | Path, name: str | None = None) -> Transformer | Eagle3Head:
    """Read a model's shape.

    Args:
        path: a ``config.json``, or the folder that holds it.
        name: what to call the model; the folder's name by default.

    Returns:
        An `Eagle3Head` if the file describes one (eagle3.md section 1), else a `Transformer`.

    Raises:
        InputError: no such file, a key that is missing or out of range, or an architecture whose
            cost this shape cannot express.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} must be a model's config.json; reading failed: {error}."
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{file} must hold a JSON object; it holds {type(content).__name__}.")
    config = _Config(str(file), content)
    name = name or file.resolve().parent.name
    return _eagle3_head(config, name) if _is_eagle3(content) else _transformer(config, name)


def read_pair(target: str | Path, draft: str | Path) -> CostedPair:
    """Read a target and its draft: an EAGLE-3 head of it, or an independent model.

    Raises:
        InputError: as `read_hf_config`; if ``target`` is a head, or the head is of another width.
    """
    model, proposer = read_hf_config(target), read_hf_config(draft)
    if isinstance(model, Eagle3Head):
        raise InputError(f"{target} must describe a whole model; it is an EAGLE-3 head.")
    if isinstance(proposer, Eagle3Head) and proposer.target_hidden != model.hidden:
        raise InputError(
            f"The EAGLE-3 head {draft} must take the target's hidden states of width "
            f"{model.hidden}; it takes {proposer.target_hidden}. Choose the head of {model.name}."
        )
    return CostedPair(model, proposer)


@dataclass(frozen=True, slots=True)
class _Config:
    """Keys of one file; ``where`` names it in messages."""

    where: str
    keys: Mapping[str, object]

    def has(self, key: str) -> bool:
        return self.keys.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        value = self.keys.get(key)
        if value is None:
            if default is None:
                raise InputError(
                    f"{self.where} must have the key {key!r}; it has not. Take the file from the "
                    "model's own repository, or add the key."
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.where}: {key} must be a whole number above 0; got {value!r}.")
        return value

    def number(self, key: str) -> int:
        """Return a whole number of at least 0; 0 where the key is absent."""
        return 0 if self.keys.get(key) in (None, 0) else self.count(key)

    def text(self, key: str) -> str:
        value = self.keys.get(key)
        return value if isinstance(value, str) else ""

    def nested(self, key: str) -> _Config:
        inner = self.keys.get(key)
        return _Config(f"{self.where}, {key}", inner) if isinstance(inner, dict) else self

    def refuse(self, what: str) -> InputError:
        return InputError(
            f"{self.where} must describe a decoder of like layers with full attention; it has "
            f"{what}. Cost it with a measured table instead."
        )


def _is_eagle3(keys: Mapping[str, object]) -> bool:
    names = keys.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or "draft_vocab_size" in keys or keys.get("speculators_model_type") == "eagle3"


def _attention(config: _Config) -> tuple[int, int, int]:
    """Return heads, key-value heads and head dimension."""
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"{config.where}: num_key_value_heads must divide the {heads} num_attention_heads; "
            f"got {kv_heads}."
        )
    if not config.has("head_dim") and hidden % heads:
        raise InputError(
            f"{config.where} must have the key 'head_dim', because hidden_size {hidden} is no "
            f"multiple of num_attention_heads {heads}; it has not."
        )
    return heads, kv_heads, config.count("head_dim", hidden // heads)


def _transformer(config: _Config, name: str) -> Transformer:
    if not config.has("hidden_size"):
        config = config.nested("text_config")  # a model of text and images
    _require_like_layers(config)
    experts = _experts(config)
    heads, kv_heads, head_dim = _attention(config)
    kind = config.text("model_type")
    tied = config.keys.get("tie_word_embeddings")
    return Transformer(
        name=name,
        layers=config.count("num_hidden_layers"),
        hidden=config.count("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.count("intermediate_size", experts.ffn if experts else None),
        vocab=config.count("vocab_size"),
        experts=experts,
        has_qk_norm=kind.startswith(QK_NORM_TYPES) or config.keys.get("use_qk_norm") is True,
        has_tied_head=kind.startswith(TIED_BY_DEFAULT) if tied is None else tied is True,
    )


def _require_like_layers(config: _Config) -> None:
    if config.has("kv_lora_rank"):
        raise config.refuse("latent attention (kv_lora_rank)")
    kinds = config.keys.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in FULL_OR_SLIDING:
            raise config.refuse(f"layers of type {kind!r}")
    if not any(config.has(key) for key in EXPERT_KEYS):
        return
    for key, plain in (
        ("mlp_only_layers", []),
        ("decoder_sparse_step", 1),
        ("first_k_dense_replace", 0),
        ("interleave_moe_layer_step", 1),
    ):
        value = config.keys.get(key)
        if value not in (None, plain):
            raise config.refuse(f"dense layers among sparse ones ({key} {value})")


def _experts(config: _Config) -> Experts | None:
    """Return the experts of a layer, None for a dense model.

    A shared expert counts as so many of the routed ones, always chosen (qwen2-moe,
    deepseek-moe): weights and flops are right, the coverage in between is nearly so.
    """
    key = next((key for key in EXPERT_KEYS if config.has(key)), None)
    if key is None:
        return None
    own_width = config.has("moe_intermediate_size")
    ffn = config.count("moe_intermediate_size" if own_width else "intermediate_size")
    count, per_token = config.count(key), config.count("num_experts_per_tok")
    if per_token > count:
        raise InputError(
            f"{config.where}: num_experts_per_tok must not exceed the {count} of {key}; got "
            f"{per_token}."
        )
    shared = config.number("n_shared_experts")
    shared += ceil(config.number("shared_expert_intermediate_size") / ffn)
    return Experts(count=count + shared, per_token=per_token + shared, ffn=ffn)


def _eagle3_head(config: _Config, name: str) -> Eagle3Head:
    layer = config.nested("transformer_layer_config")  # layout B; layout A is flat
    if layer.number("num_hidden_layers") > 1:
        raise config.refuse("more than one draft layer, where an EAGLE-3 head has one")
    ids = config.nested("eagle_config").keys.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(ids, list) and len(ids) != 3:  # noqa: PLR2004 - EAGLE-3 joins three states
        raise config.refuse(f"{len(ids)} auxiliary hidden states, where an EAGLE-3 head joins 3")
    heads, kv_heads, head_dim = _attention(layer)
    hidden = layer.count("hidden_size")
    cut = config.has("draft_vocab_size")  # absent or null: the target's vocabulary
    vocab, key = (config, "draft_vocab_size") if cut else (layer, "vocab_size")
    return Eagle3Head(
        name=name,
        target_hidden=config.count("target_hidden_size", hidden),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=layer.count("intermediate_size"),
        vocab=vocab.count(key),
        head_dim=head_dim,
        source=config.where,
    )
