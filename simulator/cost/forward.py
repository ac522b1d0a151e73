"""Time of one forward of a model, composed of operators (hardware.md section 4.4).

A forward is described by three counts, which cover decoding, tree verification and prefill alike:
``rows`` flattened query tokens, ``pairs`` scored query-key pairs, ``span`` tokens whose keys and
values are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cost.models import Eagle3Head, Transformer
from simulator.cost.operators import Operators


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
    model: Transformer

    def body_s(self, rows: float, pairs: float, span: float) -> float:
        """Return the seconds of all layers."""
        ops, hidden, q_width = self.ops, self.hidden, self.q_width
        qkv_width = q_width + 2.0 * self.kv_width
        rope_passes = 2 if self.model.has_qk_norm else 1
        layer_s = ops.gemm_s(rows, qkv_width, hidden)
        layer_s += ops.gemm_s(rows, hidden, q_width)
        layer_s += ops.attention_s(rows, pairs, span, q_width, self.kv_width)
        layer_s += 2.0 * ops.elementwise_s(8.0 * rows * hidden)  # the two norms
        layer_s += rope_passes * ops.elementwise_s(4.0 * rows * qkv_width)
        layer_s += 2.0 * ops.all_reduce_s(2.0 * rows * hidden)
        return self.layers * (layer_s + self._feed_forward_s(rows))

    def _feed_forward_s(self, rows: float) -> float:
        ops, hidden, ffn = self.ops, self.hidden, self.ffn
        experts = self.model.experts
        if experts is None:
            return (
                ops.gemm_s(rows, 2.0 * ffn, hidden)
                + ops.gemm_s(rows, hidden, ffn)
                + ops.elementwise_s(6.0 * rows * ffn)
            )
        router_s = ops.gemm_s(rows, experts.count, hidden) + 2.0 * ops.elementwise.floor_s
        return router_s + ops.fused_moe_s(rows, hidden, experts, ffn)

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
        return self.ops.gemm_s(rows, self.hidden, 3.0 * self.model.target_hidden)


def logits_s(forward: TransformerForward | EagleForward, rows: float) -> float:
    """Return the seconds of the LM head over ``rows`` rows, gathered from all ranks."""
    vocab_share = forward.vocab / forward.tp
    gather_s = forward.ops.all_reduce_s(2.0 * rows * vocab_share)
    return forward.ops.gemm_s(rows, vocab_share, forward.hidden) + gather_s


def propose_s(forward: TransformerForward | EagleForward, rows: float) -> float:
    """Return the seconds of LM head, softmax and top-k of a draft over ``rows`` rows."""
    ops = forward.ops
    softmax_s = 3.0 * ops.elementwise_s(4.0 * rows * forward.vocab)
    return logits_s(forward, rows) + softmax_s + 4.0 * ops.elementwise.floor_s


def shard_transformer(model: Transformer, ops: Operators, tp: int) -> TransformerForward:
    """Cut a transformer into the shapes of one rank; the caller has checked the division."""
    ffn = model.ffn if model.experts is None else model.experts.ffn
    return TransformerForward(
        ops=ops,
        layers=model.layers,
        hidden=model.hidden,
        q_width=model.heads / tp * model.head_dim,
        kv_width=max(1.0, model.kv_heads / tp) * model.head_dim,
        ffn=ffn / tp,
        vocab=model.vocab,
        tp=tp,
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
