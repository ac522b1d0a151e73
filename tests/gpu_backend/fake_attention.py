"""Stand-ins for libraries of CUDA kernels: what they document, in plain torch.

Signatures are theirs, so that a keyword that does not exist is a TypeError, and what their kernels
refuse is refused here. Float32 alone is taken besides, so that results can be compared closely.

The log-sum-exp of a row that sees nothing differs between them, and between their kernels; so it
is :attr:`Empty` here, whatever a test wants it to be.
"""

import math
from itertools import pairwise
from types import ModuleType

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Empty:
    """What a row without keys is answered."""

    out = 0.0
    lse = -math.inf


def softmax_rows(query_nHd, keys_Shd, values_Shd, scale, *, causal):
    """Output [n, H, d] and natural log-sum-exp [n, H] of one request; causal ends align."""
    rows, heads, _ = query_nHd.shape
    length = keys_Shd.shape[0]
    if length == 0:
        lse = torch.full((rows, heads), Empty.lse)
        return torch.full_like(query_nHd, Empty.out, dtype=torch.float32), lse
    repeats = heads // keys_Shd.shape[1]
    keys = keys_Shd.float().repeat_interleave(repeats, 1)
    values = values_Shd.float().repeat_interleave(repeats, 1)
    scores = torch.einsum("nHd,SHd->nHS", query_nHd.float(), keys) * scale
    if causal:
        assert length >= rows, "rows that see nothing"
        hidden = torch.arange(length) > torch.arange(rows)[:, None] + length - rows
        scores = scores.masked_fill(hidden[:, None], -math.inf)
    return torch.einsum("nHS,SHd->nHd", scores.softmax(-1), values), scores.logsumexp(-1)


def ragged(query_RHd, requests, scale, *, causal):
    """Output [R, H, d] in the query's dtype and log-sum-exp [H, R], request after request.

    Args:
        query_RHd: of all requests.
        requests: for each the slice of its rows, its keys and its values.
        scale: of the scores.
        causal: the mask.
    """
    out = torch.full(query_RHd.shape, math.nan)
    lse_HR = torch.full((query_RHd.shape[1], query_RHd.shape[0]), math.nan)
    for rows, keys, values in requests:
        out[rows], lse = softmax_rows(query_RHd[rows], keys, values, scale, causal=causal)
        lse_HR[:, rows] = lse.T
    return out.to(query_RHd.dtype), lse_HR


def require_floats(*tensors):
    for tensor in tensors:
        assert tensor.dtype in FLOATS
        assert tensor.dtype == tensors[0].dtype
        assert tensor.stride(-1) == 1, "last dimension must be contiguous"


def require_counts(tensor, length):
    """int32, of one dimension, contiguous."""
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.int32
    assert tensor.shape == (length,)
    assert tensor.is_contiguous()


def require_heads(query_RHd, keys):
    assert query_RHd.dim() == 3
    assert query_RHd.shape[1] % keys.shape[-2] == 0
    assert query_RHd.shape[2] == keys.shape[-1]


def slices(first_B1, total, most=None):
    """Slices between cumulated counts, of which ``most`` must be the largest."""
    starts = first_B1.tolist()
    assert starts[0] == 0
    assert starts[-1] == total
    assert starts == sorted(starts)
    found = [slice(a, b) for a, b in pairwise(starts)]
    if most is not None:
        assert type(most) is int
        assert most == max(each.stop - each.start for each in found)
    return found


def fa3_module():
    """``flash_attn_interface``, the Hopper one."""
    module = ModuleType("flash_attn_interface")
    module.calls = 0

    def flash_attn_with_kvcache(  # noqa: PLR0917 - the library's own
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        module.calls += 1
        assert (k, v, qv, cache_batch_idx, cache_leftpad, softcap) == (None,) * 5 + (0.0,)
        require_floats(q, k_cache, v_cache)
        require_heads(q, k_cache)
        assert q.shape[-1] % 8 == 0
        assert q.shape[-1] <= 256
        batch, used = page_table.shape
        assert page_table.dtype == torch.int32
        assert page_table.stride(-1) == 1
        assert k_cache.dim() == v_cache.dim() == 4
        require_counts(cu_seqlens_q, batch + 1)
        require_counts(cache_seqlens, batch)
        assert num_splits == 1, "else outputs depend on the batch"
        page = k_cache.shape[1]
        requests = []
        for request, rows in enumerate(slices(cu_seqlens_q, len(q), max_seqlen_q)):
            length = int(cache_seqlens[request])
            assert 0 <= length <= used * page
            pages = page_table[request, : -(-length // page)].long()
            requests.append(
                (rows, *(cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache)))
            )
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = ragged(q, requests, scale, causal=causal)
        nothing = torch.tensor([])
        return (out, lse, nothing, nothing) if return_softmax_lse else out

    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def fa2_module():
    """``flash_attn``, version 2.6 or newer."""
    module = ModuleType("flash_attn")
    module.calls = 0

    def flash_attn_varlen_func(  # noqa: PLR0917 - the library's own
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        module.calls += 1
        assert (dropout_p, alibi_slopes, softcap) == (0.0, None, 0.0)
        assert block_table is None, "its pages hold multiples of 256 tokens"
        require_floats(q, k, v)
        require_heads(q, k)
        assert q.shape[-1] % 8 == 0
        assert q.shape[-1] <= 256
        assert k.dim() == v.dim() == 3
        batch = len(cu_seqlens_q) - 1
        require_counts(cu_seqlens_q, batch + 1)
        require_counts(cu_seqlens_k, batch + 1)
        rows = slices(cu_seqlens_q, len(q), max_seqlen_q)
        seen = slices(cu_seqlens_k, len(k), max_seqlen_k)
        requests = [(each, k[slots], v[slots]) for each, slots in zip(rows, seen, strict=True)]
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = ragged(q, requests, scale, causal=causal)
        return (out, lse, None) if return_attn_probs else out

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


class PagedWrapper:
    """``BatchPrefillWithPagedKVCacheWrapper``: planned once, run for every layer."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, **others):
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 2**20
        assert kv_layout == "NHD"
        assert not use_cuda_graph
        assert not others
        self.planned = None

    def plan(  # noqa: PLR0917 - the library's own
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        assert custom_mask is None
        assert packed_custom_mask is None, "would rule out kernels for Hopper"
        assert disable_split_kv, "else outputs depend on the batch"
        batch = len(qo_indptr) - 1
        require_counts(qo_indptr, batch + 1)
        require_counts(paged_kv_indptr, batch + 1)
        require_counts(paged_kv_indices, int(paged_kv_indptr[-1]))
        require_counts(paged_kv_last_page_len, batch)
        # The planner and the kernels find lengths in two ways, which must agree.
        pages = paged_kv_indptr.diff()
        lengths = (pages - 1).clamp_min(0) * page_size + paged_kv_last_page_len
        in_kernels = torch.where(pages == 0, 0, (pages - 1) * page_size + paged_kv_last_page_len)
        assert torch.equal(lengths, in_kernels)
        assert num_qo_heads % num_kv_heads == 0
        self.planned = {
            "rows": slices(qo_indptr, int(qo_indptr[-1])),
            "pages": [
                paged_kv_indices[each].long()
                for each in slices(paged_kv_indptr, len(paged_kv_indices))
            ],
            "lengths": lengths.tolist(),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "page_size": page_size,
            "dtypes": (q_data_type, q_data_type if kv_data_type is None else kv_data_type),
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "causal": causal,
        }

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False):
        self.calls.append(1)
        assert not args
        assert out is lse is None
        plan = self.planned
        keys, values = paged_kv_cache
        require_floats(q, keys, values)
        assert (q.dtype, keys.dtype) == plan["dtypes"]
        assert q.is_contiguous()
        assert (*q.shape[1:2], *keys.shape[2:]) == plan["heads"]
        assert values.shape == keys.shape
        assert keys.stride() == values.stride()
        assert keys.shape[1] == plan["page_size"]
        assert q.shape[0] == plan["rows"][-1].stop
        requests = [
            (rows, *(cache[pages].flatten(0, 1)[:length] for cache in (keys, values)))
            for rows, pages, length in zip(
                plan["rows"], plan["pages"], plan["lengths"], strict=True
            )
        ]
        given, lse_HR = ragged(q, requests, plan["scale"], causal=plan["causal"])
        return (given, lse_HR.T.contiguous() / math.log(2)) if return_lse else given


def flashinfer_module():
    """``flashinfer``, with batch-invariant plans (0.3.1 or newer)."""
    module = ModuleType("flashinfer")
    calls = []
    module.BatchPrefillWithPagedKVCacheWrapper = type("Wrapper", (PagedWrapper,), {"calls": calls})
    module.runs = calls
    return module


FAKES = {"fa3": fa3_module, "flashinfer": flashinfer_module, "fa2": fa2_module}
"""By the name of the backend."""


def num_calls(module):
    """Kernels that were run."""
    return module.calls if hasattr(module, "calls") else len(module.runs)
