"""Prompts: JSONL files with ``turns``, asked one after the other as a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_policies.errors import InputError
from gpu_backend.config import RecordConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TASK_NAMES: Final = {"sum": "cnn_dm"}
"""Data sets whose file is not named after them."""


_UNSUPPORTED: Final = frozenset(
    {
        *("stop", "stop_strings", "stop_token_ids", "logit_bias", "bad_words", "logprobs"),
        *("prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("grammar", "guided_json", "guided_regex", "json_schema", "response_format", "tools"),
        *("temperature", "top_p", "top_k", "max_tokens", "max_new_tokens", "seed"),
    }
)
"""Keys by which prompt files of other engines ask for something that no line here can ask for."""


class Question(BaseModel):
    """One line of a prompt file: a dialogue of one turn or more."""

    model_config = ConfigDict(frozen=True)

    task: str
    question_id: str
    turns: tuple[str, ...]
    longest_prompt: int
    """Tokens that the prompt of the last turn has if every earlier answer is as long as can be."""
    split: Literal["calibration", "evaluation"]

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.task} question {self.question_id}"


class Prompt(BaseModel):
    """One request to record, as token ids."""

    model_config = ConfigDict(frozen=True)

    task: str
    question_id: str
    turn: int = 1
    token_ids: list[int]
    split: Literal["calibration", "evaluation"]

    @property
    def label(self) -> str:
        """How messages name it."""
        turn = f", turn {self.turn}" if self.turn > 1 else ""
        return f"{self.task} question {self.question_id}{turn}"


class _Line(BaseModel):
    model_config = ConfigDict(extra="allow")  # data sets have columns of their own

    question_id: str | int | None = None
    turns: list[str] = Field(min_length=1)

    @property
    def unsupported(self) -> list[str]:
        """What the line asks for in vain."""
        return sorted(_UNSUPPORTED & set(self.model_extra or {}))


def task_name(path: Path) -> str:
    """Data set of a prompt file: its name up to the first dot."""
    stem = path.name.split(".")[0]
    return _TASK_NAMES.get(stem, stem)


def load_questions(
    path: Path, task: str, tokenizer: PreTrainedTokenizerBase, config: RecordConfig
) -> list[Question]:
    """Take the first questions of a file that are short enough, and split them.

    The splits alternate within the file, so that each has its share of whatever order it is in;
    all turns of a dialogue are in one split.

    Raises:
        InputError: naming file and line, where a line is broken, or the file, where no prompt is
            short enough.
    """
    chosen: list[tuple[str, tuple[str, ...], int]] = []
    wanted = config.requests_per_set
    for question_id, texts in _lines(path):
        taken = sum(len(turns) for _, turns, _ in chosen)
        if taken == wanted:
            break
        turns = texts[: config.turns][: None if wanted is None else wanted - taken]
        longest = _longest_prompt(tokenizer, turns, config)
        if config.max_prompt_tokens is None or longest <= config.max_prompt_tokens:
            chosen.append((question_id, turns, longest))
    if not chosen:
        raise InputError(
            f"{path}: no prompt has at most {config.max_prompt_tokens} tokens. "
            "Raise --max-prompt-tokens or leave the file out."
        )
    share = config.calibration_fraction
    return [
        Question(
            task=task,
            question_id=question_id,
            turns=turns,
            longest_prompt=longest,
            split="calibration" if int((i + 1) * share) > int(i * share) else "evaluation",
        )
        for i, (question_id, turns, longest) in enumerate(chosen)
    ]


def load_prompts(
    path: Path, task: str, tokenizer: PreTrainedTokenizerBase, config: RecordConfig
) -> list[Prompt]:
    """First turns of the questions that :func:`load_questions` takes, which need no answers."""
    questions = load_questions(path, task, tokenizer, config.model_copy(update={"turns": 1}))
    return [ask(question, [], tokenizer) for question in questions]


def ask(question: Question, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt of the turn that follows ``answers``, the answers to all earlier turns."""
    return Prompt(
        task=question.task,
        question_id=question.question_id,
        turn=len(answers) + 1,
        token_ids=encode_chat(tokenizer, question.turns[: len(answers) + 1], answers),
        split=question.split,
    )


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], answers: Sequence[str] = ()
) -> list[int]:
    """Token ids of a dialogue in the tokenizer's chat template, ready for the next answer.

    Args:
        tokenizer: the target's.
        turns: what the user said, one text more than ``answers``.
        answers: what the target said.

    Raises:
        InputError: the tokenizer has no chat template, or nothing is left of the text.
    """
    if tokenizer.chat_template is None:
        raise InputError(
            "target: the tokenizer must have a chat template, to turn prompts into tokens. "
            "Use an instruction-tuned target."
        )
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turn})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template writes every special token itself.
    token_ids = list(tokenizer.encode(cast("str", rendered), add_special_tokens=False))
    if not token_ids:
        raise InputError(f"prompts: a prompt must have at least one token; {turns[-1]!r} has none.")
    return token_ids


def _longest_prompt(
    tokenizer: PreTrainedTokenizerBase, turns: tuple[str, ...], config: RecordConfig
) -> int:
    answers = [""] * (len(turns) - 1)
    return len(encode_chat(tokenizer, turns, answers)) + len(answers) * config.max_new_tokens


def _lines(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Question ids and turns of a file; the line number stands in for a missing id."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts: {path} cannot be read: {error}.") from None
    questions: dict[str, tuple[str, ...]] = {}
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
        if entry.unsupported:
            raise InputError(
                f"{path}, line {number}: a prompt cannot ask for {entry.unsupported[0]!r}; all "
                "requests of a run are served alike. Remove the key."
            )
        question_id = str(number if entry.question_id is None else entry.question_id)
        if question_id in questions:
            raise InputError(f"{path}, line {number}: question_id {question_id!r} occurs twice.")
        questions[question_id] = tuple(entry.turns)
    yield from questions.items()
