"""A whole recording: the target's outputs first, then the draft over each of them.

The two models are never in memory together, and every finished piece is kept on disk.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echo_policies.errors import InputError
from gpu_backend import library_versions, models
from gpu_backend.assembly import HeaderText, assemble
from gpu_backend.config import RecordConfig
from gpu_backend.draft_tree import DraftTree, prepare_draft
from gpu_backend.greedy import TargetOutput, decode_greedy, stop_tokens
from gpu_backend.node_trie import NodeTrie
from gpu_backend.parts import PartStore
from gpu_backend.prompts import Prompt, load_prompts, task_name
from gpu_backend.recorder import RequestArrays, record_positions
from traces.schema import ModelInfo, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]
"""Called with the stage, the work done and the work in all, in the stage's own unit."""


@dataclass(frozen=True, slots=True)
class RecordingJob:
    """What to record, from what, and where to."""

    target: Path
    draft: Path
    prompts: tuple[Path, ...]
    out: Path
    config: RecordConfig
    text: HeaderText
    task: str | None = None
    """Data set of every prompt file, instead of each file's name."""


@dataclass(frozen=True, slots=True)
class _Pair:
    target: ModelInfo
    draft: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    fingerprint: str


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
    prompts = _load_all_prompts(job, pair.tokenizer)
    parts = PartStore(job.out, _identity(job, pair, prompts))
    parts.open()
    outputs = _target_outputs(job, pair, prompts, parts, progress)
    _draft_parts(job, pair, prompts, outputs, parts, progress=progress)
    arrays = [parts.load_request(i) for i in range(len(prompts))]
    trace = _trace(job, pair, prompts, outputs, arrays)
    save(trace, job.out)
    validate(trace)  # with the parts still there: a faulty recording is never the only copy
    parts.remove()
    return trace


def check_lengths(prompts: list[Prompt], config: RecordConfig, limit: int | None, who: str) -> None:
    """Refuse a prompt whose output and look-ahead would not fit in a model's positions.

    Raises:
        InputError: naming the prompt and both lengths.
    """
    for prompt in prompts:
        needed = len(prompt.token_ids) + config.max_new_tokens + config.chain_levels
        if limit is not None and needed > limit:
            raise InputError(
                f"{who}: prompt, output and look-ahead must fit in {limit} positions; "
                f"{prompt.task} question {prompt.question_id} needs {needed}. "
                "Lower --max-new-tokens or set --max-prompt-tokens."
            )


def record_request(
    draft: PreTrainedModel, prompt: Prompt, output: TargetOutput, config: RecordConfig, vocab: int
) -> RequestArrays:
    """Record all positions of one request with a draft from :func:`prepare_draft`."""
    tree = DraftTree(
        draft,
        vocab_size=vocab,
        prefix_capacity=len(prompt.token_ids) + len(output.tokens),
        width=config.num_children,
        row_chunk=config.row_chunk,
    )
    # A node on the path has no branch, so the branch of the deepest expanded node is the longest.
    trie = NodeTrie(tree, prompt.token_ids, output.tokens, max_branch=config.chain_levels)
    return record_positions(trie, output.tokens, output.num_emitted, config)


def _open_pair(job: RecordingJob) -> _Pair:
    dtype = job.config.dtype
    target, draft = (models.describe_model(path, dtype) for path in (job.target, job.draft))
    tokenizer = models.load_tokenizer(job.target)
    models.require_same_tokens(tokenizer, models.load_tokenizer(job.draft))
    fingerprint = models.tokenizer_fingerprint(tokenizer)
    return _Pair(target, draft, tokenizer, models.real_vocab_size(tokenizer), fingerprint)


def _load_all_prompts(job: RecordingJob, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    prompts: list[Prompt] = []
    for path in job.prompts:
        task = job.task or task_name(path)
        if any(prompt.task == task for prompt in prompts):
            raise InputError(
                f"--prompts: two files are named for the data set {task!r}; join them."
            )
        prompts += load_prompts(path, task, tokenizer, job.config)
    return prompts


def _identity(job: RecordingJob, pair: _Pair, prompts: list[Prompt]) -> dict[str, object]:
    """Everything that decides the content of a part."""
    return {
        "config": job.config.model_dump(),
        "target": pair.target.model_dump(),
        "draft": pair.draft.model_dump(),
        "prompts": [prompt.model_dump() for prompt in prompts],
    }


def _target_outputs(
    job: RecordingJob, pair: _Pair, prompts: list[Prompt], parts: PartStore, progress: Progress
) -> list[TargetOutput]:
    """The target's outputs; the target is loaded only where some are missing."""
    size = job.config.target_batch
    model: PreTrainedModel | None = None
    outputs: list[TargetOutput] = []
    for batch, start in enumerate(range(0, len(prompts), size)):
        progress("target", start, len(prompts))
        done = parts.load_outputs(batch)
        if done is None:
            if model is None:
                model = models.load_model(job.target, job.config.dtype)
                check_lengths(prompts, job.config, models.context_limit(model), "target")
            done = decode_greedy(
                model,
                [prompt.token_ids for prompt in prompts[start : start + size]],
                stops=stop_tokens(model, pair.tokenizer),
                vocab_size=pair.vocab_size,
                max_new_tokens=job.config.max_new_tokens,
                look_ahead=job.config.chain_levels,
            )
            parts.save_outputs(batch, done)
        outputs += done
    progress("target", len(prompts), len(prompts))
    return outputs


def _draft_parts(
    job: RecordingJob,
    pair: _Pair,
    prompts: list[Prompt],
    outputs: list[TargetOutput],
    parts: PartStore,
    *,
    progress: Progress,
) -> None:
    """Record every request that is not recorded yet."""
    todo = [i for i in range(len(prompts)) if not parts.has_request(i)]
    if not todo:
        return
    draft = models.load_model(job.draft, job.config.dtype)
    check_lengths(prompts, job.config, models.context_limit(draft), "draft")
    prepare_draft(draft)
    total = sum(outputs[i].num_emitted - 1 for i in todo)
    done = 0
    for i in todo:
        progress("draft", done, total)
        arrays = record_request(draft, prompts[i], outputs[i], job.config, pair.vocab_size)
        parts.save_request(i, arrays)
        done += outputs[i].num_emitted - 1
    progress("draft", total, total)


def _trace(
    job: RecordingJob,
    pair: _Pair,
    prompts: list[Prompt],
    outputs: list[TargetOutput],
    arrays: list[RequestArrays],
) -> Trace:
    return assemble(
        job.config,
        job.text,
        target=pair.target,
        draft=pair.draft,
        tokenizer=f"sha256:{pair.fingerprint}",
        vocab_size=pair.vocab_size,
        device=f"cpu, {platform.machine()}",
        libraries=library_versions(),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        requests=list(zip(prompts, outputs, arrays, strict=True)),
    )
