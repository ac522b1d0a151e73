"""Settings of a training: how much text, which features, how the head learns."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpu_backend.config import setting_error


class TrainConfig(BaseModel):
    """Settings of ``run_gpu train-head``; equal settings and target give equal data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    conversations: int = Field(2304, ge=4, description="Dialogues that the target makes up.")
    max_answer: int = Field(192, ge=8, description="Tokens of an answer, at most.")
    held_out: float = Field(0.03, gt=0, lt=1, description="Share of dialogues kept for evaluation.")
    draft_vocab: int = Field(16384, ge=2, description="Tokens that the head can propose.")
    steps: int = Field(4, ge=1, description="Draft steps unrolled in training.")
    step_decay: float = Field(0.8, gt=0, le=1, description="Weight of a step over the one before.")
    epochs: int = Field(6, ge=1, description="Passes over the data.")
    learning_rate: float = Field(1e-3, gt=0, description="At its highest, after the warm-up.")
    batch_tokens: int = Field(2048, ge=64, description="Tokens of one optimiser step.")
    seed: int = Field(0, ge=0, description="Of dialogues, initial values and order of the data.")


def train_config(**settings: object) -> TrainConfig:
    """Validate settings that a user typed.

    Raises:
        InputError: naming the first setting that breaks a rule, the rule and the value.
    """
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        raise setting_error("train-head", error) from None
