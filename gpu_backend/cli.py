"""The command ``run_gpu``: real models on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gpu_backend import models_cli
from gpu_backend.audit_cli import audit
from gpu_backend.exits import user_errors
from gpu_backend.models_cli import MODEL_HELP, locate_models
from gpu_backend.parity_cli import parity
from gpu_backend.prompt_lookup import PROMPT_LOOKUP
from gpu_backend.serve_cli import compare, serve
from gpu_backend.train_head import train_head

app = typer.Typer(
    name="run_gpu",
    help="Run and record draft and target models on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(models_cli.app, name="models")


def main() -> None:
    """Entry point of the console script."""
    app()


app.callback(invoke_without_command=True)(serve)
app.command("compare")(compare)
app.command("parity")(parity)
app.command("train-head")(train_head)
app.command("audit")(audit)


@app.command()
def record(
    *,
    target: Annotated[str, typer.Option(help=f"Target: {MODEL_HELP}")],
    draft: Annotated[str, typer.Option(help=f"Draft, likewise, or {PROMPT_LOOKUP!r}.")],
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL file of prompts; repeat it for more data sets.")
    ],
    out: Annotated[Path, typer.Option(help="The recording to write.")],
    costed_as: Annotated[
        str, typer.Option(help="Catalogue target that the recording is costed as by default.")
    ] = "llama-3.1-8b",
    target_name: Annotated[
        str | None,
        typer.Option(help="Name of the target; as it was given, or the file's own, if unset."),
    ] = None,
    draft_name: Annotated[str | None, typer.Option(help="Name of the draft, likewise.")] = None,
    recorded_as: Annotated[str, typer.Option(help="Catalogue name of the pair itself.")] = "",
    name: Annotated[
        str | None, typer.Option(help="Name of the recording; --out's if unset.")
    ] = None,
    licence: Annotated[str, typer.Option(help="Licence of models and prompts, in words.")] = "",
    task: Annotated[
        str | None, typer.Option(help="Data set; each file's name up to its first dot if unset.")
    ] = None,
    outputs_of: Annotated[
        Path | None,
        typer.Option(help="Take the target's outputs from this recording; nothing is decoded."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Emitted tokens per request, at most.")] = 128,
    requests_per_set: Annotated[
        int | None, typer.Option(help="Requests per prompt file, in file order; all if unset.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="Turns asked of a dialogue, each a request; all if unset.")
    ] = None,
    calibration_fraction: Annotated[
        float, typer.Option(help="Share of each data set kept for calibration.")
    ] = 0.5,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Pass over prompts longer than this, chat template included.")
    ] = None,
    levels: Annotated[int, typer.Option(help="Deepest recorded candidate depth.")] = 10,
    beam_width: Annotated[int, typer.Option(help="Beam nodes per depth.")] = 10,
    root_width: Annotated[int, typer.Option(help="Children recorded at the root.")] = 32,
    top_k: Annotated[int, typer.Option(help="Children recorded at every other node.")] = 10,
    chain_levels: Annotated[int, typer.Option(help="Levels of greedy chain and path.")] = 20,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Cut the draft's head to the tokens below this id: frequent ones come first in "
            "a vocabulary of merges. All if unset."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    target_batch: Annotated[int, typer.Option(help="Requests the target decodes together.")] = 4,
    row_chunk: Annotated[
        int, typer.Option(help="Draft rows per forward; bounds the memory.")
    ] = 512,
) -> None:
    """Record what the draft proposes and the target accepts, at every output position.

    A run that was stopped goes on where it was when the same command is given again.
    """
    # transformers' own bars for reading weights would run into ours; read once, at import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from gpu_backend.assembly import HeaderText
    from gpu_backend.config import build_config
    from gpu_backend.progress import ProgressBars
    from gpu_backend.recording import RecordingJob
    from gpu_backend.recording import record as run_recording

    with user_errors("Give the same command again to go on; at most one request was lost."):
        config = build_config(
            max_new_tokens=max_new_tokens,
            requests_per_set=requests_per_set,
            turns=turns,
            calibration_fraction=calibration_fraction,
            max_prompt_tokens=max_prompt_tokens,
            levels=levels,
            beam_width=beam_width,
            root_width=root_width,
            top_k=top_k,
            chain_levels=chain_levels,
            draft_vocab=draft_vocab,
            dtype=dtype,
            target_batch=target_batch,
            row_chunk=row_chunk,
        )
        names = [target] if draft == PROMPT_LOOKUP else [target, draft]
        target_model, *draft_models = locate_models(*names)
        draft_model = draft_models[0] if draft_models else None
        text = HeaderText(
            name=name or out.name.removesuffix(".safetensors"),
            costed_as=costed_as,
            recorded_as=recorded_as,
            licence=licence,
            target_name=target_name or target_model.name,
            draft_name=draft_name or (None if draft_model is None else draft_model.name),
        )
        job = RecordingJob(
            target=target_model.path,
            draft=None if draft_model is None else draft_model.path,
            prompts=tuple(prompts),
            out=out,
            config=config,
            text=text,
            task=task,
            outputs_of=outputs_of,
        )
        with ProgressBars() as bars:
            trace = run_recording(job, bars.update)
    typer.echo(f"{out}: {trace.num_requests} requests, {trace.num_positions} positions.")


if __name__ == "__main__":
    main()
