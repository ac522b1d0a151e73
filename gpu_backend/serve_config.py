"""Options of a run on real models, checked where they enter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from echo_policies.errors import InputError
from gpu_backend.config import DtypeName
from gpu_backend.prefix_backends.choice import AttentionName
from gpu_backend.prompt_lookup import CONFIDENCE, MODEL_LEVELS, PROMPT_LOOKUP
from gpu_backend.sampling import Sampling


class ServeConfig(BaseModel):
    """Everything that a run depends on, beside the content of models, prompts and policies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policies: tuple[str, ...] = Field(min_length=1, description="policies to compare")
    target: str = Field(description="target: a path or a name of a model")
    draft: str = Field(
        PROMPT_LOOKUP, description="draft: likewise, prompt-lookup, or prompt-lookup+MODEL"
    )
    draft_vocab: int | None = Field(
        None, ge=1, description="tokens the draft model proposes, by lowest id; all if unset"
    )
    lookup_confidence: float = Field(
        CONFIDENCE,
        gt=0,
        le=1,
        description="probability of what a lookup finds, for which the model is not asked",
    )
    model_levels: int = Field(
        MODEL_LEVELS, ge=1, le=64, description="depths the draft model proposes beside lookup"
    )
    prompts: tuple[Path, ...] = Field(min_length=1, description="JSONL files of prompts")
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        (8,), min_length=1, description="requests served at a time; a table each"
    )
    requests: int | None = Field(None, ge=1, description="prompts in all; every prompt if unset")
    max_new_tokens: int = Field(256, ge=2, description="output tokens per request, at most")
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are passed over")
    sampling: Sampling = Sampling()
    seed: int = Field(0, ge=0, lt=2**62, description="seed of sampling, arrivals and intervals")
    dtype: DtypeName = Field("float32", description="arithmetic of both models")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the models run")
    attention: AttentionName = Field(
        "auto", description="what reads the sequences on a CUDA device"
    )
    k_max: int | None = Field(None, ge=0, description="candidate nodes per step; default: knee")
    k_max_factor: float = Field(1.25, ge=1, le=1000, description="the knee rule's factor")
    cap_all: bool = Field(default=False, description="clamp every policy to k_max")
    mode: Literal["staged", "masked"] = Field("staged", description="whether checks save layers")
    prefill_chunk: int = Field(512, ge=1, description="prompt tokens read per step")
    rate: float | None = Field(None, gt=0, description="arrivals per second; all at once if unset")
    calibration: Path | None = Field(None, description="file of `simulate calibrate`")
    calibration_requests: int = Field(
        8, ge=1, description="prompts that gates are fitted on in the warm-up, and never evaluated"
    )

    defaults: tuple[str, ...] = Field((), description="names of the options that were not given")

    @property
    def looks_up(self) -> bool:
        """Whether drafts come from prompt lookup, alone or before a draft model is asked."""
        return self.draft == PROMPT_LOOKUP or self.draft.startswith(f"{PROMPT_LOOKUP}+")

    @property
    def draft_model(self) -> str | None:
        """Path or name of the draft model; None where drafts are only looked up."""
        return (self.draft.removeprefix(PROMPT_LOOKUP)[1:] or None) if self.looks_up else self.draft

    @model_validator(mode="after")
    def _draft_is_whole(self) -> Self:
        if self.draft == f"{PROMPT_LOOKUP}+":
            raise ValueError(
                f"draft must name a model behind {PROMPT_LOOKUP}+, or be {PROMPT_LOOKUP}"
            )
        if self.draft_vocab is not None and self.draft_model is None:
            raise ValueError("draft_vocab cuts a draft model's head; prompt lookup has none")
        return self

    @model_validator(mode="after")
    def _files_differ(self) -> Self:
        if len(set(self.prompts)) < len(self.prompts):
            raise ValueError("prompts must name each file once")
        if len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ValueError("batch_sizes must name each batch size once")
        return self


def make_serve_config(sampling: dict[str, Any], **options: Any) -> ServeConfig:
    """Validate what a user typed; options that are None take their defaults.

    Raises:
        InputError: naming the first option that breaks a rule, the rule and the value.
    """
    try:
        drawn = Sampling(**_given(sampling))
        return ServeConfig(sampling=drawn, **_given(options))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise InputError(f"{message}.") from None
        raise InputError(f"{first['loc'][0]}: {message}; got {first['input']!r}.") from None


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
