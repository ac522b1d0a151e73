"""GPUs the cost model knows: datasheet figures only, no fitted number.

Source: hardware.md section 2.1 (NVIDIA datasheets as shipped in aiconfigurator ``h100_sxm.yaml``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from echo_policies.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU of a node whose GPUs are joined by NVLink."""

    name: str
    peak_bf16_flop_per_s: float
    """Dense bf16; the figures with sparsity that some sheets print are twice as high."""
    memory_byte_per_s: float
    memory_bytes: float
    nvlink_byte_per_s: float
    """NVLink bandwidth of one GPU in one direction."""


HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "h100": Hardware("h100", 989e12, 3.35e12, 80 * 2**30, 450e9),
        "h200": Hardware("h200", 989e12, 4.8e12, 141e9, 450e9),
    }
)
"""Every known GPU by name: H100 SXM5 80 GiB and H200 SXM 141 GB."""


def find_hardware(name: str) -> Hardware:
    """Return the GPU of that name.

    Raises:
        UnknownNameError: if no GPU has that name.
    """
    try:
        return HARDWARE[name]
    except KeyError:
        raise UnknownNameError("hardware", name, HARDWARE) from None
