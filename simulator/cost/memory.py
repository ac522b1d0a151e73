"""Which tensor-parallel degrees a pair can run at, and whether weights and KV cache fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_policies.errors import InputError
from simulator.cost.models import BF16_BYTES, CostedPair, Eagle3Head, Transformer
from simulator.hardware import Hardware

TP_DEGREES: Final = (1, 2, 4, 8)
"""Degrees with measured all-reduce times."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each GPU; activations, CUDA graphs and fragmentation are not counted."""

    weight_bytes: float
    kv_bytes: float
    memory_bytes: float

    @property
    def total_bytes(self) -> float:
        """Bytes of weights and KV cache together."""
        return self.weight_bytes + self.kv_bytes

    @property
    def is_enough(self) -> bool:
        """Whether the GPU holds them."""
        return self.total_bytes <= self.memory_bytes


def can_shard(model: Transformer | Eagle3Head, tp: int) -> bool:
    """Whether the heads and the feed-forward divide by ``tp``; few kv heads are replicated."""
    ffn = model.ffn
    if isinstance(model, Transformer) and model.experts is not None:
        ffn = model.experts.ffn
    kv_divides = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return model.heads % tp == 0 and ffn % tp == 0 and kv_divides


def valid_degrees(model: Transformer) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that the model can run at."""
    return tuple(tp for tp in TP_DEGREES if can_shard(model, tp))


def check_tp(model: Transformer, tp: int) -> None:
    """Refuse a tensor-parallel degree that the model cannot run at.

    Raises:
        InputError: if ``tp`` is not a known degree or does not divide the model.
    """
    if tp in valid_degrees(model):
        return
    degrees = ", ".join(map(str, valid_degrees(model)))
    if tp not in TP_DEGREES:
        raise InputError(f"tp must be 1, 2, 4 or 8; got {tp}. {model.name} runs at {degrees}.")
    raise InputError(
        f"tp must divide the {model.heads} attention heads and the feed-forward of {model.name}; "
        f"got {tp}. It runs at {degrees}."
    )


def check_ep(model: Transformer, tp: int, ep: int) -> None:
    """Refuse an expert-parallel degree that the model cannot run at.

    Raises:
        InputError: if ``ep`` does not divide ``tp`` and the experts.
    """
    experts = model.experts.count if model.experts else 1
    if ep < 1 or tp % ep or experts % ep:
        held = f"the {experts} experts" if model.experts else "a dense model, which runs at ep 1,"
        raise InputError(f"ep must divide tp {tp} and {held} of {model.name}; got {ep}.")


def draft_tp(draft: Transformer | Eagle3Head, tp: int) -> int:
    """Return the degree the draft runs at: the target's, or 1 (replicated) if it cannot divide."""
    return tp if can_shard(draft, tp) else 1


def memory_need(
    pair: CostedPair,
    hardware: Hardware,
    tp: int,
    batch_size: int,
    context_tokens: int,
    *,
    dtype: str = "bf16",
) -> MemoryNeed:
    """Return the bytes per GPU that a batch needs, draft and its KV cache included.

    In fp8 the layers take a byte per weight; embedding, LM head, draft and KV cache stay bf16.
    """
    kv_tokens = batch_size * context_tokens
    split = draft_tp(pair.draft, tp)
    target_bytes = BF16_BYTES * pair.target.parameters / tp
    if dtype != "bf16":
        target_bytes -= pair.target.layers * pair.target.layer_parameters / tp
    draft_bytes = (
        BF16_BYTES * pair.draft.parameters
        if isinstance(pair.draft, Transformer)
        else pair.draft.streamed_bytes
    )
    per_token = _kv_bytes_per_token(pair.target, tp) + _kv_bytes_per_token(pair.draft, split)
    return MemoryNeed(
        weight_bytes=target_bytes + draft_bytes / split,
        kv_bytes=kv_tokens * per_token,
        memory_bytes=hardware.memory_bytes,
    )


def _kv_bytes_per_token(model: Transformer | Eagle3Head, tp: int) -> float:
    return model.kv_bytes_per_token / min(tp, model.kv_heads)


def require_memory(
    pair: CostedPair,
    hardware: Hardware,
    tp: int,
    batch_size: int,
    context_tokens: int,
    *,
    dtype: str = "bf16",
) -> MemoryNeed:
    """Return what a batch needs per GPU.

    Raises:
        InputError: if it does not fit; the message names the least ``tp`` that does.
    """
    need = memory_need(pair, hardware, tp, batch_size, context_tokens, dtype=dtype)
    if need.is_enough:
        return need
    fitting = (
        degree
        for degree in valid_degrees(pair.target)
        if memory_need(pair, hardware, degree, batch_size, context_tokens, dtype=dtype).is_enough
    )
    least = next(fitting, None)
    advice = f"The least tp that fits is {least}." if least else "No tp fits: lower one of them."
    raise InputError(
        f"{pair.target.name} at batch {batch_size} and context {context_tokens} tokens needs "
        f"{need.total_bytes / 1e9:.1f} GB on each of {tp} {hardware.name}, which holds "
        f"{need.memory_bytes / 1e9:.1f} GB. {advice}"
    )
