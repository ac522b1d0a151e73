"""Kernel times from the tables that the wheel ``aiconfigurator-core`` ships, by interpolation.

Optional extra ``[aiconfigurator]``. Files and columns: hardware.md section 8 (Apache-2.0). All
times are of one rank; a kernel's milliseconds become seconds here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost.aic_tables import (
    Columns,
    Reader,
    find_tables,
    installed_folder,
    pyarrow_reader,
    table_points,
    usable_columns,
)
from simulator.cost.interpolate import LinearTable, build_table
from simulator.cost.models import Experts

ENGINES: Final = ("sglang", "vllm", "trtllm")
ELEMENT_BYTES: Final = 2
"""``message_size`` counts elements of two bytes (inferred in hardware.md section 8)."""


@dataclass(frozen=True, slots=True)
class AicKernels:
    """Measured kernels of one machine and engine; made by `open_aic_kernels`.

    Tables are read at their first use. Shapes outside of what was measured are refused.
    """

    folder: Path
    """``systems/data/<system>`` of the wheel."""
    engine: str
    dtype: str
    """Number type of weights: ``bfloat16``, ``fp8`` or ``fp8_block``; keys and values are bf16."""
    version: str | None
    """Engine version; None for the newest that has the shape (see `sources`)."""
    read: Reader
    tables: dict[tuple[object, ...], LinearTable] = field(default_factory=dict)
    """Tables made so far, by operator and fixed shape."""
    files: dict[Path, Columns] = field(default_factory=dict)

    def gemm_s(self, rows: float, out_width: float, in_width: float) -> float:
        """Return the seconds of a matrix product; the median over kernels at each point."""
        axes = {"m": "rows", "n": "output width", "k": "input width"}
        table = self._table("gemm", "gemm_perf", axes, {"gemm_dtype": self.dtype})
        return table.at(rows, out_width, in_width)

    def decode_attention_s(
        self, batch: float, context: float, heads: int, kv_heads: int, head_dim: int = 128
    ) -> float:
        """Return the seconds of a layer's decode attention, one query token per request.

        Args:
            batch: requests.
            context: tokens of each whose keys and values are read, the new one included.
            heads: query heads of the rank.
            kv_heads: key-value heads of the rank.
            head_dim: width of a head.
        """
        axes = {"batch_size": "batch", "context": "context"}
        fixed = _attention_fixed(heads, kv_heads, head_dim)
        table = self._table("attention", "generation_attention_perf", axes, fixed)
        return table.at(batch, context)

    def prefill_attention_s(
        self, batch: float, tokens: float, heads: int, kv_heads: int, head_dim: int = 128
    ) -> float:
        """Return the seconds of a layer's attention over ``batch`` prompts of ``tokens`` each."""
        axes = {"batch_size": "batch", "isl": "tokens"}
        fixed = _attention_fixed(heads, kv_heads, head_dim)
        return self._table("attention", "context_attention_perf", axes, fixed).at(batch, tokens)

    def moe_s(
        self,
        tokens: float,
        hidden: int,
        experts: Experts,
        *,
        tp: int = 1,
        ep: int = 1,
        distribution: str = "power_law_1.2",
    ) -> float:
        """Return the seconds of a layer's fused experts; ``experts.ffn`` is the unsharded width.

        ``distribution`` of tokens over experts: ``balanced``, ``power_law_1.01`` or
        ``power_law_1.2``.
        """
        fixed: dict[str, object] = {
            "moe_dtype": self.dtype,
            "hidden_size": hidden,
            "inter_size": experts.ffn,
            "topk": experts.per_token,
            "num_experts": experts.count,
            "moe_tp_size": tp,
            "moe_ep_size": ep,
            "distribution": distribution,
        }
        return self._table("moe", "moe_perf", {"num_tokens": "tokens"}, fixed).at(tokens)

    def all_reduce_s(self, num_bytes: float, tp: int) -> float:
        """Return the seconds of a custom all-reduce in a CUDA graph; 0 on one GPU."""
        if tp == 1:
            return 0.0
        axes = {"message_size": "elements"}
        table = self._table("comm", "custom_allreduce_perf", axes, {"num_gpus": tp})
        return table.at(num_bytes / ELEMENT_BYTES)

    def _table(
        self, op: str, file: str, axes: Mapping[str, str], fixed: Mapping[str, object]
    ) -> LinearTable:
        key = (file, *fixed.values())
        if key not in self.tables:
            paths = find_tables(self.folder, op, self.engine, file, self.version)
            path, points = self._newest_points(paths, tuple(axes), fixed)
            what = f"{path.parent.parent.name} {path.parent.name} {path.stem}"
            self.tables[key] = build_table(what, tuple(axes.values()), points)
        return self.tables[key]

    def _newest_points(
        self, paths: Sequence[Path], axes: Sequence[str], fixed: Mapping[str, object]
    ) -> tuple[Path, dict[tuple[float, ...], float]]:
        """Return the newest table that has the shape: some versions measured only a few."""
        first: InputError | None = None
        for path in paths:
            if path not in self.files:
                self.files[path] = usable_columns(self.read(path))
            try:
                return path, table_points(self.files[path], axes, fixed, path)
            except InputError as error:
                first = first or error
        assert first is not None, "an operator has at least one table"
        raise first

    def sources(self) -> list[str]:
        """Return the tables used so far, as engine, version and file."""
        return sorted({table.what for table in self.tables.values()})


def open_aic_kernels(
    system: str = "h100_sxm",
    engine: str = "sglang",
    *,
    dtype: str = "bfloat16",
    version: str | None = None,
    folder: Path | None = None,
    read: Reader | None = None,
) -> AicKernels:
    """Open the kernel tables of one machine and engine; reads no table yet.

    Args:
        system: machine as the wheel names it, such as ``h100_sxm``, ``h200_sxm``, ``a100_sxm``.
        engine: ``sglang``, ``vllm`` or ``trtllm``.
        dtype: number type of the weights.
        version: engine version; by default, for each shape, the newest that has it.
        folder: folder of systems; the installed wheel's by default.
        read: reader of one table; pyarrow's by default.

    Raises:
        MissingExtraError: if the wheel or pyarrow is not installed.
        UnknownNameError: for an unknown system or engine.
    """
    folder = folder or installed_folder()
    if engine not in ENGINES:
        raise UnknownNameError("engine with kernel tables", engine, ENGINES)
    systems = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    if system not in systems:
        raise UnknownNameError("system with kernel tables", system, systems)
    return AicKernels(folder / system, engine, dtype, version, read or pyarrow_reader())


def _attention_fixed(heads: int, kv_heads: int, head_dim: int) -> dict[str, object]:
    return {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "window_size": 0,
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
    }
