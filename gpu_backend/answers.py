"""The target's side of a recording: every turn of every question, answered in batches.

Turns are asked one round after the other, because the prompt of a turn holds the earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_backend.greedy import TargetOutput
from gpu_backend.parts import PartStore
from gpu_backend.prompts import Prompt, Question, ask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[list[Prompt]], list[TargetOutput]]
"""Decodes one batch of prompts."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: what was asked and what the target said."""

    prompt: Prompt
    output: TargetOutput


def answer_all(
    questions: list[Question],
    tokenizer: PreTrainedTokenizerBase,
    decode: Decode,
    parts: PartStore,
    *,
    batch_size: int,
    progress: Callable[[int, int], None],
) -> list[Answered]:
    """Answer every turn; batches that an earlier run finished are taken from ``parts``.

    Args:
        questions: the dialogues.
        tokenizer: of the target.
        decode: called with at most ``batch_size`` prompts that are not answered yet.
        parts: where finished batches are kept.
        batch_size: prompts decoded together.
        progress: called with the requests done and the requests in all.

    Returns:
        The requests, by question and then by turn.
    """
    total = sum(len(question.turns) for question in questions)
    dialogues: list[list[Answered]] = [[] for _ in questions]
    done = 0
    progress(done, total)
    for turn in range(1, 1 + max(len(question.turns) for question in questions)):
        asked = [i for i, question in enumerate(questions) if len(question.turns) >= turn]
        for start in range(0, len(asked), batch_size):
            batch = asked[start : start + batch_size]
            prompts = [
                ask(questions[i], [_text(said, tokenizer) for said in dialogues[i]], tokenizer)
                for i in batch
            ]
            outputs = parts.load_outputs(turn, start)
            if outputs is None:
                outputs = decode(prompts)
                parts.save_outputs(turn, start, outputs)
            for i, prompt, output in zip(batch, prompts, outputs, strict=True):
                dialogues[i].append(Answered(prompt, output))
            done += len(batch)
            progress(done, total)
    return [said for dialogue in dialogues for said in dialogue]


def _text(said: Answered, tokenizer: PreTrainedTokenizerBase) -> str:
    """The answer as the chat goes on from it: cut at its length, its stop token left out."""
    emitted = said.output.tokens[: said.output.num_emitted]
    return str(tokenizer.decode(emitted, skip_special_tokens=True))
