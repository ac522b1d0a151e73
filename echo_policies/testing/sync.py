"""Catches operations that make host and device wait for each other, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SYNC_OPERATIONS = frozenset(
    {
        "_local_scalar_dense",
        "allclose",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "_unique",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
    }
)
"""ATen operations whose result the host needs before it can go on."""

SYNC_METHODS = frozenset({"tolist", "numpy", "cpu", "item", "__array__"})
"""Tensor methods that copy to the host, some of them without an operation on the CPU."""

IN_DRAFT = frozenset({"evaluate", "extend", "select"})
"""A policy's methods between forwards of the models, where a copy from the host waits for them."""

INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class HostSyncError(AssertionError):
    """Raised when a policy's own code looks at a tensor's value on the host, or copies to it."""


class _NoSyncOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNC_OPERATIONS or (name == "repeat_interleave" and "Tensor" in str(func)):
            raise HostSyncError(f"{name} makes the host wait for the device")
        if name in INDEXING and any(
            index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1]
        ):
            raise HostSyncError("indexing with a mask makes the host wait for the device")
        return func(*args, **(kwargs or {}))


class _NoSyncMethod(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in SYNC_METHODS and getattr(torch.Tensor, name, None) is func:
            raise HostSyncError(f"Tensor.{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise :class:`HostSyncError` at the first operation that would synchronise."""
    with _NoSyncOperation(), _NoSyncMethod():  # type: ignore[no-untyped-call]
        yield


class _NoCopyOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # Whatever is made of host data is lifted, index lists too. So is a number that is assigned,
        # but a GPU fills it in without a copy.
        if func.overloadpacket.__name__ == "lift_fresh" and args[0].dim():
            raise HostSyncError("a tensor of host data makes the host wait for the device")
        return func(*args, **(kwargs or {}))


class _NoCopyFunction(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in {torch.tensor, torch.Tensor.new_tensor}:
            raise HostSyncError("a tensor of host data makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_copy() -> Iterator[None]:
    """Raise :class:`HostSyncError` at the first tensor that is made of host data."""
    with _NoCopyOperation(), _NoCopyFunction():  # type: ignore[no-untyped-call]
        yield
