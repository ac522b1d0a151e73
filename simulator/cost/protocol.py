"""What the engine and the setting need of a cost model; every cost model of this package fits it.

``step.CostModel`` computes times from shapes, ``measured.MeasuredCosts`` looks them up,
``affine.AffineCosts`` takes them from a fitted line, ``aic.AicCosts`` sums measured kernels. Code
that charges a step names this protocol.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from echo_policies.errors import InputError
from simulator.cost.memory import MemoryNeed


@runtime_checkable
class StepCosts(Protocol):
    """Seconds of each part of a step; every time is a pure function of its counts.

    ``rows`` are flattened tokens, roots included; ``kv_tokens`` the committed tokens of all
    requests of the call together. A cycle is charged as in ``simulator/charge.py``.
    """

    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one target forward over the rows of a batch; 0 for no rows."""
        ...

    def verify_parts(self, rows: int, requests: int, kv_tokens: int) -> dict[str, float]:
        """Return `verify_s` by operator, as far as the model knows operators."""
        ...

    def plain_decode_s(self, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one plain decode step, one row per request."""
        ...

    def draft_extend_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of a draft's first forward, over newly committed tokens."""
        ...

    def draft_layer_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one later draft layer over ``rows`` frontier nodes."""
        ...

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the target's seconds for one prompt."""
        ...

    def draft_prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the draft's seconds for one prompt."""
        ...

    @property
    def check_s(self) -> float:
        """Seconds of one gate check, device sync included."""
        ...

    def select_s(self, ops: int) -> float:
        """Return the seconds of ``ops`` operations of the policy's own code."""
        ...

    def pack_s(self, rows: int, requests: int) -> float:
        """Return the seconds of building a verify batch of ``rows`` from the kept nodes."""
        ...

    def compact_s(self, tokens: int) -> float:
        """Return the seconds of moving the keys and values of ``tokens`` accepted nodes."""
        ...

    def host_s(self, levels: int, *, is_tree: bool = False) -> float:
        """Return the host seconds of a step with ``levels`` draft levels, 0 for plain decoding.

        A model whose ``verify_s`` holds the host's part already returns the rest only.

        Args:
            levels: draft levels that ran.
            is_tree: whether the draft branches.
        """
        ...

    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        """Return the candidate rows until a verification takes ``factor`` times a plain step."""
        ...

    def fits(self, batch_size: int, context_tokens: int) -> MemoryNeed:
        """Return the bytes a batch needs on each GPU; raise `InputError` if they are too many."""
        ...

    @property
    def label(self) -> str:
        """One line for the head of a report."""
        ...

    def describe(self) -> dict[str, object]:
        """Return everything that was used, ready for JSON."""
        ...


def marginal_verify_s(
    costs: StepCosts, rows: int, requests: int, kv_tokens: int, span: int = 1
) -> float:
    """Return the price of one more verified token: seconds per row, next to ``rows``.

    The forward difference ``(verify_s(rows + span) - verify_s(rows)) / span``. A larger ``span``
    averages over the steps of a staircase, such as padding to graph buckets. A measured table
    refuses it where ``rows + span`` lies outside of what it allows.

    Args:
        costs: any cost model.
        rows: flattened tokens already verified, roots included.
        requests: requests they belong to.
        kv_tokens: committed tokens of these requests.
        span: rows that the difference is taken over.

    Raises:
        InputError: if there is no request, fewer rows than requests, or ``span`` is below 1.
    """
    if requests < 1 or rows < requests or span < 1:
        raise InputError(
            "A marginal cost needs requests >= 1, rows >= requests (each has its root) and "
            f"span >= 1; got {requests}, {rows} and {span}."
        )
    now_s = costs.verify_s(rows, requests, kv_tokens)
    return (costs.verify_s(rows + span, requests, kv_tokens) - now_s) / span
