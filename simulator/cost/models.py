"""Shapes of target models and drafts, and what follows from them: weights, flops, KV bytes.

Everything is bf16. Norm weights and biases (below 0.02 % of any model) are left out.
The concrete models are in ``catalogue.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BF16_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture-of-experts block that takes the place of the dense feed-forward."""

    count: int
    per_token: int
    ffn: int
    """Hidden width of one expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Shape of a decoder-only language model (hardware.md section 1)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: Experts | None = None
    has_qk_norm: bool = False
    has_tied_head: bool = False
    """The LM head is the embedding matrix: stored once, read once per step all the same."""

    @property
    def attention_parameters(self) -> int:
        """Weights of the q, k, v and o projections of one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, all experts included."""
        if self.experts is None:
            return self.attention_parameters + 3 * self.hidden * self.ffn
        router = self.hidden * self.experts.count
        return self.attention_parameters + router + self.experts.count * self._expert_parameters

    @property
    def parameters(self) -> int:
        """All weights, embedding included."""
        embeddings = 1 if self.has_tied_head else 2
        return self.layers * self.layer_parameters + embeddings * self.vocab * self.hidden

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights read by a forward that uses every expert; no embedding lookup."""
        return BF16_BYTES * (self.layers * self.layer_parameters + self.vocab * self.hidden)

    @property
    def flops_per_token(self) -> int:
        """Flops of the matrix products of one token, attention over the context excluded."""
        active = self.layer_parameters
        if self.experts is not None:
            idle = self.experts.count - self.experts.per_token
            active -= idle * self._expert_parameters
        return 2 * (self.layers * active + self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps, over all layers."""
        return BF16_BYTES * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.hidden * self.experts.ffn if self.experts else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Head:
    """Shape of an EAGLE-3 draft head: one decoder layer fed with embedding ++ hidden state.

    ``fc`` joins three hidden states of the target into one of the head; it runs once per cycle.
    """

    name: str
    target_hidden: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 32_000
    head_dim: int = 128
    source: str
    is_verified: bool = True
    """False where no published configuration file of this head was seen."""

    @property
    def layer_parameters(self) -> int:
        """Weights read per row of a draft step, LM head included, ``fc`` excluded."""
        qkv = 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        output = self.hidden * self.heads * self.head_dim
        return qkv + output + 3 * self.hidden * self.ffn + self.hidden * self.vocab

    @property
    def streamed_bytes(self) -> int:
        """Bytes of all weights with ``fc``; the embedding is the target's."""
        return BF16_BYTES * (self.layer_parameters + 3 * self.target_hidden * self.hidden)

    @property
    def flops_per_token(self) -> int:
        """Flops of the matrix products of one row of a draft step, without ``fc``."""
        return 2 * self.layer_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps in the head's single layer."""
        return BF16_BYTES * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class CostedPair:
    """A target and the draft it is costed with: an EAGLE-3 head or an independent model."""

    target: Transformer
    draft: Eagle3Head | Transformer
