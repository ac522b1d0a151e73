"""A whole recording: the target's outputs first, then the draft over each of them.

Target and draft model are never in memory together, and every finished piece is kept on disk.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from echo_policies.errors import InputError
from gpu_backend import library_versions, models
from gpu_backend.answers import Answered, answer_all
from gpu_backend.assembly import HeaderText, assemble
from gpu_backend.config import DtypeName, RecordConfig
from gpu_backend.draft_tree import DraftTree
from gpu_backend.eagle3.head_files import is_head_folder
from gpu_backend.eagle3.head_recording import HeadRecorder
from gpu_backend.greedy import TargetOutput, decode_greedy, stop_tokens
from gpu_backend.half_products import needs_widening
from gpu_backend.lookup_trie import LookupTrie
from gpu_backend.model_preparation import prepare_model
from gpu_backend.node_trie import NodeTrie
from gpu_backend.parts import PartStore
from gpu_backend.prompts import Prompt, Question, load_questions, task_name
from gpu_backend.recorded_outputs import RecordedOutputs
from gpu_backend.recorder import record_positions
from traces.schema import ModelInfo, PositionArrays, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]
"""Called with the stage, the work done and the work in all, in the stage's own unit."""


@dataclass(frozen=True, slots=True)
class RecordingJob:
    """What to record, from what, and where to."""

    target: Path
    draft: Path | None
    """None for prompt lookup."""
    prompts: tuple[Path, ...]
    out: Path
    config: RecordConfig
    text: HeaderText
    task: str | None = None
    """Data set of every prompt file, instead of each file's name."""
    outputs_of: Path | None = None
    """A recording to take the target's outputs from, instead of decoding."""


@dataclass(frozen=True, slots=True)
class _Pair:
    target: ModelInfo
    draft: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    fingerprint: str
    recorded: RecordedOutputs | None


def record(job: RecordingJob, progress: Progress) -> Trace:
    """Record, or go on recording, and write the trace.

    Pieces that an earlier run of the same job left behind are used; they are removed once the
    trace is written.

    Raises:
        InputError: a model, a prompt or an option cannot be used.
        MissingExtraError: the extra ``[models]`` is not installed.
    """
    from traces.store import save
    from traces.validate import validate

    pair = _open_pair(job)
    questions = _load_all_questions(job, pair.tokenizer)
    parts = PartStore(job.out, _identity(job, pair, questions))
    parts.open()
    requests = _target_stage(job, pair, questions, parts, progress)
    _draft_stage(job, pair, requests, parts, progress)
    trace = _trace(job, pair, requests, parts)
    save(trace, job.out)
    validate(trace)  # with the parts still there: a faulty recording is never the only copy
    parts.remove()
    return trace


def check_lengths(
    prompts: Mapping[str, int], config: RecordConfig, limit: int | None, who: str
) -> None:
    """Refuse a prompt whose output and look-ahead would not fit in a model's positions.

    Args:
        prompts: tokens of every prompt, by its name.
        config: how long outputs can be.
        limit: positions of the model, where it says so.
        who: the model.

    Raises:
        InputError: naming the prompt and both lengths.
    """
    for name, tokens in prompts.items():
        needed = tokens + config.max_new_tokens + config.chain_levels
        if limit is not None and needed > limit:
            raise InputError(
                f"{who}: prompt, output and look-ahead must fit in {limit} positions; "
                f"{name} needs {needed}. "
                "Lower --max-new-tokens or set --max-prompt-tokens."
            )


def record_request(
    draft: PreTrainedModel, prompt: Prompt, output: TargetOutput, config: RecordConfig
) -> PositionArrays:
    """Record all positions of one request with a draft from :func:`prepare_model`."""
    tree = DraftTree(
        draft,
        prefix_capacity=len(prompt.token_ids) + len(output.tokens),
        width=config.num_children,
        row_chunk=config.row_chunk,
    )
    # A node on the path has no branch, so the branch of the deepest expanded node is the longest.
    trie = NodeTrie(tree, prompt.token_ids, output.tokens, max_branch=config.chain_levels)
    return record_positions(trie, output.tokens, output.num_emitted, config)


def record_lookup(
    prompt: Prompt, output: TargetOutput, config: RecordConfig, vocab: int
) -> PositionArrays:
    """Record all positions of one request with prompt lookup as the drafter."""
    nodes = LookupTrie(prompt.token_ids, output.tokens, width=config.num_children, vocab_size=vocab)
    return record_positions(nodes, output.tokens, output.num_emitted, config)


def _open_pair(job: RecordingJob) -> _Pair:
    dtype = job.config.dtype
    target = models.describe_model(job.target, dtype)
    tokenizer = models.load_tokenizer(job.target)
    if job.draft is None:
        draft = models.describe_lookup()
    else:
        draft = _with_cut(models.describe_model(job.draft, dtype), job.config.draft_vocab)
        if not is_head_folder(job.draft):
            models.require_same_tokens(tokenizer, models.load_tokenizer(job.draft))
        elif job.config.draft_vocab is not None:
            raise InputError(
                "record.draft_vocab cuts a draft model's head; the vocabulary of an EAGLE-3 head "
                "is its own. Leave it out."
            )
    fingerprint = models.tokenizer_fingerprint(tokenizer)
    vocab_size = models.real_vocab_size(tokenizer)
    recorded = _recorded_outputs(job, target)
    return _Pair(target, draft, tokenizer, vocab_size, fingerprint, recorded)


def _with_cut(draft: ModelInfo, draft_vocab: int | None) -> ModelInfo:
    if draft_vocab is None:
        return draft
    weights = f"{draft.weights}, head cut to {draft_vocab} tokens"
    return draft.model_copy(update={"weights": weights})


def _load_all_questions(job: RecordingJob, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    questions: list[Question] = []
    for path in job.prompts:
        task = job.task or task_name(path)
        if any(question.task == task for question in questions):
            raise InputError(
                f"--prompts: two files are named for the data set {task!r}; join them."
            )
        questions += load_questions(path, task, tokenizer, job.config)
    return questions


def _identity(job: RecordingJob, pair: _Pair, questions: list[Question]) -> dict[str, object]:
    """Everything that decides the content of a part."""
    return {
        "config": job.config.model_dump(),
        "target": pair.target.model_dump(),
        "draft": pair.draft.model_dump(),
        "outputs_of": None if pair.recorded is None else pair.recorded.digest,
        "tokenizer": [pair.fingerprint, str(pair.tokenizer.chat_template)],
        "questions": [question.model_dump() for question in questions],
    }


def _target_stage(
    job: RecordingJob, pair: _Pair, questions: list[Question], parts: PartStore, progress: Progress
) -> list[Answered]:
    """The target's answers; the target is loaded only where some are missing."""
    model: PreTrainedModel | None = None
    longest = {question.label: question.longest_prompt for question in questions}

    def decode(prompts: list[Prompt]) -> list[TargetOutput]:
        nonlocal model
        if model is None:
            model = models.load_model(job.target, job.config.dtype)
            check_lengths(longest, job.config, models.context_limit(model), "target")
        return decode_greedy(
            model,
            [prompt.token_ids for prompt in prompts],
            stops=stop_tokens(model, pair.tokenizer),
            vocab_size=pair.vocab_size,
            max_new_tokens=job.config.max_new_tokens,
            look_ahead=job.config.chain_levels,
        )

    return answer_all(
        questions,
        pair.tokenizer,
        decode if pair.recorded is None else pair.recorded.decode,
        parts,
        batch_size=job.config.target_batch,
        progress=partial(progress, "target"),
    )


def _draft_stage(
    job: RecordingJob, pair: _Pair, requests: list[Answered], parts: PartStore, progress: Progress
) -> None:
    """Record every request that is not recorded yet."""
    todo = [i for i in range(len(requests)) if not parts.has_request(i)]
    if not todo:
        return
    record_one = _request_recorder(job, pair, requests)
    total = sum(requests[i].output.num_emitted - 1 for i in todo)
    done = 0
    for i in todo:
        progress("draft", done, total)
        parts.save_request(i, record_one(requests[i]))
        done += requests[i].output.num_emitted - 1
    progress("draft", total, total)


def _recorded_outputs(job: RecordingJob, target: ModelInfo) -> RecordedOutputs | None:
    from traces.store import load

    if job.outputs_of is None:
        return None
    recorded = RecordedOutputs(load(job.outputs_of), job.config)
    recorded.check_target(target)
    return recorded


def _request_recorder(
    job: RecordingJob, pair: _Pair, requests: list[Answered]
) -> Callable[[Answered], PositionArrays]:
    """What records one request; the draft model is loaded here."""
    if job.draft is None:
        return lambda said: record_lookup(said.prompt, said.output, job.config, pair.vocab_size)
    if is_head_folder(job.draft):
        of_head = HeadRecorder.load(
            job.target, job.draft, pair.tokenizer, pair.vocab_size, job.config
        )
        return lambda said: of_head.record(said.prompt, said.output)
    draft = models.load_model(job.draft, job.config.dtype)
    lengths = {said.prompt.label: len(said.prompt.token_ids) for said in requests}
    check_lengths(lengths, job.config, models.context_limit(draft), "draft")
    prepare_model(draft, min(pair.vocab_size, job.config.draft_vocab or pair.vocab_size))
    return lambda said: record_request(draft, said.prompt, said.output, job.config)


def _drafter(draft: Path | None) -> Literal["draft_model", "eagle3", "prompt_lookup"]:
    if draft is None:
        return "prompt_lookup"
    return "eagle3" if is_head_folder(draft) else "draft_model"


def _trace(job: RecordingJob, pair: _Pair, requests: list[Answered], parts: PartStore) -> Trace:
    return assemble(
        job.config,
        job.text,
        target=pair.target,
        draft=pair.draft,
        drafter=_drafter(job.draft),
        tokenizer=f"sha256:{pair.fingerprint}",
        vocab_size=pair.vocab_size,
        device=_device(job.config.dtype),
        libraries=library_versions(),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        requests=[(said, parts.load_request(i)) for i, said in enumerate(requests)],
    )


def _device(dtype: DtypeName) -> str:
    import torch

    cpu = torch.device("cpu")
    wide = needs_widening(getattr(torch, dtype), cpu)
    return f"cpu, {platform.machine()}" + (f", {dtype} products in float32" if wide else "")
