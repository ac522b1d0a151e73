"""From options to a run that can start: models loaded, budgets timed, gates fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from echo_policies.api import Policy
from gpu_backend import models
from gpu_backend.knee import Knee, measure_knee
from gpu_backend.live_calibration import fit, warm_up
from gpu_backend.serve_config import ServeConfig
from gpu_backend.serve_setup import (
    Workload,
    any_drafts,
    choose_device,
    chosen_policies,
    load_pair,
    make_workload,
)
from gpu_backend.serving import ModelPair, ServeSettings
from gpu_backend.sources.locate import LocatedModel
from gpu_backend.stopwatch import device_clock
from traces.schema import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]
"""Called with what runs, requests finished and requests in all."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """What is chosen for one batch size."""

    settings: ServeSettings
    knee: Knee | None
    policies: tuple[Policy, ...]
    """Plain decoding first, all calibrated."""

    @property
    def size(self) -> int:
        """Requests served at a time, B."""
        return self.settings.num_slots


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything loaded and chosen, ready to serve."""

    device: torch.device
    pair: ModelPair
    tokenizer: PreTrainedTokenizerBase
    workload: Workload
    batches: tuple[PreparedBatch, ...]
    calibration: str
    """What gates were fitted on, in words; empty where nothing needed it."""
    target: ModelInfo
    draft: ModelInfo | None
    """None where no policy drafts."""

    def label(self, policy: Policy, batch: PreparedBatch) -> str:
        """What progress calls a run."""
        return policy.name if len(self.batches) == 1 else f"{policy.name}, batch {batch.size}"


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
    policies = chosen_policies(config, config.batch_sizes[0])
    calibrates = not all(policy.is_calibrated for policy in policies)
    pair, tokenizer = load_pair(config, [model.path for model in located], device)
    workload = make_workload(config, pair, tokenizer, calibrates=calibrates)
    batches = [prepare_batch(config, pair, workload, size) for size in config.batch_sizes]
    calibration = "" if config.calibration is None else f"from {config.calibration.name}"
    if calibrates:
        total = len(workload.calibration)
        progress("calibration", 0, total)
        samples = warm_up(
            pair,
            policies,
            batches[0].settings,
            workload.calibration,
            on_finished=lambda count: progress("calibration", count, total),
        )
        batches = [
            replace(batch, policies=tuple(fit(batch.policies, samples, batch.settings)))
            for batch in batches
        ]
        calibration = (
            f"fitted in the warm-up: {len(samples.request_N)} positions of {total} prompts that "
            "are not evaluated"
        )
    target, *drafts = [_describe(model, config) for model in located]
    if config.looks_up and any_drafts(policies):
        drafts = [models.describe_lookup()]
    return Prepared(
        device=device,
        pair=pair,
        tokenizer=tokenizer,
        workload=workload,
        batches=tuple(batches),
        calibration=calibration,
        target=target,
        draft=drafts[0] if drafts else None,
    )


def prepare_batch(
    config: ServeConfig, pair: ModelPair, workload: Workload, size: int
) -> PreparedBatch:
    """Choose ``k_max`` for a batch size; gates that no file fits are not fitted yet."""
    knee = None if config.k_max is not None else _knee(config, pair, workload, size)
    k_max = knee.k_max if knee is not None else config.k_max
    assert k_max is not None, "given or measured"
    settings = ServeSettings(
        num_slots=size,
        k_max=k_max,
        max_tokens=workload.max_tokens,
        sampling=config.sampling,
        prefill_chunk=config.prefill_chunk,
        is_staged=config.mode == "staged",
        caps_all=config.cap_all,
    )
    return PreparedBatch(settings, knee, tuple(chosen_policies(config, size)))


def _knee(config: ServeConfig, pair: ModelPair, workload: Workload, batch_size: int) -> Knee:
    return measure_knee(
        pair.target,
        batch_size=batch_size,
        context=int(workload.mean_prompt) + config.max_new_tokens // 2,
        factor=config.k_max_factor,
        clock=device_clock(pair.target.device),
        vocab_size=pair.vocab_size,
    )


def _describe(model: LocatedModel, config: ServeConfig) -> ModelInfo:
    """What is known of a model, by its official name if it was asked for by a name."""
    info = models.describe_model(model.path, config.dtype)
    return info if model.name is None else info.model_copy(update={"name": model.name})
