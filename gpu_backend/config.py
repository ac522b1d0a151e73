"""What a recording holds and how much of it: the settings of ``run_gpu record``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from echo_policies.errors import InputError

DtypeName = Literal["float32", "bfloat16", "float16"]


class RecordConfig(BaseModel):
    """Settings of a recording; two runs with equal settings and models give equal content.

    Decoding is greedy, so there is no seed: nothing in a recording is drawn at random.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: int = Field(128, ge=1, description="Emitted tokens per request, at most.")
    levels: int = Field(10, ge=1, description="Deepest recorded candidate depth, D.")
    beam_width: int = Field(10, ge=1, description="Beam nodes per depth, chain slot excluded.")
    root_width: int = Field(32, ge=1, description="Children recorded at the root.")
    top_k: int = Field(10, ge=1, description="Children recorded at every other node.")
    chain_levels: int = Field(20, ge=1, description="Levels of the greedy chain and of the path.")
    dtype: DtypeName = Field("float32", description="Arithmetic of both models.")
    requests_per_set: int | None = Field(
        None, ge=1, description="Requests taken from each prompt file, in file order; all if unset."
    )
    turns: int | None = Field(
        None, ge=1, description="Turns asked of a dialogue, each a request; all if unset."
    )
    calibration_fraction: float = Field(
        0.5, ge=0.0, le=1.0, description="Share of each data set kept for calibration."
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longer prompts, chat template included, are passed over."
    )
    draft_vocab: int | None = Field(
        None, ge=1, description="Tokens the draft proposes, by lowest id; all if unset."
    )
    target_batch: int = Field(4, ge=1, description="Requests decoded together by the target.")
    row_chunk: int = Field(512, ge=1, description="Draft rows per forward; bounds the memory.")

    @model_validator(mode="after")
    def _chain_reaches_levels(self) -> Self:
        if self.chain_levels < self.levels:
            raise ValueError(
                f"chain_levels must be at least levels ({self.levels}); got {self.chain_levels}"
            )
        # A slot stores its candidate's number as int16.
        if max(self.root_width, (self.beam_width + 1) * self.top_k) > 2**15:
            raise ValueError("a depth may have at most 32768 candidates")
        return self

    @property
    def num_slots(self) -> int:
        """Slots per depth, W: the beam and one for the greedy chain."""
        return self.beam_width + 1

    @property
    def num_children(self) -> int:
        """Children kept per node while recording: enough for a root and for any other node."""
        return max(self.root_width, self.top_k)


def build_config(**settings: object) -> RecordConfig:
    """Validate settings that a user typed.

    Raises:
        InputError: naming the first setting that breaks a rule, the rule and the value.
    """
    try:
        return RecordConfig.model_validate(settings)
    except ValidationError as error:
        raise setting_error("record", error) from None


def setting_error(owner: str, error: ValidationError) -> InputError:
    """The first broken rule in a sentence.

    Args:
        owner: the command that the settings are of.
        error: of their validation.
    """
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    name, given = (f"{owner}.{field}", f"; got {first['input']!r}") if field else (owner, "")
    return InputError(f"{name}: {first['msg']}{given}.")
