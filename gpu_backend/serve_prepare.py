"""From options to a run that can start: models loaded, budgets timed, gates fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from echo_policies.api import Policy
from gpu_backend import models
from gpu_backend.cost_rows import cost_rows
from gpu_backend.knee import Knee
from gpu_backend.live_calibration import fit, warm_up
from gpu_backend.measured_costs import MeasuredCosts
from gpu_backend.prefix_backends.choice import Attention, AttentionName
from gpu_backend.prefix_backends.trial import tried_attention
from gpu_backend.run_timing import time_run
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
    costs: MeasuredCosts | None
    """None where no policy weighs costs and none are written."""
    costs_by_context: Mapping[int, MeasuredCosts]
    """Empty unless they are to be written."""
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
    attention: str
    """What reads the sequences, in words."""

    def label(self, policy: Policy, batch: PreparedBatch) -> str:
        """What progress calls a run."""
        return policy.name if len(self.batches) == 1 else f"{policy.name}, batch {batch.size}"


def prepare(
    config: ServeConfig,
    located: Sequence[LocatedModel],
    *,
    progress: Progress = lambda *_: None,
    writes_costs: bool = False,
) -> Prepared:
    """Load models and prompts, choose ``k_max`` and fit gates.

    Args:
        config: the options.
        located: the models that :func:`gpu_backend.serve_setup.models_needed` names.
        progress: shown while calibration requests finish.
        writes_costs: time what steps cost at several contexts, even if no policy weighs it.

    Raises:
        InputError: a model, a prompt, a policy or an option cannot be used.
        MissingExtraError: the extra ``[models]`` is not installed.
    """
    device = choose_device(config)
    policies = chosen_policies(config, config.batch_sizes[0])
    calibrates = not all(policy.is_calibrated for policy in policies)
    pair, tokenizer = load_pair(config, [model.path for model in located], device)
    attentions = try_attention(config.attention, pair)
    workload = make_workload(config, pair, tokenizer, calibrates=calibrates)
    batches = [
        prepare_batch(config, pair, workload, size, writes_costs=writes_costs)
        for size in config.batch_sizes
    ]
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
        drafts = [models.describe_lookup(drafts[0] if drafts else None)]
    return Prepared(
        device=device,
        pair=pair,
        tokenizer=tokenizer,
        workload=workload,
        batches=tuple(batches),
        calibration=calibration,
        target=target,
        draft=drafts[0] if drafts else None,
        attention=describe_attention(*attentions, device),
    )


def prepare_batch(
    config: ServeConfig,
    pair: ModelPair,
    workload: Workload,
    size: int,
    *,
    writes_costs: bool = False,
) -> PreparedBatch:
    """Choose ``k_max`` for a batch size; gates that no file fits are not fitted yet."""
    policies = chosen_policies(config, size)
    timed = time_run(config, pair, policies, workload, size, writes_costs=writes_costs)
    settings = ServeSettings(
        num_slots=size,
        k_max=timed.k_max,
        max_tokens=workload.max_tokens,
        sampling=config.sampling,
        prefill_chunk=config.prefill_chunk,
        is_staged=config.mode == "staged",
        caps_all=config.cap_all,
        costs=timed.costs,
        attention=config.attention,
    )
    return PreparedBatch(settings, timed.knee, timed.costs, timed.by_context, tuple(policies))


def try_attention(name: AttentionName, pair: ModelPair) -> tuple[Attention, Attention]:
    """Choose what reads the sequences of target and draft, and hold libraries against torch.

    Returns:
        The target's, and the draft's; the target's again where nothing drafts with attention.

    Raises:
        InputError: what was asked for by name cannot be used, or what was chosen does not work.
    """
    target = tried_attention(name, pair.target.config, pair.target.dtype, pair.target.device)
    if pair.draft is not None:
        draft = pair.draft
        return target, tried_attention(name, draft.config, draft.dtype, draft.device)
    if pair.head is not None:
        weight = next(pair.head.norm.parameters())
        config = pair.head.config.layer_config
        return target, tried_attention(name, config, weight.dtype, weight.device)
    return target, target


def describe_attention(target: Attention, draft: Attention, device: torch.device) -> str:
    """Say in words what reads the sequences, and on a GPU what would have been preferred."""
    used = target.name
    if draft.name != target.name:
        used = f"target {target.name}, draft {draft.name}"
    # On a CPU nobody expects one of the libraries.
    passed_over = target.passed_over if device.type == "cuda" else ()
    return "; ".join([used, *passed_over])


def written_costs(config: ServeConfig, ready: Prepared) -> str:
    """What was timed, as the file that the simulator reads."""
    device = ready.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return cost_rows(
        {batch.size: batch.costs_by_context for batch in ready.batches},
        model=Path(config.target).stem,
        gpu=gpu.removeprefix("NVIDIA "),
    )


def _describe(model: LocatedModel, config: ServeConfig) -> ModelInfo:
    """What is known of a model, by its official name if it was asked for by a name."""
    info = models.describe_model(model.path, config.dtype)
    return info if model.name is None else info.model_copy(update={"name": model.name})
