"""Options of a simulation, checked where they enter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from echo_policies.errors import InputError, UnknownNameError

DEFAULT_TRACE: Final = "qwen2.5-coder-1.5b"
"""The bundled recording of real models."""

DEFAULT_BATCH_SIZES: Final = (1, 8, 32, 128, 256)
"""Batch sizes of a table when the user names none."""

MAX_BATCH: Final = 4096
"""Largest batch size; far beyond what one engine serves."""

CostsText = Annotated[str, BeforeValidator(lambda given: str(given) if given else given)]
"""What ``--costs`` takes; a path is as good as its text."""

BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]


class SimulationConfig(BaseModel):
    """Everything that a simulation depends on, beside the trace's and the policies' content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policies: tuple[str, ...] = Field(("echo",), min_length=1, description="policies to compare")
    trace: str = Field(DEFAULT_TRACE, description="path of a trace, or the name of a bundled one")
    batch_sizes: tuple[BatchSize, ...] = Field(
        DEFAULT_BATCH_SIZES, min_length=1, description="concurrent requests"
    )
    task: str | None = Field(None, description="only requests of this data set")
    target: str | None = Field(
        None,
        description="what the acceptance is costed as: a catalogue name, a config.json, 'recorded'",
    )
    draft: str | None = Field(
        None, description="the draft's config.json, where the target is given by one"
    )
    hardware: str | None = Field(None, description="a100, h100, h200 or cpu")
    tp: int | None = Field(None, ge=1, description="tensor-parallel degree: 1, 2, 4 or 8")
    ep: int = Field(1, ge=1, description="ranks that a mixture's experts are spread over")
    pure_roofline: bool = Field(
        default=False, description="textbook roofline: no floors, no host terms"
    )
    engine: str = Field(
        "sglang", description="profile of host terms: sglang, vllm, trtllm, transformers or cpu"
    )
    dtype: str = Field("bf16", description="the target's weights: bf16, fp8 or fp8_block")
    costs: CostsText | None = Field(
        None,
        description="FILE.toml of constants, table:STEPS.csv, affine:STEPS.csv or aiconfigurator; "
        "default: the computed model with the shipped constants",
    )
    cost_interval: int = Field(
        0,
        ge=0,
        le=1000,
        description="draws of the costs' constants that throughput is run again with; 0: none",
    )
    check_ms: float = Field(0.15, ge=0, le=1000, description="milliseconds per gate check")
    context: int | None = Field(
        None, ge=1, le=10_000_000, description="tokens of context per request; default: recorded"
    )
    k_max: int | None = Field(
        None, ge=0, description="candidate nodes per batch step; default: the knee rule"
    )
    k_max_factor: float = Field(
        1.25, ge=1, le=1000, description="the knee rule's factor: t(k_max + B) <= factor * t(B)"
    )
    cap_all: bool = Field(default=False, description="clamp every policy to k_max")
    mode: Literal["staged", "masked"] = Field(
        "staged", description="staged saves draft layers at checks; masked drafts every level"
    )
    verify: Literal["ragged", "padded"] = Field(
        "ragged", description="verify forward over the sum of all trees, or B times the widest"
    )
    arrivals: Literal["closed", "poisson"] = Field(
        "closed", description="replace a finished request at once, or let requests arrive"
    )
    rate: float | None = Field(
        None, gt=0, le=1_000_000, description="arrivals per second (poisson)"
    )
    requests: int | None = Field(
        None, ge=1, le=10_000_000, description="requests to finish in the measured part"
    )
    unrevealed: Literal["both", "lower", "upper"] = Field(
        "both",
        description="unrevealed nodes have no children, or show the target path, or a bracket",
    )
    by_task: bool = Field(default=False, description="a row per data set")
    calibration: Path | None = Field(None, description="calibration file")
    jobs: int = Field(1, description="processes; batch sizes run beside each other")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of request order and intervals")
    scale_costs: float = Field(1.0, gt=0, le=1e6, description="multiplies every cost")

    @model_validator(mode="after")
    def _options_agree(self) -> SimulationConfig:
        if self.jobs == 0 or self.jobs < -1:
            raise ValueError(
                f"jobs must be a number of processes, or -1 for all cores; got {self.jobs}"
            )
        if self.cost_interval and self.pure_roofline:
            raise ValueError("cost_interval draws fitted constants; a pure roofline has none")
        if (self.arrivals == "poisson") != (self.rate is not None):
            raise ValueError(
                "rate must be given with arrivals=poisson, and only then; "
                f"got arrivals={self.arrivals} and rate={self.rate}"
            )
        return self


def make_config(**options: Any) -> SimulationConfig:
    """Build a configuration.

    Raises:
        UnknownNameError: no such option.
        InputError: a value breaks its rule.
    """
    for name in options:
        if name not in SimulationConfig.model_fields:
            raise UnknownNameError("option", name, SimulationConfig.model_fields)
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return SimulationConfig(**given)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise InputError(f"{message}.") from None
        raise InputError(f"{first['loc'][0]}: {message}; got {first['input']!r}.") from None
