"""What a run on real models returns: the table's figures, the outputs, all that it depends on."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from gpu_backend.serve_config import ServeConfig
from traces.metrics import Summary
from traces.schema import ModelInfo
from traces.stats import Interval, Steadiness


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServedRequest(_Frozen):
    """One finished request."""

    number: int
    task: str
    question_id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    """Output token ids."""
    text: str
    finish_reason: str
    ttft_s: float
    tpot_s: float


class ServeRow(_Frozen):
    """One policy."""

    policy: str
    parameters: dict[str, Any]
    """Hyperparameters as they ran, calibrated ones included."""
    summary: Summary
    speedup: Interval
    """Over plain decoding, paired by request."""
    steadiness: Steadiness
    is_complete: bool
    """Whether every request was served; False after Ctrl-C."""
    same_outputs: int
    """Requests whose output is token for token that of plain decoding."""
    compared_outputs: int
    """Requests that both have finished."""
    requests: tuple[ServedRequest, ...]


class KneeTable(_Frozen):
    """Timed verify forwards."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]


class CostTables(_Frozen):
    """What policies knew of costs: timed forwards by rows."""

    verify: KneeTable
    draft: KneeTable | None
    """Of a draft model's layer; None where there is no draft model."""


class ServeBatch(_Frozen):
    """One table: every policy at one batch size."""

    batch_size: int
    k_max: int
    k_max_rule: str
    knee: KneeTable | None
    costs: CostTables | None
    """None where no policy weighs costs."""
    rows: tuple[ServeRow, ...]
    """Plain decoding first."""


class ServeResult(_Frozen):
    """The outcome of one ``run_gpu``."""

    config: ServeConfig
    target: ModelInfo
    draft: ModelInfo | None
    head: str = ""
    """How the files of an EAGLE-3 head were understood; empty without one."""
    device: str
    """In words, such as ``cpu (no CUDA device), x86_64, 2 threads``."""
    attention: str
    """What read the sequences, in words, such as ``fa3``."""
    versions: dict[str, str]
    num_requests: int
    mean_prompt_tokens: float
    calibration: str
    """What gates were fitted on, in words; empty where nothing needed it."""
    is_complete: bool
    """Whether every policy served every request at every batch size; False after Ctrl-C."""
    batches: tuple[ServeBatch, ...]

    def row(self, policy: str, batch_size: int) -> ServeRow:
        """Return one row.

        Raises:
            KeyError: there is none.
        """
        for batch in self.batches:
            for row in batch.rows:
                if batch.batch_size == batch_size and row.policy == policy:
                    return row
        raise KeyError((policy, batch_size))

    def to_json(self) -> str:
        """Everything, as JSON; figures that do not exist are null."""
        return self.model_dump_json(indent=2) + "\n"
