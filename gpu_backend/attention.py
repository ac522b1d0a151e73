"""Tree attention for flattened rows: how a model comes to it, the ancestor pass, the merge.

Shape letters: K rows, A ancestors, h kv heads, g query heads per kv head, d head dimension.

No ``[K, K]`` mask exists: a row meets its own branch through an index of ancestors, so the cost
grows with rows times depth and rows of many requests and positions share one forward. Where the
rows are and what they see is the business of :class:`AttentionRows`: on a GPU and in recording
:class:`gpu_backend.ragged_rows.RaggedRows`, on a serving CPU
:class:`gpu_backend.window_rows.WindowRows`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from echo_policies.errors import InputError
from gpu_backend.half_products import product

ATTENTION_NAME: Final = "echo_tree"
"""Name under which transformers finds :func:`tree_attention`."""

_VARIANTS: Final = ("softcap", "s_aux", "sliding_window")


class AttentionRows(Protocol):
    """What the attention of one forward needs to know of its rows; passed through the model."""

    def attend(self, layer: int, query_hgKd: Tensor, key_hKd: Tensor, value_hKd: Tensor) -> Tensor:
        """Store the rows' keys and values, and return the attention's output ``[h, g, K, d]``.

        Args:
            layer: number of the attention layer.
            query_hgKd: after rope, scaled.
            key_hKd: after rope, not repeated for grouped queries.
            value_hKd: likewise.
        """
        ...


def register_tree_attention() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, tree_attention)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    tree_rows: AttentionRows,
    **variant: Any,
) -> tuple[Tensor, None]:
    """Attend from flattened rows to each row's prefix and to its ancestors.

    Args:
        module: the attention layer; its ``layer_idx`` picks the layer of the store.
        query: ``[1, h * g, K, d]`` after rope.
        key: ``[1, h, K, d]`` after rope, not repeated.
        value: ``[1, h, K, d]``.
        attention_mask: always None, because no mask is built for an unknown implementation.
        scaling: factor on the scores.
        tree_rows: where the rows are and what they see.
        variant: what else the model asks of its attention.

    Returns:
        ``[1, K, h * g, d]`` and None. The rows' keys and values are stored.

    Raises:
        InputError: the model asks for a variant of attention that would change the result.
    """
    assert attention_mask is None
    _require_plain(variant)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query_hgKd = torch.unflatten(query[0], 0, (key.shape[1], -1)) * scaling
    out = tree_rows.attend(layer, query_hgKd, key[0], value[0])
    return out.flatten(0, 1).transpose(0, 1)[None], None


def ancestor_pass(
    query_hgKd: Tensor, keys_KAhd: Tensor, values_KAhd: Tensor, hidden_KA: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over each row's own branch: output ``[h, g, K, d]``, log-sum-exp ``[h, g, K]``.

    Entries that are True in ``hidden_KA`` are padding; every row has one that is not.
    """
    query_Khgd = query_hgKd.permute(2, 0, 1, 3)
    scores = product(query_Khgd, keys_KAhd.permute(0, 2, 3, 1)).float()
    scores.masked_fill_(hidden_KA[:, None, None, :], float("-inf"))
    weights, lse = _softmax_lse(scores)
    out = product(weights.to(values_KAhd.dtype), values_KAhd.transpose(1, 2))
    return out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> Tensor:
    """Combine attention over two disjoint sets of keys into attention over both.

    With weights ``exp(lse - logaddexp)`` the two normalised outputs add up to the joint softmax
    exactly, up to rounding (the merge of flash attention's split keys).
    """
    share = torch.sigmoid(lse - other_lse)[..., None].to(out.dtype)
    return out * share + other_out * (1 - share)


def _require_plain(variant: dict[str, Any]) -> None:
    for name in _VARIANTS:
        if variant.get(name) is not None:
            raise InputError(
                f"model: tree attention has no {name}, which this model asks for. "
                "Use a model with plain attention, such as Qwen2, Llama or OLMo 2."
            )


def _softmax_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension, in place, and its log-sum-exp."""
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return weights.div_(total), (top + total.log())[..., 0]
