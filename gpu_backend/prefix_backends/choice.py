"""Which library does the first pass: the one asked for, or the first that can."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Final, Literal

import torch

from echo_policies.errors import InputError
from gpu_backend.kv_pool import KvPool
from gpu_backend.prefix_backends.fa2 import Fa2Pass
from gpu_backend.prefix_backends.fa3 import Fa3Pass
from gpu_backend.prefix_backends.flashinfer import Flashinfer
from gpu_backend.prefix_backends.layout import FirstPass, LayOut, RaggedLayOut, RaggedSequences

AttentionName = Literal["auto", "torch", "fa3", "flashinfer", "fa2"]

HALF: Final = (torch.float16, torch.bfloat16)
UP_TO_256: Final = range(8, 257, 8)
AMPERE_OR_NEWER: Final = range(8, 1000)


@dataclass(frozen=True, slots=True)
class Backend:
    """A library, and what it needs."""

    name: str
    module: str
    """Imported only when it is asked for."""
    entry: str
    """What is called of it."""
    keywords: tuple[str, ...]
    """What that is given by name, and in old versions does not take."""
    majors: range
    """Compute capabilities of the GPUs it is made for, by their first number."""
    gpus: str
    """These in words."""
    head_dims: Collection[int]
    first_pass: Callable[[ModuleType, KvPool, int], Callable[[RaggedSequences], FirstPass]]
    """From module, pool and query heads: what makes the passes of a run."""

    def lay_out(self, module: ModuleType, pool: KvPool, query_heads: int) -> LayOut:
        """What makes its passes over a pool."""
        return RaggedLayOut(self.first_pass(module, pool, query_heads))


BACKENDS: Final = (
    Backend(
        name="fa3",
        module="flash_attn_interface",
        entry="flash_attn_with_kvcache",
        keywords=(
            "cache_seqlens",
            "page_table",
            "cu_seqlens_q",
            "max_seqlen_q",
            "softmax_scale",
            "causal",
            "num_splits",
            "return_softmax_lse",
        ),
        majors=range(9, 10),
        gpus="9.x (Hopper)",
        head_dims=UP_TO_256,
        first_pass=lambda module, _, __: partial(Fa3Pass.of, module),
    ),
    Backend(
        name="flashinfer",
        module="flashinfer",
        entry="BatchPrefillWithPagedKVCacheWrapper.plan",
        keywords=("causal", "sm_scale", "q_data_type", "kv_data_type", "disable_split_kv"),
        majors=AMPERE_OR_NEWER,
        gpus="8.0 or more",
        # It does not refuse others but computes them wrongly (flashinfer issue 4299).
        head_dims=(64, 128, 256),
        first_pass=lambda module, pool, heads: Flashinfer(module, pool, heads).plan,
    ),
    Backend(
        name="fa2",
        module="flash_attn",
        entry="flash_attn_varlen_func",
        keywords=(
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "dropout_p",
            "softmax_scale",
            "causal",
            "return_attn_probs",
        ),
        majors=AMPERE_OR_NEWER,
        gpus="8.0 or more",
        head_dims=UP_TO_256,
        first_pass=lambda module, _, __: partial(Fa2Pass.of, module),
    ),
)
"""In the order in which they are preferred."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What does the first pass."""

    backend: Backend | None
    """None is torch."""
    module: ModuleType | None = None
    passed_over: tuple[str, ...] = ()
    """What others would have needed, preferred ones first."""

    @property
    def name(self) -> str:
        """As one would ask for it."""
        return "torch" if self.backend is None else self.backend.name

    def lay_out(self, pool: KvPool, query_heads: int) -> LayOut | None:
        """What makes its passes over a pool; None for torch."""
        if self.backend is None or self.module is None:
            return None
        return self.backend.lay_out(self.module, pool, query_heads)


def choose_attention(
    name: AttentionName, device: torch.device, dtype: torch.dtype, head_dim: int | None = None
) -> Attention:
    """The backend asked for, or for ``auto`` the first that can be used, torch at last.

    Args:
        name: what was asked for.
        device: of the model.
        dtype: of keys and values.
        head_dim: of the model; not looked at if None.

    Raises:
        InputError: a backend was asked for by name and cannot be used.
    """
    passed_over: list[str] = []
    for backend in BACKENDS:
        if name not in {"auto", backend.name}:
            continue
        found = _objection(backend, device, dtype, head_dim) or _imported(backend)
        if isinstance(found, ModuleType):
            return Attention(backend, found, tuple(passed_over))
        needs, given = found
        if name != "auto":
            raise InputError(
                f"attention: {name} needs {needs}; {given}. Use --attention auto or torch."
            )
        passed_over.append(f"{backend.name} would need {needs}")
    return Attention(None, None, tuple(passed_over))


def _objection(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> tuple[str, str] | None:
    """What it needs and what is there instead; None if it can be used."""
    if device.type != "cuda":
        return "a CUDA device", f"the model runs on {device.type}"
    if dtype not in HALF:
        return "float16 or bfloat16 (--dtype)", f"the model's arithmetic is {dtype}".replace(
            "torch.", ""
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in backend.majors:
        return f"a GPU of compute capability {backend.gpus}", f"this one has {major}.{minor}"
    if head_dim is not None and head_dim not in backend.head_dims:
        return _dims(backend.head_dims), f"the model's is {head_dim}"
    return None


def _imported(backend: Backend) -> ModuleType | tuple[str, str]:
    """The module, or what it lacks."""
    try:
        module = importlib.import_module(backend.module)
    except (ImportError, OSError) as error:  # OSError: a shared library that it loads by itself
        why = " ".join(str(error).split())[:200]
        return f"the module {backend.module}", f"it cannot be imported ({why})"
    entry: object = module
    for part in backend.entry.split("."):
        entry = getattr(entry, part, None)
    if not callable(entry):
        return f"{backend.module}.{backend.entry}", "the installed version lacks it"
    missing = [word for word in backend.keywords if word not in inspect.signature(entry).parameters]
    if missing:
        needs = f"a {backend.module} whose {backend.entry} takes {missing[0]}"
        return needs, "the installed version does not"
    return module


def _dims(head_dims: Collection[int]) -> str:
    if isinstance(head_dims, range):
        return f"a head dimension that is a multiple of {head_dims.step}, at most {head_dims[-1]}"
    *some, last = head_dims
    return f"a head dimension of {', '.join(map(str, some))} or {last}"
