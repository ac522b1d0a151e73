"""One run on real models: load, choose k_max, serve with every policy, put the result together."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from echo_policies.api import Policy
from echo_policies.errors import InputError
from gpu_backend import library_versions, models
from gpu_backend.knee import Knee, measure_knee
from gpu_backend.live_calibration import calibrate
from gpu_backend.packed_linear import describe_products
from gpu_backend.serve_config import ServeConfig
from gpu_backend.serve_loop import serve_all
from gpu_backend.serve_results import KneeTable, ServedRequest, ServeResult, ServeRow
from gpu_backend.serve_setup import (
    Workload,
    any_drafts,
    choose_device,
    chosen_policies,
    load_pair,
    make_workload,
)
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import Finished
from gpu_backend.sources.locate import LocatedModel
from gpu_backend.stopwatch import device_clock
from traces.metrics import summarise
from traces.records import RunRecords
from traces.schema import ModelInfo
from traces.stats import speedup_interval, steadiness

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]
"""Called with what runs, requests finished and requests in all."""

RESAMPLE: Final = 3
"""Random stream of the intervals."""

WARM_UP_TOKENS: Final = 3
"""Output tokens of the request that is served and forgotten before a policy is measured."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One policy's run."""

    policy: Policy
    records: RunRecords
    finished: tuple[Finished, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything loaded and chosen, ready to serve."""

    device: torch.device
    pair: ModelPair
    tokenizer: PreTrainedTokenizerBase
    workload: Workload
    settings: ServeSettings
    knee: Knee | None
    policies: tuple[Policy, ...]
    """Plain decoding first, all calibrated."""
    calibration: str
    """What gates were fitted on, in words; empty where nothing needed it."""
    target: ModelInfo
    draft: ModelInfo | None
    """None where no policy drafts."""


def prepare(
    config: ServeConfig, located: Sequence[LocatedModel], *, progress: Progress = lambda *_: None
) -> Prepared:
    """Load models and prompts, choose ``k_max`` and fit gates.

    Args:
        config: the options.
        located: the models that :func:`gpu_backend.serve_setup.models_needed` names.
        progress: shown while calibration requests finish.

    Raises:
        InputError: a model, a prompt, a policy or an option cannot be used.
        MissingExtraError: the extra ``[models]`` is not installed.
    """
    device = choose_device(config)
    policies = chosen_policies(config)
    calibrates = not all(policy.is_calibrated for policy in policies)
    pair, tokenizer = load_pair(config, [model.path for model in located], device)
    workload = make_workload(config, pair, tokenizer, calibrates=calibrates)
    knee = None if config.k_max is not None else _knee(config, pair, workload)
    k_max = knee.k_max if knee is not None else config.k_max
    assert k_max is not None, "given or measured"
    settings = ServeSettings(
        num_slots=config.batch_size,
        k_max=k_max,
        max_tokens=workload.max_tokens,
        sampling=config.sampling,
        prefill_chunk=config.prefill_chunk,
        is_staged=config.mode == "staged",
        caps_all=config.cap_all,
    )
    calibration = "" if config.calibration is None else f"from {config.calibration.name}"
    if calibrates:
        total = len(workload.calibration)
        progress("calibration", 0, total)
        policies, positions = calibrate(
            pair,
            policies,
            settings,
            workload.calibration,
            on_finished=lambda count: progress("calibration", count, total),
        )
        calibration = (
            f"fitted in the warm-up: {positions} positions of {total} prompts that are not "
            "evaluated"
        )
    target, *drafts = [_describe(model, config) for model in located]
    if config.looks_up and any_drafts(policies):
        drafts = [models.describe_lookup()]
    return Prepared(
        device=device,
        pair=pair,
        tokenizer=tokenizer,
        workload=workload,
        settings=settings,
        knee=knee,
        policies=tuple(policies),
        calibration=calibration,
        target=target,
        draft=drafts[0] if drafts else None,
    )


def serve_policies(
    config: ServeConfig,
    ready: Prepared,
    *,
    progress: Progress = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ServeResult:
    """Serve the prompts with plain decoding and with every policy.

    Args:
        config: the options.
        ready: what :func:`prepare` made of them.
        progress: shown while requests finish.
        should_stop: asked between steps; True ends the run with what is finished.

    Raises:
        InputError: no request emitted a second token.
        PolicyCrash: a policy raised.
        PolicyViolation: a policy broke its contract.
        KeyboardInterrupt: it was stopped before anything was measured.
    """
    runs: list[_Run] = []
    for policy in ready.policies:
        run = _serve(ready, policy, progress=progress, should_stop=should_stop)
        if run is not None:
            runs.append(run)
        if run is None or not run.is_complete:
            break
    if not runs:
        raise KeyboardInterrupt
    knee = ready.knee
    return ServeResult(
        config=config,
        target=ready.target,
        draft=ready.draft,
        head=ready.pair.head_summary,
        device=describe_device(ready.device),
        versions=library_versions(),
        num_requests=len(ready.workload.requests),
        mean_prompt_tokens=ready.workload.mean_prompt,
        k_max=ready.settings.k_max,
        k_max_rule=_rule(config),
        calibration=ready.calibration,
        knee=None if knee is None else KneeTable(rows=knee.rows, seconds=knee.seconds),
        rows=tuple(_row(run, runs[0], ready, config) for run in runs),
    )


def describe_device(device: torch.device) -> str:
    """Say in words what the models run on."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    why = "" if torch.cuda.is_available() else " (no CUDA device)"
    products = describe_products()
    return f"cpu{why}, {platform.machine()}, {torch.get_num_threads()} threads, {products}"


def _describe(model: LocatedModel, config: ServeConfig) -> ModelInfo:
    """What is known of a model, by its official name if it was asked for by a name."""
    info = models.describe_model(model.path, config.dtype)
    return info if model.name is None else info.model_copy(update={"name": model.name})


def _rule(config: ServeConfig) -> str:
    if config.k_max is not None:
        return "given"
    return f"knee, timed here: t(k_max + B) <= {config.k_max_factor:g} t(B)"


def _knee(config: ServeConfig, pair: ModelPair, workload: Workload) -> Knee:
    return measure_knee(
        pair.target,
        batch_size=config.batch_size,
        context=int(workload.mean_prompt) + config.max_new_tokens // 2,
        factor=config.k_max_factor,
        clock=device_clock(pair.target.device),
        vocab_size=pair.vocab_size,
    )


def _serve(
    ready: Prepared, policy: Policy, *, progress: Progress, should_stop: Callable[[], bool]
) -> _Run | None:
    """Serve all requests with one policy; None if it was stopped before anything was measured."""
    pair, settings, workload = ready.pair, ready.settings, ready.workload
    first = workload.requests[0]
    tokens = min(WARM_UP_TOKENS, first.max_new_tokens)
    warm_up = replace(first, max_new_tokens=tokens, arrival_s=0.0)
    serve_all(build_engine(pair, policy, settings), [warm_up])
    total = len(workload.requests)
    progress(policy.name, 0, total)
    engine = build_engine(pair, policy, settings)
    is_complete = serve_all(
        engine,
        workload.requests,
        should_stop=should_stop,
        on_finished=lambda count: progress(policy.name, count, total),
    )
    if engine.log.times:
        return _Run(policy, engine.log.freeze(), tuple(engine.finished), is_complete)
    if not is_complete:
        return None
    raise InputError(
        "A run must emit more than the first token of some request; every output ended with "
        "its first one. Serve other prompts."
    )


def _row(run: _Run, plain: _Run, ready: Prepared, config: ServeConfig) -> ServeRow:
    rng = np.random.default_rng([config.seed, RESAMPLE])
    theirs = {done.request.number: done.output for done in plain.finished}
    same = [
        done.output == theirs[done.request.number]
        for done in run.finished
        if done.request.number in theirs
    ]
    return ServeRow(
        policy=run.policy.name,
        parameters=dict(run.policy.parameters()),
        summary=summarise(run.records),
        speedup=speedup_interval(run.records, plain.records, ready.workload.sources, rng),
        steadiness=steadiness(run.records),
        is_complete=run.is_complete,
        same_outputs=sum(same),
        compared_outputs=len(same),
        requests=tuple(_served(done, ready) for done in run.finished),
    )


def _served(done: Finished, ready: Prepared) -> ServedRequest:
    request = done.request
    prompt = ready.workload.prompts[request.number]
    decoded = ready.tokenizer.decode(list(done.output), skip_special_tokens=True)
    return ServedRequest(
        number=request.number,
        task=prompt.task,
        question_id=prompt.question_id,
        prompt_tokens=len(request.prompt),
        tokens=done.output,
        text=str(decoded),
        finish_reason=done.finish_reason,
        ttft_s=done.first_token_s - request.arrival_s,
        tpot_s=(done.finish_s - done.first_token_s) / max(len(done.output) - 1, 1),
    )
