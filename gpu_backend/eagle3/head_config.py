"""What an EAGLE-3 head is, whichever layout its files have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3Config

MIN_LAYERS = 7
"""Layers from which on the three default taps are distinct and in order."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and switches of a head, all defaults resolved."""

    hidden_size: int
    """h; also the width of its embedding."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    """Tokens of the target, V."""
    draft_vocab_size: int
    """Tokens that the head can propose, Vd."""
    target_hidden_size: int
    """Width of one target feature."""
    taps: tuple[int, ...]
    """Features by the layer whose input they are (0 is the embedding's output), ascending."""
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised by head, as in Qwen3."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    """One norm over all features before they are fused."""
    fc_norm: bool = False
    """One norm per feature before they are fused (EAGLE-3.1)."""
    norm_output: bool = False
    """The next draft step is fed the normalised output (EAGLE-3.1)."""
    shares_target_head: bool = False
    """The head has no output layer of its own: it uses its tokens' rows of the target's."""

    @property
    def layer_config(self) -> Qwen3Config:
        """Its decoder layer as transformers knows it; Qwen3's can also do without its norms.

        ``max_position_embeddings`` is left out on purpose: in published heads it is the length
        that training used, and rotary positions do not end there.
        """
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            hidden_act=self.hidden_act,
            rms_norm_eps=self.rms_norm_eps,
            attention_bias=self.attention_bias,
            rope_parameters=dict(self.rope_parameters),
        )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Features that EAGLE-3 takes from a target of so many layers: early, middle, late."""
    return 2, num_layers // 2, num_layers - 3
