"""A cost model of verification from AIConfigurator's measured kernels, put together as our own.

The layers' matrix products, attention, experts and all-reduce are looked up. Not measured there at
the shapes that are needed, and computed instead: LM head (wider than the tables), router,
elementwise kernels. Everything else comes from the fallback.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

from echo_policies.errors import InputError
from simulator.cost.fallback import FallbackCosts, check_knee
from simulator.cost.kernels_aic import AicKernels, open_aic_kernels
from simulator.cost.models import Experts
from simulator.cost.operators import Operators
from simulator.cost.step import KNEE_ROWS_LIMIT, CostModel

SYSTEMS: Final = {"h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm"}
"""Machine by our name, as the wheel names it."""
DTYPES: Final = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block"}
KNEE_STRIDE: Final = 64
"""Rows between two looks for the knee beyond the CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AicOperators(Operators):
    """Operators of one rank, measured ones first; made by `aic_operators`."""

    kernels: AicKernels
    tp: int
    head_dim: int

    def gemm_s(self, rows: float, out_width: float, in_width: float) -> float:
        """Return the measured seconds of a product with a layer's weights."""
        return self.kernels.gemm_s(rows, out_width, in_width)

    def attention_s(
        self, rows: float, pairs: float, span: float, q_width: float, kv_width: float
    ) -> float:
        """Return the seconds of one attention call over the whole batch.

        Measured with one query token per request; further ones cost what the computed operator
        says they add, because the keys are read once for all.
        """
        context = pairs / rows
        requests = span / context
        heads, kv_heads = round(q_width / self.head_dim), round(kv_width / self.head_dim)
        one_s = self.kernels.decode_attention_s(requests, context, heads, kv_heads, self.head_dim)
        computed = super(AicOperators, self).attention_s
        more = computed(rows, pairs, span, q_width, kv_width)
        return one_s * more / computed(requests, span, span, q_width, kv_width)

    def fused_moe_s(self, rows: float, hidden: int, experts: Experts, ffn: float, ep: int) -> float:
        """Return the measured seconds of the fused experts on the busiest rank."""
        del ffn  # the tables take the unsharded width
        return self.kernels.moe_s(rows, hidden, experts, tp=self.tp // ep, ep=ep)

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the measured seconds of one all-reduce; 0 on one GPU."""
        return self.kernels.all_reduce_s(num_bytes, self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class AicCosts(FallbackCosts):
    """Verification from measured kernels; made by `build_aic_costs`."""

    model: CostModel
    """The computed model with measured operators in its target."""
    kernels: AicKernels

    @property
    def source(self) -> str:
        """The engine whose kernels were measured, and on what."""
        pair, kernels = self.model.pair, self.kernels
        where = f"{self.model.tp} x {kernels.folder.name}, {kernels.dtype}"
        return f"{pair.target.name} on {where}: aiconfigurator kernels of {kernels.engine}"

    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one target forward, kernels only; 0 for no rows.

        Raises:
            InputError: a shape that was not measured.
        """
        return self.scale * self.model.verify_s(rows, requests, kv_tokens)

    def verify_parts(self, rows: int, requests: int, kv_tokens: int) -> dict[str, float]:
        """Return `verify_s` by operator."""
        parts = self.model.verify_parts(rows, requests, kv_tokens)
        return {name: self.scale * seconds for name, seconds in parts.items()}

    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        """Return the candidate rows until a verification takes ``factor`` times a plain step.

        Measured times need not grow: the last size of a CUDA graph within the factor counts, and
        beyond the graphs the last of every `KNEE_STRIDE` rows.

        Raises:
            InputError: if the knee is not defined, or a shape was not measured.
        """
        check_knee(batch_size, context_tokens, factor)
        kv_tokens = batch_size * context_tokens
        limit_s = factor * self.plain_decode_s(batch_size, kv_tokens)
        graphs = self.model.host.graph_rows
        first = max(batch_size, graphs[-1] if graphs else 0) + KNEE_STRIDE
        beyond = range(first, KNEE_ROWS_LIMIT + 1, KNEE_STRIDE)
        for rows in (*reversed(beyond), *reversed(graphs)):
            if rows > batch_size and self.verify_s(rows, batch_size, kv_tokens) <= limit_s:
                return rows - batch_size
        return 0

    def describe_source(self) -> dict[str, object]:
        """Return the machine, the engine, and the tables that were used so far."""
        return {
            "kind": "aiconfigurator kernels",
            "system": self.kernels.folder.name,
            "engine": self.kernels.engine,
            "version": self.kernels.version or "for each shape the newest that has it",
            "computed": ["lm_head", "router", "elementwise", "further query tokens of attention"],
        }


def build_aic_costs(
    fallback: CostModel,
    *,
    version: str | None = None,
    kernels: AicKernels | None = None,
    scale: float = 1.0,
) -> AicCosts:
    """Make a cost model of AIConfigurator's kernels for the machine and engine of ``fallback``.

    Args:
        fallback: computed cost model of the same pair; its engine has kernel tables.
        version: engine version; by default, for each shape, the newest that has it.
        kernels: opened tables; by default those of the installed wheel.
        scale: factor on every returned time.

    Raises:
        MissingExtraError: the wheel is not installed.
        UnknownNameError: an engine without kernel tables.
        InputError: a machine without kernel tables.
    """
    if fallback.hardware.name not in SYSTEMS:
        raise InputError(
            f"aiconfigurator has kernels of {', '.join(SYSTEMS)}; got {fallback.hardware.name}. "
            "Choose one of them, or another cost model."
        )
    kernels = kernels or open_aic_kernels(
        SYSTEMS[fallback.hardware.name],
        fallback.host.engine,
        dtype=DTYPES[fallback.dtype],
        version=version,
    )
    ops = aic_operators(fallback, kernels)
    model = replace(fallback, target=replace(fallback.target, ops=ops))
    return AicCosts(fallback=fallback, has_host=False, scale=scale, model=model, kernels=kernels)


def aic_operators(model: CostModel, kernels: AicKernels) -> AicOperators:
    """Return the target's operators with measured kernels in place of computed ones."""
    ops = model.target.ops
    values: dict[str, Any] = {entry.name: getattr(ops, entry.name) for entry in fields(ops)}
    head_dim = model.pair.target.head_dim
    return AicOperators(**values, kernels=kernels, tp=model.tp, head_dim=head_dim)
