"""What each part of a speculative step costs: the engine's only view of the hardware.

Kernel times come from ``forward.py``, host times from ``host.py``. A cycle of the engine is::

    draft_extend_s + (levels - 1) * draft_layer_s + checks * check_s     drafting
    + select_s + pack_s + verify_s + compact_s + host_s                  the rest

which is the spec cycle of hardware.md section 4.4 plus the checks of section 4.6, with the stages
of ``stages.py`` taken out of the host's cycle terms: these were fitted to whole cycles.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Final

from echo_policies.errors import InputError
from simulator.cost.forward import (
    PARTS,
    EagleForward,
    Kernels,
    TransformerForward,
    logits_s,
    propose_s,
)
from simulator.cost.host import EngineProfile
from simulator.cost.memory import MemoryNeed, require_memory
from simulator.cost.models import CostedPair
from simulator.cost.stages import StageCosts
from simulator.hardware import Hardware

KNEE_ROWS_LIMIT: Final = 8192
"""Rows beyond which the knee is not searched."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times of one pair on one machine; immutable, made by `build_cost_model` in ``build.py``.

    Every time is a pure function of its counts. ``kv_tokens`` is always the number of committed
    tokens of all requests of the call together; the rows' own keys are added to it.
    ``dataclasses.replace(model, scale=2.0)`` doubles every time.
    """

    pair: CostedPair
    hardware: Hardware
    tp: int
    target: TransformerForward
    draft: TransformerForward | EagleForward
    host: EngineProfile
    stages: StageCosts
    gate_check_s: float
    is_pure_roofline: bool
    scale: float = 1.0
    dtype: str = "bf16"

    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one target forward over the roots and kept nodes of a batch.

        Args:
            rows: flattened tokens, roots included.
            requests: requests they belong to; keys and values are read once for each.
            kv_tokens: committed tokens of these requests.
        """
        if rows <= 0:
            return 0.0
        padded = self.host.padded(rows)
        span = kv_tokens + padded  # reproduces section 3 to the row
        total_s = self.target.body_s(padded, padded * span / requests, span)
        total_s += logits_s(self.target, padded) + self.target.argmax_s(padded)
        total_s = self._launched_s(total_s, padded, self.target.kernels)
        return self.scale * (total_s + requests * self.host.request_s)

    def verify_parts(self, rows: int, requests: int, kv_tokens: int) -> dict[str, float]:
        """Return `verify_s` by operator; ``launch`` is what launching adds without a graph."""
        padded = self.host.padded(rows)
        span = kv_tokens + padded
        layer = self.target.layer_parts(padded, padded * span / requests, span)
        parts = {
            name: self.scale * self.target.layers * seconds
            for name, seconds in zip(PARTS, layer, strict=True)
        }
        parts["lm_head"] = self.scale * logits_s(self.target, padded)
        parts["argmax"] = self.scale * self.target.argmax_s(padded)
        parts["requests"] = self.scale * requests * self.host.request_s
        parts["launch"] = self.verify_s(rows, requests, kv_tokens) - sum(parts.values())
        return parts

    def _launched_s(self, kernels_s: float, rows: int, kernels: Kernels) -> float:
        """Return the kernels' seconds, or those of launching them where no graph is replayed."""
        if self.host.has_graph(rows):
            return kernels_s
        return max(kernels_s, self.host.launch_bound_s(kernels))

    def plain_decode_s(self, requests: int, kv_tokens: int) -> float:
        """Return the kernel seconds of one plain decode step, one row per request."""
        return self.verify_s(requests, requests, kv_tokens)

    def draft_extend_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of a draft step's first forward, which yields the depth-1 layer.

        An EAGLE head takes ``fc`` and its LM head over all rows, as in section 4.4; an
        independent draft needs logits only of the last row of each request.

        Args:
            rows: newly committed tokens that the draft has not seen.
            requests: requests they belong to.
            kv_tokens: tokens of these requests that the draft has seen.
        """
        if rows <= 0:
            return 0.0
        padded = self.host.padded(rows)
        span = kv_tokens + padded
        total_s = self.draft.body_s(padded, padded * span / requests, span)
        if isinstance(self.draft, EagleForward):
            total_s += self.draft.fc_s(padded) + propose_s(self.draft, padded)
        else:
            total_s += propose_s(self.draft, min(padded, requests))
        return self.scale * self._launched_s(total_s, padded, self.draft.kernels)

    def draft_layer_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one later draft layer over ``rows`` frontier nodes."""
        if rows <= 0:
            return 0.0
        padded = self.host.padded(rows)
        span = kv_tokens + padded
        total_s = self.draft.body_s(padded, padded * span / requests, span)
        total_s += propose_s(self.draft, padded)
        return self.scale * self._launched_s(total_s, padded, self.draft.kernels)

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the target's seconds for one prompt, LM head over its last token only.

        Args:
            prompt_tokens: the whole prompt.
            cached_tokens: leading tokens whose keys and values exist already.
        """
        rows = prompt_tokens - cached_tokens
        if rows <= 0:
            return 0.0
        pairs = rows * cached_tokens + rows * rows / 2.0
        total_s = self.target.body_s(rows, pairs, prompt_tokens)
        total_s += logits_s(self.target, 1) + self.target.argmax_s(1)
        total_s = max(total_s, self.host.launch_bound_s(self.target.kernels))
        return self.scale * (total_s + self.host.prefill_s)

    def mixed_prefill_s(
        self, prompt_tokens: int, prompts: float, requests: int, kv_tokens: int
    ) -> float:
        """Return what ``prompts`` prompts add to the decode step that prefills them.

        Weights are read once for all; the step is launched kernel by kernel, as no graph has its
        shape.
        """
        rows = prompts * prompt_tokens + requests
        pairs = prompts * prompt_tokens * prompt_tokens / 2.0 + kv_tokens
        ends = requests + prompts
        total_s = self.target.body_s(rows, pairs, prompts * prompt_tokens + kv_tokens)
        total_s += logits_s(self.target, ends) + self.target.argmax_s(ends)
        total_s = max(total_s, self.host.launch_bound_s(self.target.kernels))
        total_s += prompts * self.host.prefill_s + requests * self.host.request_s
        return max(0.0, self.scale * total_s - self.plain_decode_s(requests, kv_tokens))

    def draft_prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the draft's seconds for one prompt; it proposes nothing yet."""
        rows = prompt_tokens - cached_tokens
        if rows <= 0:
            return 0.0
        pairs = rows * cached_tokens + rows * rows / 2.0
        body_s = self.draft.body_s(rows, pairs, prompt_tokens)
        if isinstance(self.draft, EagleForward):
            body_s += self.draft.fc_s(rows)
        return self.scale * max(body_s, self.host.launch_bound_s(self.draft.kernels))

    @property
    def check_s(self) -> float:
        """Seconds of one gate check."""
        return self.scale * self.gate_check_s

    def select_s(self, ops: int) -> float:
        """Return the seconds of ``ops`` operations of the policy's own code."""
        return self.scale * self.stages.select_s(ops)

    def pack_s(self, rows: int, requests: int) -> float:
        """Return the seconds of building a verify batch of ``rows``, roots included."""
        return self.scale * self.stages.pack_s(rows, requests)

    def compact_s(self, tokens: int) -> float:
        """Return the seconds of moving the keys and values of ``tokens`` accepted nodes."""
        return self.scale * self.stages.compact_s(tokens)

    def host_s(self, levels: int, *, is_tree: bool = False) -> float:
        """Return the host seconds of a step with ``levels`` draft levels, 0 for plain decoding.

        The cycle terms were fitted to whole cycles of EAGLE engines: independent drafts are not
        charged them, and the stages that have terms of their own are taken out.
        """
        total_s = self.host.plain_step_s(self.tp)
        if levels > 0 and isinstance(self.draft, EagleForward):
            host = self.host
            cycle_s = host.cycle_s + levels * host.draft_step_s + (host.tree_s if is_tree else 0.0)
            cycle_s += host.cycle_per_log2_tp_s * math.log2(self.tp)
            total_s += max(0.0, cycle_s - self.stages.reference_s(levels, is_tree=is_tree))
        return self.scale * total_s

    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        """Return the default ``k_max``: candidate rows until the verify forward takes longer.

        The largest R <= 8192 with ``t(R) <= factor * t(B)``, minus B, at least 0 (design.md,
        Conventions); t is `verify_s`, kernels only, of R rows of B requests. In this model t
        never falls when R grows, experts included, so a bisection finds it.

        Raises:
            InputError: if the batch is empty, the context negative or ``factor`` below 1.
        """
        if batch_size < 1 or context_tokens < 0 or factor < 1.0:
            raise InputError(
                "knee_k_max needs batch_size >= 1, context_tokens >= 0 and factor >= 1; got "
                f"{batch_size}, {context_tokens} and {factor}."
            )
        kv_tokens = batch_size * context_tokens
        limit_s = factor * self.verify_s(batch_size, batch_size, kv_tokens)
        good, bad = batch_size, max(batch_size, KNEE_ROWS_LIMIT) + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            if self.verify_s(middle, batch_size, kv_tokens) <= limit_s:
                good = middle
            else:
                bad = middle
        return good - batch_size

    def fits(self, batch_size: int, context_tokens: int) -> MemoryNeed:
        """Return the bytes a batch needs on each GPU.

        Raises:
            InputError: if weights and KV cache exceed the memory; names the least tp that fits.
        """
        return require_memory(
            self.pair, self.hardware, self.tp, batch_size, context_tokens, dtype=self.dtype
        )

    @property
    def label(self) -> str:
        """One line for the head of a report."""
        kind = "pure roofline" if self.is_pure_roofline else f"{self.host.engine} roofline fit"
        gpus = f"{self.tp} x {self.hardware.name}"
        return f"{self.pair.target.name} + {self.pair.draft.name} on {gpus}, {self.dtype}, {kind}"

    def describe(self) -> dict[str, object]:
        """Return every constant that was used, ready for JSON; an infinite sharpness is null."""
        operators = asdict(self.target.ops)
        for fit in operators.values():
            if isinstance(fit, dict) and fit.get("sharpness") == float("inf"):
                fit["sharpness"] = None
        return {
            "label": self.label,
            "dtype": self.dtype,
            "hardware": asdict(self.hardware),
            "tp": self.tp,
            "draft_tp": self.draft.tp,
            "target": asdict(self.pair.target),
            "draft": asdict(self.pair.draft),
            "draft_kind": "eagle3" if isinstance(self.draft, EagleForward) else "independent",
            "operators": operators,
            "kind": "pure roofline" if self.is_pure_roofline else "roofline",
            "host": asdict(self.host),
            "stages": asdict(self.stages),
            "check_s": self.gate_check_s,
            "scale": self.scale,
            "pure_roofline": self.is_pure_roofline,
            "verify_attention": "split_kv",
            "verification": "ragged, padded to CUDA graphs"
            if self.host.graph_rows and self.host.pads_to_graphs
            else "ragged",
            "source": "hardware.md sections 1, 2.1, 4.2-4.6 and docs/costs.md",
        }
