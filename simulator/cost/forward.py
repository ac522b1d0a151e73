"""Time of one forward of a model, composed of operators (hardware.md section 4.4).

A forward is described by three counts, which cover decoding, tree verification and prefill alike:
``rows`` flattened query tokens, ``pairs`` scored query-key pairs, ``span`` tokens whose keys and
values are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from simulator.cost.models import Eagle3Head, Transformer
from simulator.cost.operators import Operators

PARTS: Final = ("gemm", "experts", "attention", "elementwise", "all_reduce")
"""What `Parts` holds, in order."""

Parts: TypeAlias = tuple[float, float, float, float, float]
"""Seconds of a forward's layers by operator."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What one forward launches, for engines that do not replay it from a CUDA graph."""

    launches: int
    all_reduces: int


@dataclass(frozen=True, slots=True)
class TransformerForward:
    """A transformer's shapes on one of ``tp`` ranks, with the operators that time them."""

    ops: Operators
    layers: int
    hidden: int
    q_width: float
    kv_width: float
    """At least one key-value head per rank: heads are replicated where tp exceeds them."""
    ffn: float
    """Width on one rank of the dense block, or of one expert."""
    vocab: int
    tp: int
    ep: int
    """Ranks that the experts are spread over; each expert is cut over the other tp / ep."""
    model: Transformer

    def body_s(self, rows: float, pairs: float, span: float) -> float:
        """Return the seconds of all layers."""
        gemm, experts, attention, elementwise, all_reduce = self.layer_parts(rows, pairs, span)
        return self.layers * (gemm + experts + attention + elementwise + all_reduce)

    def layer_parts(self, rows: float, pairs: float, span: float) -> Parts:
        """Return the seconds of one layer by operator, in the order of `PARTS`."""
        ops, hidden, q_width, ffn = self.ops, self.hidden, self.q_width, self.ffn
        qkv_width = q_width + 2.0 * self.kv_width
        rope_passes = 2 if self.model.has_qk_norm else 1
        gemm = ops.gemm_s(rows, qkv_width, hidden) + ops.gemm_s(rows, hidden, q_width)
        attention = ops.attention_s(rows, pairs, span, q_width, self.kv_width)
        elementwise = 2.0 * ops.elementwise_s(8.0 * rows * hidden)  # the two norms
        elementwise += rope_passes * ops.elementwise_s(4.0 * rows * qkv_width)
        all_reduce = 2.0 * ops.all_reduce_s(2.0 * rows * hidden)
        experts = self.model.experts
        if experts is None:
            gemm += ops.gemm_s(rows, 2.0 * ffn, hidden) + ops.gemm_s(rows, hidden, ffn)
            elementwise += ops.elementwise_s(6.0 * rows * ffn)
            return gemm, 0.0, attention, elementwise, all_reduce
        gemm += ops.head_s(rows, experts.count, hidden)  # the router stays bf16
        elementwise += 2.0 * ops.elementwise.floor_s
        moe = ops.fused_moe_s(rows, hidden, experts, ffn, self.ep)
        return gemm, moe, attention, elementwise, all_reduce

    @property
    def kernels(self) -> Kernels:
        """Kernels of one forward with its LM head and argmax."""
        per_layer = 9 if self.model.experts is None else 10
        per_layer += 1 if self.model.has_qk_norm else 0
        reduces = 2 * self.layers + 1 if self.tp > 1 else 0
        return Kernels(self.layers * per_layer + 5, reduces)

    def argmax_s(self, rows: float) -> float:
        """Return the seconds of picking the target's token on ``rows`` rows."""
        ops = self.ops
        return 2.0 * ops.elementwise_s(4.0 * rows * self.vocab) + 2.0 * ops.elementwise.floor_s


@dataclass(frozen=True, slots=True)
class EagleForward:
    """An EAGLE-3 head's single layer on one of ``tp`` ranks."""

    ops: Operators
    hidden: int
    q_width: float
    kv_width: float
    ffn: float
    vocab: int
    tp: int
    model: Eagle3Head

    def body_s(self, rows: float, pairs: float, span: float) -> float:
        """Return the seconds of the layer; q, k and v take embedding ++ hidden."""
        ops, hidden, q_width, ffn = self.ops, self.hidden, self.q_width, self.ffn
        total_s = ops.gemm_s(rows, q_width + 2.0 * self.kv_width, 2.0 * hidden)
        total_s += ops.gemm_s(rows, hidden, q_width)
        total_s += ops.attention_s(rows, pairs, span, q_width, self.kv_width)
        total_s += ops.gemm_s(rows, 2.0 * ffn, hidden) + ops.gemm_s(rows, hidden, ffn)
        total_s += 6.0 * ops.elementwise_s(6.0 * rows * hidden)
        total_s += ops.elementwise_s(6.0 * rows * ffn)
        return total_s + 2.0 * ops.all_reduce_s(2.0 * rows * hidden)

    def fc_s(self, rows: float) -> float:
        """Return the seconds of joining three target states into one of the head."""
        return self.ops.head_s(rows, self.hidden, 3.0 * self.model.target_hidden)

    @property
    def kernels(self) -> Kernels:
        """Kernels of one draft step with its LM head, softmax and top-k."""
        return Kernels(12 + 8, 3 if self.tp > 1 else 0)


def logits_s(forward: TransformerForward | EagleForward, rows: float) -> float:
    """Return the seconds of the LM head over ``rows`` rows, gathered from all ranks."""
    vocab_share = forward.vocab / forward.tp
    gather_s = forward.ops.all_reduce_s(2.0 * rows * vocab_share)
    return forward.ops.head_s(rows, vocab_share, forward.hidden) + gather_s


def propose_s(forward: TransformerForward | EagleForward, rows: float) -> float:
    """Return the seconds of LM head, softmax and top-k of a draft over ``rows`` rows."""
    ops = forward.ops
    softmax_s = 3.0 * ops.elementwise_s(4.0 * rows * forward.vocab)
    return logits_s(forward, rows) + softmax_s + 4.0 * ops.elementwise.floor_s


def shard_transformer(
    model: Transformer, ops: Operators, tp: int, ep: int = 1
) -> TransformerForward:
    """Cut a transformer into the shapes of one rank; the caller has checked the division."""
    ffn = model.ffn if model.experts is None else model.experts.ffn * ep
    return TransformerForward(
        ops=ops,
        layers=model.layers,
        hidden=model.hidden,
        q_width=model.heads / tp * model.head_dim,
        kv_width=max(1.0, model.kv_heads / tp) * model.head_dim,
        ffn=ffn / tp,
        vocab=model.vocab,
        tp=tp,
        ep=ep,
        model=model,
    )


def shard_eagle(head: Eagle3Head, ops: Operators, tp: int) -> EagleForward:
    """Cut an EAGLE-3 head into the shapes of one rank; the caller has checked the division."""
    return EagleForward(
        ops=ops,
        hidden=head.hidden,
        q_width=head.heads / tp * head.head_dim,
        kv_width=max(1.0, head.kv_heads / tp) * head.head_dim,
        ffn=head.ffn / tp,
        vocab=head.vocab,
        tp=tp,
        model=head,
    )
