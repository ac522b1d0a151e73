"""From options to a run on a trace's own requests: models checked, prompts found, gates fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echo_policies.api import CalibrationContext, Policy
from echo_policies.errors import InputError
from gpu_backend import models
from gpu_backend.prompt_lookup import PROMPT_LOOKUP
from gpu_backend.recorded_prompts import in_turn, recorded_prompts
from gpu_backend.serve_config import ServeConfig, make_serve_config
from gpu_backend.serve_defaults import POLICY, left_out
from gpu_backend.serve_options import GivenOptions
from gpu_backend.serve_prepare import PreparedBatch, prepare_batch
from gpu_backend.serve_setup import Workload, choose_device, load_pair
from gpu_backend.serving import ModelPair
from gpu_backend.serving_batch import ServeRequest
from gpu_backend.sources.locate import LocatedModel
from gpu_backend.trace_parity import Recording
from traces.calibrate import calibration_samples
from traces.replay import replay_tables
from traces.schema import ModelInfo, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PreparedTrace:
    """Everything loaded and chosen, ready to serve a trace's requests."""

    recording: Recording
    pair: ModelPair
    requests: tuple[ServeRequest, ...]
    batches: tuple[PreparedBatch, ...]


def trace_config(given: GivenOptions, trace: Trace) -> ServeConfig:
    """Options of a run that must be as the trace was recorded.

    Raises:
        InputError: a model or prompts are not given, or an option contradicts the recording.
    """
    options, header = given.config(), trace.header
    defaults = left_out(options, given.sampling)
    if header.provenance.kind != "recorded":
        raise InputError(
            f"--trace must be a recording, whose models can be asked; {header.name} is "
            f"{header.provenance.kind}. Give a recorded trace."
        )
    looks_up = header.drafter == PROMPT_LOOKUP.replace("-", "_")
    if looks_up and options["draft"] in {None, PROMPT_LOOKUP}:
        options["draft"] = PROMPT_LOOKUP
    elif looks_up or options["draft"] == PROMPT_LOOKUP:
        raise InputError(
            f"--draft must be what the trace was recorded with, {header.draft.name}; got "
            f"{options['draft']}."
        )
    for name, what in (
        ("target", header.target.name),
        ("draft", header.draft.name),
        ("prompts", "the prompt files it was made of: a trace holds no text"),
    ):
        if not options[name]:
            raise InputError(f"--trace {header.name} needs --{name}: {what}.")
    if given.sampling["temperature"]:
        raise InputError(
            "temperature: with --trace the recorded tokens are committed and nothing is drawn; "
            f"got {given.sampling['temperature']:g}. Leave --temperature out."
        )
    options["dtype"] = options["dtype"] or header.target.dtype or None
    options["policies"] = options["policies"] or (POLICY,)
    return make_serve_config(given.sampling, **options, defaults=defaults)


def prepare_trace(
    config: ServeConfig, trace: Trace, located: Sequence[LocatedModel]
) -> PreparedTrace:
    """Load the models, find the prompts and fit the gates on the trace's calibration requests.

    Raises:
        InputError: a model is not the recorded one, no prompt of the trace is in the files, or
            a policy needs a calibration that neither trace nor file has.
    """
    device = choose_device(config)
    for role, model in zip(("target", "draft"), located, strict=False):
        recorded: ModelInfo = getattr(trace.header, role)
        _require_same(role, models.describe_model(model.path, config.dtype), recorded)
    pair, tokenizer = load_pair(config, [model.path for model in located], device)
    requests = trace_requests(config, trace, tokenizer)
    _require_stops(trace, requests, pair.stops)
    workload = Workload((), requests)
    batches = tuple(
        _fitted(prepare_batch(config, pair, workload, size), trace) for size in config.batch_sizes
    )
    return PreparedTrace(Recording(trace, replay_tables(trace)), pair, requests, batches)


def trace_requests(
    config: ServeConfig, trace: Trace, tokenizer: PreTrainedTokenizerBase
) -> tuple[ServeRequest, ...]:
    """Evaluation requests of a trace whose prompts are given, of every data set in turn.

    Number and seed of a request are its number in the trace. Outputs are as long as recorded, or
    cut at ``max_new_tokens`` where it was given.

    Raises:
        InputError: there is none, or a prompt is not as recorded.
    """
    prompts = recorded_prompts(trace, config.prompts, tokenizer)
    limit = config.max_prompt_tokens
    chosen = [
        request
        for request in in_turn(trace, trace.split("evaluation"))
        if request in prompts
        and (limit is None or len(prompts[request]) <= limit)
        # One token is all that prefill gives: nothing is ever decided for it.
        and len(trace.output_tokens(request)) > 1
    ][: config.requests]
    if not chosen:
        raise InputError(
            f"prompts: no evaluation request of {trace.header.name} has its prompt in the files. "
            "Give the prompt files that it was made of."
        )
    most = 2**31 if "max_new_tokens" in config.defaults else config.max_new_tokens
    return tuple(
        ServeRequest(
            number=request,
            prompt=prompts[request],
            max_new_tokens=min(most, trace.header.requests[request].max_new_tokens),
            seed=request,
        )
        for request in chosen
    )


def _require_same(role: str, given: ModelInfo, recorded: ModelInfo) -> None:
    for name in ("digest", "dtype"):
        ours, theirs = getattr(given, name), getattr(recorded, name)
        if theirs and ours != theirs:
            raise InputError(
                f"--{role} must be the model that was recorded ({recorded.name}, "
                f"{recorded.weights}); its {name} is {theirs!r}, this one's is {ours!r}."
            )


def _require_stops(trace: Trace, requests: Sequence[ServeRequest], stops: frozenset[int]) -> None:
    for request in requests:
        info = trace.header.requests[request.number]
        last = int(trace.output_tokens(request.number)[-1])
        if info.finish_reason == "stop" and last not in stops:
            raise InputError(
                f"--target must end outputs where the recorded one did; token {last} ended request "
                f"{request.number} of {trace.header.name} and does not end this target's."
            )


def _fitted(batch: PreparedBatch, trace: Trace) -> PreparedBatch:
    """Fit gates on the trace's calibration requests, as the simulator does."""
    if all(policy.is_calibrated for policy in batch.policies):
        return batch
    samples = calibration_samples(trace, trace.split("calibration"))
    ctx = CalibrationContext(batch.size, batch.settings.k_max)
    fitted: list[Policy] = [policy.calibrate(samples, ctx) for policy in batch.policies]
    return replace(batch, policies=tuple(fitted))
