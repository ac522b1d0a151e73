"""Machines the cost model knows: datasheet figures only, no fitted number.

Source: hardware.md section 2.1 (NVIDIA datasheets as shipped in aiconfigurator ``h100_sxm.yaml``);
A100: NVIDIA A100 datasheet, SXM 80 GB; ``cpu``: what the two cores of models.md section 2 reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from echo_policies.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU of a node whose GPUs are joined by NVLink, or a CPU."""

    name: str
    peak_bf16_flop_per_s: float
    """Dense bf16; the figures with sparsity that some sheets print are twice as high."""
    memory_byte_per_s: float
    memory_bytes: float
    nvlink_byte_per_s: float
    """NVLink bandwidth of one GPU in one direction; 0 where there is no link."""
    peak_fp8_flop_per_s: float = 0.0
    """Dense fp8; 0 where the machine has no fp8 matrix units."""


HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "a100": Hardware("a100", 312e12, 2.039e12, 80 * 2**30, 300e9),
        "h100": Hardware("h100", 989e12, 3.35e12, 80 * 2**30, 450e9, 1979e12),
        "h200": Hardware("h200", 989e12, 4.8e12, 141e9, 450e9, 1979e12),
        "cpu": Hardware("cpu", 1.0e12, 33e9, 32e9, 0.0),
    }
)
"""Every known machine by name: A100 SXM 80 GB, H100 SXM5 80 GiB, H200 SXM 141 GB, a small CPU."""


def find_hardware(name: str) -> Hardware:
    """Return the machine of that name.

    Raises:
        UnknownNameError: if no machine has that name.
    """
    try:
        return HARDWARE[name]
    except KeyError:
        raise UnknownNameError("hardware", name, HARDWARE) from None
