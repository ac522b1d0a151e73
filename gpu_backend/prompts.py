"""Prompts: JSONL files with ``turns``, of which the first is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_policies.errors import InputError
from gpu_backend.config import RecordConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TASK_NAMES: Final = {"sum": "cnn_dm"}
"""Data sets whose file is not named after them."""


class Prompt(BaseModel):
    """One request to record, as token ids."""

    model_config = ConfigDict(frozen=True)

    task: str
    question_id: str
    token_ids: list[int]
    split: Literal["calibration", "evaluation"]


class _Line(BaseModel):
    question_id: str | int | None = None
    turns: list[str] = Field(min_length=1)


def task_name(path: Path) -> str:
    """Data set of a prompt file: its name up to the first dot."""
    stem = path.name.split(".")[0]
    return _TASK_NAMES.get(stem, stem)


def load_prompts(
    path: Path, task: str, tokenizer: PreTrainedTokenizerBase, config: RecordConfig
) -> list[Prompt]:
    """Take the first prompts of a file that are short enough, and split them.

    The splits alternate within the file, so that each has its share of whatever order it is in.

    Raises:
        InputError: naming file and line, where a line is broken, or the file, where no prompt is
            short enough.
    """
    chosen: list[tuple[str, list[int]]] = []
    for question_id, text in _questions(path):
        if len(chosen) == config.requests_per_set:
            break
        token_ids = encode_chat(tokenizer, text)
        if config.max_prompt_tokens is None or len(token_ids) <= config.max_prompt_tokens:
            chosen.append((question_id, token_ids))
    if not chosen:
        raise InputError(
            f"{path}: no prompt has at most {config.max_prompt_tokens} tokens. "
            "Raise --max-prompt-tokens or leave the file out."
        )
    share = config.calibration_fraction
    return [
        Prompt(
            task=task,
            question_id=question_id,
            token_ids=token_ids,
            split="calibration" if int((i + 1) * share) > int(i * share) else "evaluation",
        )
        for i, (question_id, token_ids) in enumerate(chosen)
    ]


def encode_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a user turn in the tokenizer's chat template, ready for the answer.

    Raises:
        InputError: the tokenizer has no chat template, or nothing is left of the text.
    """
    if tokenizer.chat_template is None:
        raise InputError(
            "target: the tokenizer must have a chat template, to turn prompts into tokens. "
            "Use an instruction-tuned target."
        )
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    # The template writes every special token itself.
    token_ids = list(tokenizer.encode(cast("str", rendered), add_special_tokens=False))
    if not token_ids:
        raise InputError(f"prompts: a prompt must have at least one token; {text!r} has none.")
    return token_ids


def _questions(path: Path) -> list[tuple[str, str]]:
    """Question ids and first turns of a file; the line number stands in for a missing id."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts: {path} cannot be read: {error}.") from None
    questions: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = _Line.model_validate_json(line)
        except ValidationError as error:
            raise InputError(
                f"{path}, line {number}: a prompt must be a JSON object with a list of texts "
                f"'turns'; {error.errors()[0]['msg']}."
            ) from None
        question_id = str(number if entry.question_id is None else entry.question_id)
        if question_id in questions:
            raise InputError(f"{path}, line {number}: question_id {question_id!r} occurs twice.")
        questions[question_id] = entry.turns[0]
    return list(questions.items())
