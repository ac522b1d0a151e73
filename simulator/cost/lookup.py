"""Costs of a drafter that runs no model: prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cost.memory import MemoryNeed
from simulator.cost.protocol import StepCosts


@dataclass(frozen=True, slots=True)
class LookupCosts:
    """Another model's costs with drafting on the host only.

    No draft forward runs and no draft prefill. The look-up itself is charged as the host's work
    for one draft level, whatever the depth. Memory is the other model's, its draft included.
    """

    model: StepCosts

    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the model's seconds of one target forward."""
        return self.model.verify_s(rows, requests, kv_tokens)

    def verify_parts(self, rows: int, requests: int, kv_tokens: int) -> dict[str, float]:
        """Return the model's seconds of one target forward by operator."""
        return self.model.verify_parts(rows, requests, kv_tokens)

    def plain_decode_s(self, requests: int, kv_tokens: int) -> float:
        """Return the model's seconds of one plain decode step."""
        return self.model.plain_decode_s(requests, kv_tokens)

    def draft_extend_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return 0: nothing is read before a look-up."""
        del rows, requests, kv_tokens
        return 0.0

    def draft_layer_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return 0: no draft layer runs."""
        del rows, requests, kv_tokens
        return 0.0

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the model's seconds for one prompt."""
        return self.model.prefill_s(prompt_tokens, cached_tokens)

    def draft_prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return 0: there is no draft to prefill."""
        del prompt_tokens, cached_tokens
        return 0.0

    @property
    def check_s(self) -> float:
        """Seconds of one gate check, from the model."""
        return self.model.check_s

    def select_s(self, ops: int) -> float:
        """Return the model's seconds of a policy's own operations."""
        return self.model.select_s(ops)

    def pack_s(self, rows: int, requests: int) -> float:
        """Return the model's seconds of packing."""
        return self.model.pack_s(rows, requests)

    def compact_s(self, tokens: int) -> float:
        """Return the model's seconds of compaction."""
        return self.model.compact_s(tokens)

    def host_s(self, levels: int, *, is_tree: bool = False) -> float:
        """Return the model's host seconds of a step with at most one draft level."""
        return self.model.host_s(min(levels, 1), is_tree=is_tree)

    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        """Return the model's budget: the knee is that of verification."""
        return self.model.knee_k_max(batch_size, context_tokens, factor)

    def fits(self, batch_size: int, context_tokens: int) -> MemoryNeed:
        """Return the model's memory; raise `InputError` if it is too much."""
        return self.model.fits(batch_size, context_tokens)

    @property
    def label(self) -> str:
        """One line for the head of a report."""
        return f"{self.model.label}; prompt lookup instead of a draft model"

    def describe(self) -> dict[str, object]:
        """Return everything that was used, ready for JSON."""
        return {"drafter": "prompt_lookup", **self.model.describe()}
