"""The command ``run_gpu train-head``: an EAGLE-3 head for a target, from its own outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpu_backend.exits import user_errors
from gpu_backend.head_training.config import TrainConfig, train_config
from gpu_backend.models_cli import MODEL_HELP, locate_models

if TYPE_CHECKING:
    from gpu_backend.head_training.trainer import Epoch

DEFAULTS: Final = TrainConfig()


def _setting(name: str) -> Any:
    """An option that says what the setting of this name is."""
    return typer.Option(help=TrainConfig.model_fields[name].description)


def train_head(
    *,
    target: Annotated[str, typer.Option(help=f"Target: {MODEL_HELP}")],
    out: Annotated[Path, typer.Option(help="Folder of the head; must not exist yet.")],
    conversations: Annotated[int, _setting("conversations")] = DEFAULTS.conversations,
    max_answer: Annotated[int, _setting("max_answer")] = DEFAULTS.max_answer,
    draft_vocab: Annotated[int, _setting("draft_vocab")] = DEFAULTS.draft_vocab,
    steps: Annotated[int, _setting("steps")] = DEFAULTS.steps,
    epochs: Annotated[int, _setting("epochs")] = DEFAULTS.epochs,
    learning_rate: Annotated[float, _setting("learning_rate")] = DEFAULTS.learning_rate,
    batch_tokens: Annotated[int, _setting("batch_tokens")] = DEFAULTS.batch_tokens,
    seed: Annotated[int, _setting("seed")] = DEFAULTS.seed,
) -> None:
    """Train an EAGLE-3 head on dialogues that the target makes up.

    A run that was stopped goes on where it was when the same command is given again: at most one
    part of the dialogues or one epoch is lost. More --conversations add to those that are there.
    """
    # transformers' own bars for reading weights would run into ours; read once, at import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with user_errors("Give the same command again to go on; finished parts and epochs are kept."):
        from gpu_backend.head_training.job import TrainJob
        from gpu_backend.head_training.job import train_head as run_training
        from gpu_backend.progress import ProgressBars

        config = train_config(
            conversations=conversations,
            max_answer=max_answer,
            draft_vocab=draft_vocab,
            steps=steps,
            epochs=epochs,
            learning_rate=learning_rate,
            batch_tokens=batch_tokens,
            seed=seed,
        )
        (located,) = locate_models(target)
        job = TrainJob(located.path, located.name or located.path.name, out, config)
        with ProgressBars() as bars:
            trained = run_training(job, bars.update, lambda epoch: typer.echo(_line(epoch)))
    typer.echo(
        f"{out}: trained on {trained.num_tokens} tokens, {trained.num_answer_tokens} of them in "
        f"answers; its vocabulary covers {trained.coverage:.1%} of held-out answers. "
        f"The finished pieces in {job.work} can be removed."
    )


def _line(epoch: Epoch) -> str:
    """An epoch in one line."""
    shares = " ".join(f"{share:.3f}" for share in epoch.acceptance)
    return f"epoch {epoch.number}: loss {epoch.loss:.4f}, held-out acceptance by depth {shares}"
