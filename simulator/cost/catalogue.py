"""Every target that can be costed, with its draft. Source: hardware.md section 1."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from echo_policies.errors import UnknownNameError
from simulator.cost.models import CostedPair, Eagle3Head, Experts, Transformer

VICUNA_13B: Final = Transformer(
    name="vicuna-13b",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=40,
    head_dim=128,
    ffn=13824,
    vocab=32_000,
)
LLAMA_3_1_8B: Final = Transformer(
    name="llama-3.1-8b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128_256,
)
LLAMA_3_3_70B: Final = Transformer(
    name="llama-3.3-70b",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn=28672,
    vocab=128_256,
)
QWEN3_8B: Final = Transformer(
    name="qwen3-8b",
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=12288,
    vocab=151_936,
    has_qk_norm=True,
)
QWEN3_32B: Final = Transformer(
    name="qwen3-32b",
    layers=64,
    hidden=5120,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn=25600,
    vocab=151_936,
    has_qk_norm=True,
)
QWEN3_235B: Final = Transformer(
    name="qwen3-235b",
    layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    ffn=12288,
    vocab=151_936,
    experts=Experts(count=128, per_token=8, ffn=1536),
    has_qk_norm=True,
)
QWEN2_5_CODER_1_5B: Final = Transformer(
    name="qwen2.5-coder-1.5b",
    layers=28,
    hidden=1536,
    heads=12,
    kv_heads=2,
    head_dim=128,
    ffn=8960,
    vocab=151_936,
    has_tied_head=True,
)
QWEN2_5_CODER_0_5B: Final = Transformer(
    name="qwen2.5-coder-0.5b",
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    ffn=4864,
    vocab=151_936,
    has_tied_head=True,
)
SMOLLM2_135M: Final = Transformer(
    name="smollm2-135m",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=49_152,
    has_tied_head=True,
)

_PAIRS: Final = (
    CostedPair(
        VICUNA_13B,
        Eagle3Head(
            name="EAGLE3-Vicuna1.3-13B",
            target_hidden=5120,
            hidden=5120,
            heads=40,
            kv_heads=40,
            ffn=13824,
            source="EAGLE v1 head json and the cnets rule; configuration file not seen",
            is_verified=False,
        ),
    ),
    CostedPair(
        LLAMA_3_1_8B,
        Eagle3Head(
            name="EAGLE3-LLaMA3.1-Instruct-8B",
            target_hidden=4096,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            source="SafeAILab/EAGLE traineagle3/config.json",
        ),
    ),
    CostedPair(
        LLAMA_3_3_70B,
        Eagle3Head(
            name="EAGLE3-LLaMA3.3-Instruct-70B (yuhuili)",
            target_hidden=8192,
            hidden=6144,
            heads=48,
            kv_heads=8,
            ffn=16384,
            source="not verified: sglang PR 4716 says only that the hidden sizes differ",
            is_verified=False,
        ),
    ),
    CostedPair(
        QWEN3_8B,
        Eagle3Head(
            name="SpecForge Qwen3-8B",
            target_hidden=4096,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=12288,
            source="SpecForge qwen3-8b-eagle3.json",
        ),
    ),
    CostedPair(
        QWEN3_32B,
        Eagle3Head(
            name="SpecForge Qwen3-32B",
            target_hidden=5120,
            hidden=5120,
            heads=64,
            kv_heads=8,
            ffn=25600,
            source="SpecForge qwen3-32b-eagle3.json",
        ),
    ),
    CostedPair(
        QWEN3_235B,
        Eagle3Head(
            name="SpecForge Qwen3-235B",
            target_hidden=4096,
            hidden=4096,
            heads=64,
            kv_heads=4,
            ffn=24576,
            source="SpecForge qwen3-235B-A22B-eagle3.json",
        ),
    ),
    CostedPair(QWEN2_5_CODER_1_5B, QWEN2_5_CODER_0_5B),
    CostedPair(
        SMOLLM2_135M,
        Eagle3Head(
            name="EAGLE3-SmolLM2-135M",
            target_hidden=576,
            hidden=576,
            heads=9,
            kv_heads=3,
            head_dim=64,
            ffn=1536,
            vocab=16_384,
            source="the target's own layer; draft vocabulary of models.md section 4",
            is_verified=False,
        ),
    ),
)

PAIRS: Final[Mapping[str, CostedPair]] = MappingProxyType(
    {pair.target.name: pair for pair in _PAIRS}
)
"""Every costed pair by the name of its target."""


def find_pair(target: str) -> CostedPair:
    """Return the pair of the target of that name.

    Raises:
        UnknownNameError: if no target has that name.
    """
    try:
        return PAIRS[target]
    except KeyError:
        raise UnknownNameError("target model", target, PAIRS) from None
