"""One run on real models: serve with every policy, put the result together."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from echo_policies.api import Policy
from echo_policies.errors import InputError
from gpu_backend import library_versions
from gpu_backend.packed_linear import describe_products
from gpu_backend.serve_config import ServeConfig
from gpu_backend.serve_loop import serve_all
from gpu_backend.serve_prepare import Prepared, PreparedBatch, Progress
from gpu_backend.serve_results import (
    KneeTable,
    ServeBatch,
    ServedRequest,
    ServeResult,
    ServeRow,
)
from gpu_backend.serving import build_engine
from gpu_backend.serving_batch import Finished
from traces.metrics import summarise
from traces.records import RunRecords
from traces.stats import speedup_interval, steadiness

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


def serve_policies(
    config: ServeConfig,
    ready: Prepared,
    *,
    progress: Progress = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ServeResult:
    """Serve the prompts with plain decoding and with every policy, at every batch size.

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
    batches: list[ServeBatch] = []
    is_complete = True
    for batch in ready.batches:
        runs: list[_Run] = []
        for policy in batch.policies:
            run = _serve(ready, batch, policy, progress=progress, should_stop=should_stop)
            if run is not None:
                runs.append(run)
            is_complete = run is not None and run.is_complete
            if not is_complete:
                break
        if runs:
            batches.append(_batch(batch, runs, ready, config))
        if not is_complete:
            break
    if not batches:
        raise KeyboardInterrupt
    return ServeResult(
        config=config,
        target=ready.target,
        draft=ready.draft,
        head=ready.pair.head_summary,
        device=describe_device(ready.device),
        attention=ready.attention,
        versions=library_versions(),
        num_requests=len(ready.workload.requests),
        mean_prompt_tokens=ready.workload.mean_prompt,
        calibration=ready.calibration,
        is_complete=is_complete,
        batches=tuple(batches),
    )


def describe_device(device: torch.device) -> str:
    """Say in words what the models run on."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    why = "" if torch.cuda.is_available() else " (no CUDA device)"
    products = describe_products()
    return f"cpu{why}, {platform.machine()}, {torch.get_num_threads()} threads, {products}"


def _rule(config: ServeConfig) -> str:
    if config.k_max is not None:
        return "given"
    return f"knee, timed here: t(k_max + B) <= {config.k_max_factor:g} t(B)"


def _serve(
    ready: Prepared,
    batch: PreparedBatch,
    policy: Policy,
    *,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> _Run | None:
    """Serve all requests with one policy; None if it was stopped before anything was measured."""
    pair, settings, workload = ready.pair, batch.settings, ready.workload
    label = ready.label(policy, batch)
    first = workload.requests[0]
    tokens = min(WARM_UP_TOKENS, first.max_new_tokens)
    warm_up = replace(first, max_new_tokens=tokens, arrival_s=0.0)
    serve_all(build_engine(pair, policy, settings), [warm_up])
    total = len(workload.requests)
    progress(label, 0, total)
    engine = build_engine(pair, policy, settings)
    is_complete = serve_all(
        engine,
        workload.requests,
        should_stop=should_stop,
        on_finished=lambda count: progress(label, count, total),
    )
    if engine.log.times:
        return _Run(policy, engine.log.freeze(), tuple(engine.finished), is_complete)
    if not is_complete:
        return None
    raise InputError(
        "A run must emit more than the first token of some request; every output ended with "
        "its first one. Serve other prompts."
    )


def _batch(
    batch: PreparedBatch, runs: Sequence[_Run], ready: Prepared, config: ServeConfig
) -> ServeBatch:
    knee = batch.knee
    return ServeBatch(
        batch_size=batch.size,
        k_max=batch.settings.k_max,
        k_max_rule=_rule(config),
        knee=None if knee is None else KneeTable(rows=knee.rows, seconds=knee.seconds),
        costs=None if batch.costs is None else batch.costs.tables(),
        rows=tuple(_row(run, runs[0], ready, config) for run in runs),
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
