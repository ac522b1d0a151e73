"""The forward of an EAGLE-3 head.

Its layer is transformers' own, with wider projections: queries, keys and values come from the
embedding and the hidden state side by side. How rows attend is the caller's choice, through the
attention function that the layer's configuration names: a ragged batch when serving, a training
step when training.

Shape letters: R rows, F features side by side (taps times target width), h hidden size, V target
vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpu_backend.eagle3.head_config import HeadConfig


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What a head says of its rows."""

    fed: Tensor
    """[..., R, h]: hidden states that the next draft step takes."""
    normed: Tensor
    """[..., R, h]: what the output layer takes."""


class Eagle3Head(nn.Module):
    """One decoder layer over (token, hidden state) pairs, and an output layer.

    A pair is the token that comes next and the state of the position before it: at the first draft
    step the target's features there, fused by :meth:`fuse`; later the head's own output.

    Attributes:
        token_ids: int64 [D], the target's id of every token it can propose, ascending.
    """

    token_ids: Tensor

    def __init__(self, config: HeadConfig, attention: str = "sdpa") -> None:
        """Allocate the parameters, untrained.

        Args:
            config: shape and switches.
            attention: name of the attention function, as transformers knows it.
        """
        from transformers.models.qwen3.modeling_qwen3 import (
            Qwen3Attention,
            Qwen3MLP,
            Qwen3RMSNorm,
            Qwen3RotaryEmbedding,
        )

        super().__init__()
        self.config = config
        layer, size = config.layer_config, config.hidden_size
        layer._attn_implementation = attention

        def norm(width: int = size) -> nn.Module:
            return cast("nn.Module", Qwen3RMSNorm(width, eps=config.rms_norm_eps))

        num_taps, width = len(config.taps), config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(num_taps * width, size, bias=config.fc_bias)
        self.fc_norm = nn.ModuleList(norm(width) for _ in range(num_taps if config.fc_norm else 0))
        self.input_norm = norm(num_taps * width) if config.norm_before_fc else None
        self.input_layernorm, self.hidden_norm = norm(), norm()
        self.self_attn = Qwen3Attention(layer, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, old.out_features, bias=config.attention_bias)
            setattr(self.self_attn, name, wide)
        if not config.qk_norm:
            for name in ("q_norm", "k_norm"):
                setattr(self.self_attn, name, nn.Identity())
        self.post_attention_layernorm = norm()
        self.mlp: nn.Module = Qwen3MLP(layer)  # type: ignore[no-untyped-call]
        if config.mlp_bias:
            for name, old in list(self.mlp.named_children()):
                if isinstance(old, nn.Linear):
                    setattr(self.mlp, name, nn.Linear(old.in_features, old.out_features))
        self.norm = norm()
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(layer)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def reset_buffers(self, token_ids_D: Tensor) -> None:
        """Say which tokens the head proposes, and compute the rotary frequencies on their device.

        A head that was made without storage has no buffers until then.
        """
        self.token_ids = token_ids_D
        rotary = type(self.rotary_emb)(self.config.layer_config)
        self.rotary_emb = rotary.to(token_ids_D.device)

    def fuse(self, features_RF: Tensor) -> Tensor:
        """Hidden states [..., R, h] of target features, taps side by side in ascending order."""
        if self.input_norm is not None:
            features_RF = self.input_norm(features_RF)
        if self.fc_norm:
            parts = torch.split(features_RF, self.config.target_hidden_size, dim=-1)
            features_RF = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return cast("Tensor", self.fc(features_RF))

    def forward(
        self, tokens_1R: Tensor, hidden_1Rh: Tensor, positions_1R: Tensor, **attention: Any
    ) -> HeadOutput:
        """Run rows of pairs.

        Args:
            tokens_1R: int64 [1, R], the target's ids of the next tokens.
            hidden_1Rh: [1, R, h], fused features or an earlier :attr:`HeadOutput.fed`.
            positions_1R: int64 [1, R]; a pair stands at its feature's position.
            attention: for the attention function.
        """
        normed_1Rh = self.hidden_norm(hidden_1Rh)
        residual_1Rh = normed_1Rh if self.config.norm_before_residual else hidden_1Rh
        pair = torch.cat([self.input_layernorm(self.embed_tokens(tokens_1R)), normed_1Rh], dim=-1)
        attended, _ = self.self_attn(
            pair, position_embeddings=self.rotary_emb(pair, positions_1R), **attention
        )
        middle = residual_1Rh + attended
        out = middle + self.mlp(self.post_attention_layernorm(middle))
        normed = self.norm(out)
        return HeadOutput(normed if self.config.norm_output else out, normed)

    def logits(self, normed_Rh: Tensor) -> Tensor:
        """Logits [..., R, D] over the tokens of :attr:`token_ids`."""
        return cast("Tensor", self.lm_head(normed_Rh))
