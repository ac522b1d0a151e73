"""A whole training: the target writes text, its features are read, a head learns, is saved.

Every finished piece is kept in a folder beside the head, so that a stopped run goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from echo_policies.errors import InputError
from gpu_backend import library_versions, models
from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.writing import save_head
from gpu_backend.greedy import stop_tokens
from gpu_backend.head_training.config import TrainConfig
from gpu_backend.head_training.features import (
    Example,
    load_examples,
    read_features,
    save_examples,
)
from gpu_backend.head_training.self_text import (
    PART,
    DialogueWriter,
    load_dialogues,
    save_dialogues,
)
from gpu_backend.head_training.start import frequent_tokens, head_config, new_head, taps_of
from gpu_backend.head_training.trainer import Epoch, Trainer
from gpu_backend.job_folder import claim_folder
from gpu_backend.model_preparation import prepare_model
from gpu_backend.serving import ModelPair

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]
"""Called with the stage, the work done and the work in all, in the stage's own unit."""

_OTHERWISE: Final = "repeat that command, or remove the folder, or give another --out"

SAVED_DTYPE: Final = torch.float16
"""Of a saved head's weights."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What to train, for which target, and where to."""

    target: Path
    target_name: str
    out: Path
    """Folder of the head; must not exist yet."""
    config: TrainConfig

    @property
    def work(self) -> Path:
        """Folder of the finished pieces."""
        return self.out.with_name(self.out.name + ".work")

    @property
    def text(self) -> Path:
        """Dialogues."""
        return self.work / "text"

    @property
    def features(self) -> Path:
        """What the target thinks of them."""
        return self.work / "features"

    @property
    def head(self) -> Path:
        """State of this very training: another one of the same text has a folder of its own."""
        settings = self.config.model_dump_json()
        return self.work / f"head-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"

    @property
    def num_parts(self) -> int:
        """Files that the dialogues are kept in."""
        return -(-self.config.conversations // PART)

    def numbers(self, part: int) -> range:
        """Dialogues of a part."""
        return range(part * PART, min((part + 1) * PART, self.config.conversations))


@dataclass(frozen=True, slots=True)
class _Ready:
    """What is trained, on what."""

    head: Eagle3Head
    train: list[Example]
    held_out: list[Example]
    target_num_layers: int


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training came to."""

    epochs: tuple[Epoch, ...]
    num_tokens: int
    """Learned from, prompts included."""
    num_answer_tokens: int
    """Of these, in answers."""
    held_out_dialogues: int
    coverage: float
    """Share of the held-out answers' tokens that the head can propose."""


def train_head(job: TrainJob, progress: Progress, on_epoch: Callable[[Epoch], None]) -> Trained:
    """Train a head, or go on training it, and save it.

    Args:
        job: what to train.
        progress: called as work is done.
        on_epoch: called after every epoch.

    Raises:
        InputError: the target or an option cannot be used, or the folder of pieces is of another
            job.
        MissingExtraError: the extra ``[models]`` is not installed.
    """
    if job.out.exists():
        raise InputError(f"{job.out} exists already; give the head another folder.")
    described = models.describe_model(job.target, "float32")
    tokenizer = models.load_tokenizer(job.target)
    config = job.config
    origin = {"target": described.digest or described.name, "seed": config.seed}
    text = origin | {"max_answer": config.max_answer}
    claim_folder(job.work, text, "pieces of a training with another target or text", _OTHERWISE)
    for folder in (job.text, job.features, job.head):
        folder.mkdir(exist_ok=True)
    _write_text(job, tokenizer, progress)
    ready = _prepare(job, models.real_vocab_size(tokenizer), progress)
    head, train, held_out = ready.head, ready.train, ready.held_out
    trainer = Trainer(head, config, train, held_out, job.head / "checkpoint.pt")
    trainer.run(lambda done, total: progress("training", done, total), on_epoch)
    trained = Trained(
        tuple(trainer.epochs),
        sum(len(example.tokens_T) for example in train),
        sum(example.num_answer_tokens for example in train),
        len(held_out),
        coverage(held_out, head.token_ids),
    )
    save_head(
        head,
        job.out,
        target_num_layers=ready.target_num_layers,
        metadata=_metadata(job, trained, models.tokenizer_fingerprint(tokenizer)),
        dtype=SAVED_DTYPE,
    )
    return trained


def coverage(examples: list[Example], token_ids_D: torch.Tensor) -> float:
    """Share of the answers' tokens that a draft vocabulary holds."""
    said = torch.cat([example.tokens_T[example.answer_start :] for example in examples])
    return float(torch.isin(said, token_ids_D).float().mean())


def _write_text(job: TrainJob, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> None:
    """Let the target write the dialogues that are not on disk yet, in whole parts.

    This target is not the one whose features are read: packed for serving, it has given up the
    output layer that the head starts from, and keeping that beside it would cost memory.
    """
    missing = [part for part in range(job.num_parts) if not _holds_all(job, part)]
    if not missing:
        return
    target = models.load_model(job.target, "float32")
    vocab_size = models.real_vocab_size(tokenizer)
    prepare_model(target, vocab_size, "target")
    pair = ModelPair(target, None, vocab_size, stop_tokens(target, tokenizer))
    config = job.config
    writer = DialogueWriter(pair, tokenizer, max_answer=config.max_answer, seed=config.seed)
    for part in missing:
        first = job.numbers(part).start

        def report(count: int, first: int = first) -> None:
            progress("dialogues", first + count, config.conversations)

        # Of a part that ended an earlier run with fewer dialogues.
        _features(job, part).unlink(missing_ok=True)
        save_dialogues(_text(job, part), writer.write(job.numbers(part), report))


def _prepare(job: TrainJob, vocab_size: int, progress: Progress) -> _Ready:
    """Read features and make a head; of the target, training keeps only what the head shares."""
    target = models.load_model(job.target, "float32")
    examples = _examples(job, target, progress)
    num_held_out = max(1, round(job.config.held_out * len(examples)))
    held_out, train = examples[:num_held_out], examples[num_held_out:]
    head = _start(job, target, vocab_size, train)
    return _Ready(head, train, held_out, target.config.num_hidden_layers)


def _examples(job: TrainJob, target: PreTrainedModel, progress: Progress) -> list[Example]:
    """Features of all dialogues; those that are not on disk yet are read."""
    examples: list[Example] = []
    for part in range(job.num_parts):
        path, first = _features(job, part), len(examples)
        if not path.exists():

            def report(count: int, first: int = first) -> None:
                progress("features", first + count, job.config.conversations)

            dialogues = load_dialogues(_text(job, part))
            save_examples(path, read_features(target, taps_of(target), dialogues, report))
        # A part of a run with more dialogues may hold more than are asked for.
        examples += load_examples(path)[: len(job.numbers(part))]
    return examples


def _start(
    job: TrainJob, target: PreTrainedModel, vocab_size: int, train: list[Example]
) -> Eagle3Head:
    torch.manual_seed(job.config.seed)
    token_ids = frequent_tokens(train, vocab_size, job.config.draft_vocab)
    return new_head(head_config(target, vocab_size, len(token_ids)), target, token_ids)


def _text(job: TrainJob, part: int) -> Path:
    return job.text / f"part-{part:05d}.jsonl"


def _features(job: TrainJob, part: int) -> Path:
    return job.features / f"part-{part:05d}.safetensors"


def _holds_all(job: TrainJob, part: int) -> bool:
    """Whether the text of a part is there, the last dialogues that are asked for included."""
    path = _text(job, part)
    return path.exists() and len(load_dialogues(path)) >= len(job.numbers(part))


def _metadata(job: TrainJob, trained: Trained, tokenizer_sha256: str) -> dict[str, Any]:
    last = trained.epochs[-1]
    return {
        "target": job.target_name,
        "tokenizer_sha256": tokenizer_sha256,
        "training": job.config.model_dump(),
        "versions": library_versions(),
        "trained_on_tokens": trained.num_tokens,
        "trained_on_answer_tokens": trained.num_answer_tokens,
        "held_out_dialogues": trained.held_out_dialogues,
        "held_out_coverage": round(trained.coverage, 4),
        "held_out_acceptance_by_depth": [round(share, 4) for share in last.acceptance],
    }
