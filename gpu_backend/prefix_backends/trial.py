"""A small example that a library must read as torch does before a run goes by it.

What a library documents and what is installed can differ, and kernels may be compiled only when
they are first called; so it is asked once, in front of everything else.

Shape letters: h kv heads, g query heads per kv head, R rows, d head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.kv_pool import KvPool, head_dim
from gpu_backend.prefix_backends.choice import Attention, AttentionName, choose_attention
from gpu_backend.prefix_backends.layout import FirstPass, LayOut
from gpu_backend.sequence_pass import Padded

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOLERANCE: Final = 0.05
"""Of outputs and log-sum-exps of normal values; rounding to bfloat16 explains a fifth of it."""

_LENGTHS: Final = (5, 61, 4)
_ROWS: Final = (3, 1, 4)


def tried_attention(
    name: AttentionName, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> Attention:
    """Choose what reads a model's sequences, and hold a library against torch.

    Args:
        name: what was asked for.
        config: of the model.
        dtype: of its keys and values.
        device: of the model.

    Raises:
        InputError: what was asked for by name cannot be used, or what was chosen fails or answers
            otherwise than torch.
    """
    chosen = choose_attention(name, device, dtype, head_dim(config))
    if chosen.backend is not None:
        pool = KvPool.of(config, sum(_LENGTHS), dtype, device)
        _try_out(chosen, pool, config.num_attention_heads)
    return chosen


def _try_out(attention: Attention, pool: KvPool, query_heads: int) -> None:
    """Try causal rows and rows that see everything."""
    try:
        library = attention.lay_out(pool, query_heads)
        assert library is not None, "torch is not tried"
        is_right = all(_agree(library, pool, query_heads, causal) for causal in (True, False))
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"attention: {attention.name} must run on this device; it fails with "
            f"{type(error).__name__}: {why}. Update it, or use --attention torch."
        ) from error
    if not is_right:
        raise InputError(
            f"attention: {attention.name} must answer as torch does; on a small example it does "
            "not. Update it, or use --attention torch."
        )


def _agree(library: LayOut, pool: KvPool, query_heads: int, is_causal: bool) -> bool:
    """Whether both say the same of requests whose slots lie anywhere; one may see nothing."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(sum(_LENGTHS), generator=generator).numpy()
    seen = [slots[:5], slots[5:66], slots[66:] if is_causal else slots[:0]]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(pool.device, pool.dtype)

    keys_values = draw(2, pool.num_heads, len(slots), pool.head_dim)
    pool.write(0, torch.arange(len(slots), device=pool.device), *keys_values.unbind())
    query_hgRd = draw(pool.num_heads, query_heads // pool.num_heads, sum(_ROWS), pool.head_dim)
    query_hgRd *= pool.head_dim**-0.5

    def run(lay_out: LayOut) -> tuple[Tensor, Tensor]:
        first: FirstPass = lay_out(seen, list(_ROWS), pool.device, is_causal=is_causal)
        return first.attend(pool, 0, query_hgRd)

    pairs = zip(run(library), run(Padded.of), strict=True)
    return all(
        torch.allclose(one.float(), other.float(), atol=TOLERANCE, rtol=0.0) for one, other in pairs
    )
