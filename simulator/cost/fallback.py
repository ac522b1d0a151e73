"""A cost model of verification alone; the rest is another model's, and the label says so.

Base of ``measured.MeasuredCosts``, ``affine.AffineCosts`` and ``aic.AicCosts``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from echo_policies.errors import InputError
from simulator.cost.memory import MemoryNeed
from simulator.cost.protocol import StepCosts
from simulator.cost.step_group import StepGroup, check_scale

FROM_FALLBACK: Final = (
    "draft_extend_s",
    "draft_layer_s",
    "prefill_s",
    "draft_prefill_s",
    "check_s",
    "select_s",
    "pack_s",
    "compact_s",
    "host_s",
    "fits",
)
FROM_ROWS: Final = ("verify_s", "plain_decode_s", "knee_k_max")
FROM_DRAFT_ROWS: Final = ("draft_extend_s", "draft_layer_s")
"""What rows of a draft's forwards give in addition."""
REST: Final = "drafts, prefill, checks, selection, packing, compaction, host and memory"
"""What a model of verification does not know, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackCosts(ABC):
    """Verification from elsewhere, everything else from ``fallback``.

    A measured step holds the host's part, so ``host_s`` adds only what speculation adds to it;
    the knee, too, is then that of whole steps and lies higher than that of the kernels alone.
    """

    fallback: StepCosts
    has_host: bool
    """Whether the times of verification hold the host's part."""
    scale: float
    """Factor on every returned time."""

    @abstractmethod
    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one target forward (and of the host, if ``has_host``)."""

    @abstractmethod
    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        """Return the candidate rows until a verification takes ``factor`` times a plain step."""

    @property
    @abstractmethod
    def source(self) -> str:
        """What verification comes from, in words."""

    @abstractmethod
    def describe_source(self) -> dict[str, object]:
        """Return what verification comes from, ready for JSON."""

    def verify_parts(self, rows: int, requests: int, kv_tokens: int) -> dict[str, float]:
        """Return the whole step: nothing is known of its operators."""
        return {"step": self.verify_s(rows, requests, kv_tokens)}

    def plain_decode_s(self, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one plain decode step, one row per request."""
        return self.verify_s(requests, requests, kv_tokens)

    def draft_extend_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the fallback's seconds of a draft's first forward."""
        return self.scale * self.fallback.draft_extend_s(rows, requests, kv_tokens)

    def draft_layer_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the fallback's seconds of one later draft layer."""
        return self.scale * self.fallback.draft_layer_s(rows, requests, kv_tokens)

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the fallback's seconds for one prompt."""
        return self.scale * self.fallback.prefill_s(prompt_tokens, cached_tokens)

    def draft_prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the fallback's seconds of the draft for one prompt."""
        return self.scale * self.fallback.draft_prefill_s(prompt_tokens, cached_tokens)

    @property
    def check_s(self) -> float:
        """Seconds of one gate check, from the fallback."""
        return self.scale * self.fallback.check_s

    def select_s(self, ops: int) -> float:
        """Return the fallback's seconds of the policy's own operations."""
        return self.scale * self.fallback.select_s(ops)

    def pack_s(self, rows: int, requests: int) -> float:
        """Return the fallback's seconds of building a verify batch."""
        return self.scale * self.fallback.pack_s(rows, requests)

    def compact_s(self, tokens: int) -> float:
        """Return the fallback's seconds of moving accepted keys and values."""
        return self.scale * self.fallback.compact_s(tokens)

    def host_s(self, levels: int, *, is_tree: bool = False) -> float:
        """Return the fallback's host seconds that the measured times do not hold."""
        measured_s = self.fallback.host_s(0) if self.has_host else 0.0
        return self.scale * (self.fallback.host_s(levels, is_tree=is_tree) - measured_s)

    def fits(self, batch_size: int, context_tokens: int) -> MemoryNeed:
        """Return the bytes a batch needs on each GPU, from the fallback.

        Raises:
            InputError: if they exceed the memory.
        """
        return self.fallback.fits(batch_size, context_tokens)

    def describe(self) -> dict[str, object]:
        """Return what verification comes from and what the fallback gives, ready for JSON."""
        return {
            "label": self.label,
            "from_rows": list(self.from_rows),
            "from_fallback": [name for name in FROM_FALLBACK if name not in self.from_rows],
            "rows_hold_host": self.has_host,
            "scale": self.scale,
            **self.describe_source(),
            "fallback": self.fallback.describe(),
        }

    @property
    def label(self) -> str:
        """One line for the head of a report: what verification is from, and all the rest."""
        return f"{self.source}; {self.rest} from {self.fallback.label}"

    @property
    def rest(self) -> str:
        """What comes from the fallback, in words."""
        return REST

    @property
    def from_rows(self) -> tuple[str, ...]:
        """Names of the times that come from the rows."""
        return FROM_ROWS


def check_fallback(
    group: StepGroup, fallback: StepCosts, *, has_host: bool = True, scale: float = 1.0
) -> None:
    """Refuse options that cannot be, and rows in other units than the fallback expects.

    Raises:
        InputError: for either.
    """
    if not scale > 0.0:
        raise InputError(f"scale must exceed 0; got {scale}.")
    host_s = fallback.host_s(0) if has_host else 0.0
    expected = [
        host_s
        + fallback.verify_s(
            round(row.batch * row.tokens), row.batch, round(row.batch * row.context)
        )
        for row in group.rows
    ]
    check_scale(group, expected)


def check_knee(batch_size: int, context_tokens: int, factor: float) -> None:
    """Refuse a knee that is not defined.

    Raises:
        InputError: if the batch is empty, the context negative or ``factor`` below 1.
    """
    if batch_size < 1 or context_tokens < 0 or factor < 1.0:
        raise InputError(
            "knee_k_max needs batch_size >= 1, context_tokens >= 0 and factor >= 1; got "
            f"{batch_size}, {context_tokens} and {factor}."
        )
