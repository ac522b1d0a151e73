"""The command ``run_gpu parity``: does replay take the decisions that the real engine takes?"""

from __future__ import annotations

import os
from typing import Any

import typer

from gpu_backend.exits import user_errors
from gpu_backend.serve_options import (
    BatchSizeOption,
    CalibrationOption,
    CalibrationRequestsOption,
    CapAllOption,
    DeviceOption,
    DraftOption,
    DraftVocabOption,
    DtypeOption,
    KMaxOption,
    LookupMatchOption,
    MaxNewTokensOption,
    MaxPromptTokensOption,
    ModelLevelsOption,
    ModeOption,
    PolicyOption,
    PromptsOption,
    RequestsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
)
from gpu_backend.serve_start import start


def parity(
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
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    k_max: KMaxOption = None,
    cap_all: CapAllOption = False,
    mode: ModeOption = None,
    calibration: CalibrationOption = None,
    calibration_requests: CalibrationRequestsOption = None,
) -> None:
    """Serve with real models, replay what the policies saw, and compare every decision.

    Plans and accepted lengths must be equal in every step; exits with 1 and the first difference
    where they are not.
    """
    # transformers' own bars for reading weights would run into ours; read once, at import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with user_errors("Nothing was compared yet."):
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
            "cap_all": cap_all,
            "mode": mode,
            "calibration": calibration,
            "calibration_requests": calibration_requests,
        }
        is_equal = _compare(options, {"temperature": temperature})
    if not is_equal:
        raise typer.Exit(1)


def _compare(options: dict[str, Any], sampling: dict[str, Any]) -> bool:
    """Check every policy that drafts and print a line for each; returns whether all are equal."""
    from gpu_backend.parity import check_parity
    from gpu_backend.serve_run import prepare

    config, located = start(options, sampling)
    ready = prepare(config, located)
    is_equal = True
    for policy in ready.policies[1:]:
        report = check_parity(ready.pair, policy, ready.settings, ready.workload.requests)
        if report.difference is None:
            typer.echo(
                f"{report.policy}: {report.steps} steps, {report.drafts} drafts, "
                f"{report.accepted} accepted tokens; replay takes every decision the same way."
            )
        else:
            typer.echo(f"{report.policy}: DIFFERS at {report.difference}.")
            is_equal = False
    return is_equal
