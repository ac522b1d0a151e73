"""The command ``run_gpu`` without a subcommand: compare policies on real models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from gpu_backend import package_version
from gpu_backend.exits import INTERRUPTED, first_interrupt_asks, user_errors
from gpu_backend.serve_options import (
    BatchSizeOption,
    CalibrationOption,
    CalibrationRequestsOption,
    CapAllOption,
    DeviceOption,
    DraftOption,
    DraftVocabOption,
    DtypeOption,
    KMaxFactorOption,
    KMaxOption,
    LookupMatchOption,
    MaxNewTokensOption,
    MaxPromptTokensOption,
    ModelLevelsOption,
    ModeOption,
    PenaltyOption,
    PolicyOption,
    PrefillChunkOption,
    PromptsOption,
    RequestsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from gpu_backend.serve_start import start


def serve(
    context: typer.Context,
    *,
    policy: PolicyOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    draft_vocab: DraftVocabOption = None,
    lookup_match: LookupMatchOption = None,
    model_levels: ModelLevelsOption = None,
    prompts: PromptsOption = None,
    batch_size: BatchSizeOption = None,
    requests: RequestsOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    max_prompt_tokens: MaxPromptTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    repetition_penalty: PenaltyOption = None,
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    k_max: KMaxOption = None,
    k_max_factor: KMaxFactorOption = None,
    cap_all: CapAllOption = False,
    mode: ModeOption = None,
    prefill_chunk: PrefillChunkOption = None,
    rate: Annotated[
        float | None, typer.Option(help="Arrivals per second; all at once if unset.")
    ] = None,
    calibration: CalibrationOption = None,
    calibration_requests: CalibrationRequestsOption = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Print the outputs of the last policy.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    write_costs: Annotated[
        Path | None,
        typer.Option(help="Write timed forwards as CSV, for `simulate --costs table:FILE`."),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Serve prompts with real models; plain decoding is always the first row.

    `run_gpu --policy echo` alone runs: it fetches a small model and serves bundled prompts.
    """
    if version:
        typer.echo(package_version())
        raise typer.Exit
    if context.invoked_subcommand is not None:
        return
    # transformers' own bars for reading weights would run into ours; read once, at import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with user_errors("Nothing was measured yet."):
        options: dict[str, Any] = {
            "policies": tuple(policy or ["echo"]),
            "target": target,
            "draft": draft,
            "draft_vocab": draft_vocab,
            "lookup_match": lookup_match,
            "model_levels": model_levels,
            "prompts": tuple(prompts or ()),
            "batch_size": batch_size,
            "requests": requests,
            "max_new_tokens": max_new_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "seed": seed,
            "dtype": dtype,
            "device": device,
            "k_max": k_max,
            "k_max_factor": k_max_factor,
            "cap_all": cap_all,
            "mode": mode,
            "prefill_chunk": prefill_chunk,
            "rate": rate,
            "calibration": calibration,
            "calibration_requests": calibration_requests,
        }
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "repetition_penalty": repetition_penalty,
        }
        is_complete = _compare(options, sampling, json, write_costs, shows_text=show_text)
    if not is_complete:
        raise typer.Exit(INTERRUPTED)


def _compare(
    options: dict[str, Any],
    sampling: dict[str, Any],
    json: Path | None,
    steps: Path | None,
    *,
    shows_text: bool,
) -> bool:
    """Run, print, write; returns whether every request was served."""
    from gpu_backend.progress import ProgressBars
    from gpu_backend.serve_output import print_result
    from gpu_backend.serve_run import prepare, serve_policies, written_costs
    from traces.terminal import check_writable, write_text

    check_writable([path for path in (json, steps) if path is not None])
    config, located = start(options, sampling)
    with ProgressBars() as bars:
        ready = prepare(config, located, progress=bars.update, writes_costs=steps is not None)
        if steps is not None:
            write_text(steps, written_costs(config, ready))
        with first_interrupt_asks() as should_stop:
            result = serve_policies(config, ready, progress=bars.update, should_stop=should_stop)
    print_result(result, shows_text=shows_text)
    if json is not None:
        write_text(json, result.to_json())
    return all(row.is_complete for row in result.rows)
