"""Prompts of a recording, which stores none: from the files that it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from echo_policies.errors import InputError
from gpu_backend.config import RecordConfig
from gpu_backend.prompts import ask, load_questions, task_name
from traces.request_key import key_label, request_key, requests_by_key
from traces.schema import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def recorded_prompts(
    trace: Trace, files: Sequence[Path], tokenizer: PreTrainedTokenizerBase
) -> dict[int, list[int]]:
    """Token ids of the prompt of every recorded request whose question is in the files.

    A later turn's prompt holds the recorded answers to the earlier ones.

    Args:
        trace: the recording.
        files: JSONL files of prompts.
        tokenizer: the target's.

    Returns:
        By number of the request in the recording.

    Raises:
        InputError: a file cannot be read, or a prompt has another length than was recorded.
    """
    recorded = requests_by_key(trace, trace.header.name)
    config = RecordConfig(max_new_tokens=1)
    found: dict[int, list[int]] = {}
    for file in files:
        for question in load_questions(file, task_name(file), tokenizer, config):
            answers: list[str] = []
            for turn in range(1, len(question.turns) + 1):
                request = recorded.get((question.task, question.question_id, turn))
                if request is None:
                    break
                found[request] = ask(question, answers, tokenizer).token_ids
                _require_length(trace, request, len(found[request]))
                answer = trace.output_tokens(request).tolist()
                answers.append(str(tokenizer.decode(answer, skip_special_tokens=True)))
    return found


def _require_length(trace: Trace, request: int, length: int) -> None:
    info = trace.header.requests[request]
    if length != info.prompt_tokens:
        raise InputError(
            f"prompts: a prompt must be as it was recorded; {key_label(request_key(info))} has "
            f"{length} tokens, in {trace.header.name} {info.prompt_tokens}. Give the prompt files "
            "and the target that the trace was made with."
        )


def in_turn(trace: Trace, requests: Sequence[int]) -> list[int]:
    """Requests with one of every data set in turn, so that the first few are of all of them."""
    by_task: dict[str, list[int]] = {}
    for request in requests:
        by_task.setdefault(trace.header.requests[request].task, []).append(request)
    rows = zip_longest(*by_task.values())
    return [request for row in rows for request in row if request is not None]
