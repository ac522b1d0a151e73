"""A cost model whose every time is a line one can do in one's head."""

from __future__ import annotations

from dataclasses import dataclass

from echo_policies.errors import InputError
from simulator.cost.memory import MemoryNeed

MS = 1e-3


@dataclass(frozen=True, slots=True)
class LineCosts:
    """Verification of 1 ms and 0.01 ms a row, 0.001 ms a kilo of KV tokens; host of 0.4 ms."""

    check_s: float = 0.15 * MS
    label: str = "line"

    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        return (1.0 + 0.01 * rows + 1e-6 * kv_tokens) * MS if rows > 0 else 0.0

    def plain_decode_s(self, requests: int, kv_tokens: int) -> float:
        return self.verify_s(requests, requests, kv_tokens)

    def draft_extend_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        return 0.3 * MS

    def draft_layer_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        return 0.2 * MS

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        return 0.02 * (prompt_tokens - cached_tokens) * MS

    def draft_prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        return 0.001 * (prompt_tokens - cached_tokens) * MS

    def verify_parts(self, rows: int, requests: int, kv_tokens: int) -> dict[str, float]:
        return {"line": self.verify_s(rows, requests, kv_tokens)}

    def select_s(self, ops: int) -> float:
        return 0.01 * ops * MS

    def pack_s(self, rows: int, requests: int) -> float:
        return (0.02 + 1e-5 * rows) * MS

    def compact_s(self, tokens: int) -> float:
        return (0.005 + 1e-4 * tokens) * MS

    def host_s(self, levels: int, *, is_tree: bool = False) -> float:
        return (0.4 + 0.05 * levels + (0.1 if is_tree else 0.0)) * MS

    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        return 25

    def fits(self, batch_size: int, context_tokens: int) -> MemoryNeed:
        if batch_size > 256:
            raise InputError("A batch must fit.")
        return MemoryNeed(1.0, 1.0, 3.0)

    def describe(self) -> dict[str, object]:
        return {"label": self.label}
