"""From options to what a run needs: device, policies, models, requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from echo_policies.api import Policy
from echo_policies.errors import InputError, SignalError
from echo_policies.presets import autoregressive
from echo_policies.registry import parse_list
from echo_policies.session import widest_plan
from gpu_backend import models
from gpu_backend.attention import ATTENTION_NAME
from gpu_backend.config import build_config
from gpu_backend.eagle3.head_files import is_head_folder
from gpu_backend.eagle3.loading import load_head
from gpu_backend.greedy import stop_tokens
from gpu_backend.model_preparation import prepare_model
from gpu_backend.prefix_backends.choice import choose_attention
from gpu_backend.prompts import Prompt, load_prompts, task_name
from gpu_backend.sampling import request_seed
from gpu_backend.serve_config import ServeConfig
from gpu_backend.serving import ModelPair
from gpu_backend.serving_batch import ServeRequest
from traces.calibration_file import load_calibration
from traces.lookup_plans import lookup_objection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARRIVE: Final = 1
"""Random stream of the arrivals."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run, the same for every policy."""

    prompts: tuple[Prompt, ...]
    requests: tuple[ServeRequest, ...]
    calibration: tuple[ServeRequest, ...] = ()
    """Requests that gates are fitted on, none of them evaluated."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(request.num_tokens for request in (*self.requests, *self.calibration))

    @property
    def sources(self) -> list[str]:
        """Names of the requests, by number."""
        return [f"{prompt.task}:{prompt.question_id}" for prompt in self.prompts]

    @property
    def mean_prompt(self) -> float:
        """Mean prompt length in tokens."""
        return float(np.mean([len(request.prompt) for request in self.requests]))


def choose_device(config: ServeConfig) -> torch.device:
    """The device that was asked for, or a GPU where there is one.

    Raises:
        InputError: CUDA was asked for and is not there.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device: cuda needs a CUDA device and a CUDA build of torch; this machine has none. "
            "Use --device cpu."
        )
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def chosen_policies(config: ServeConfig, batch_size: int) -> list[Policy]:
    """Plain decoding, then the policies asked for, fitted where there is a calibration file.

    Args:
        config: the options.
        batch_size: what they are fitted for.

    Raises:
        InputError: two policies of one name, or one that the calibration file does not hold.
    """
    chosen = parse_list(config.policies)
    named = {policy.name: policy for policy in (autoregressive(), *chosen)}
    for policy in chosen:
        if policy != named[policy.name]:
            raise InputError(
                "Policies must have names of their own; two different ones are called "
                f"{policy.name!r}. Give one of them another name."
            )
    fitted = load_calibration(config.calibration) if config.calibration is not None else None
    if fitted is None:
        return list(named.values())
    return [
        policy if policy.is_calibrated else fitted.apply(policy, batch_size)
        for policy in named.values()
    ]


def models_needed(config: ServeConfig) -> list[str]:
    """Paths or names of the target, and of a draft model or head if a policy drafts with one.

    What can be refused without them is refused here, so that it costs no download.

    Raises:
        InputError: the device, the attention or a policy cannot be used.
        SignalError: a policy asks for what prompt lookup does not propose.
    """
    device = choose_device(config)
    choose_attention(config.attention, device, getattr(torch, config.dtype))
    policies = chosen_policies(config, config.batch_sizes[0])
    for policy in policies:
        objection = lookup_objection(widest_plan(policy)) if config.looks_up else None
        if objection is not None:
            raise SignalError(
                f"Policy {policy.name!r} {objection}. A draft model alone can: give --draft."
            )
    if config.draft_model is None or not any_drafts(policies):
        return [config.target]
    return [config.target, config.draft_model]


def any_drafts(policies: Sequence[Policy]) -> bool:
    """Whether any of the policies drafts."""
    return any(widest_plan(policy).levels > 0 for policy in policies)


def load_pair(
    config: ServeConfig, paths: Sequence[Path], device: torch.device
) -> tuple[ModelPair, PreTrainedTokenizerBase]:
    """Load tokenizer and models.

    Args:
        config: the options.
        paths: of the models that :func:`models_needed` names.
        device: where they run.

    Raises:
        InputError: a path holds no model, the vocabularies differ, or a head is not the target's.
    """
    target_path, *draft_paths = paths
    tokenizer = models.load_tokenizer(target_path)
    vocab_size = models.real_vocab_size(tokenizer)
    draft = None
    heads = [path for path in draft_paths if is_head_folder(path)]
    if heads and config.draft_vocab is not None:
        raise InputError(
            "draft_vocab: an EAGLE-3 head has a draft vocabulary of its own; leave the option out."
        )
    for path in draft_paths:
        if path in heads:
            continue
        models.require_same_tokens(tokenizer, models.load_tokenizer(path))
        draft = models.load_model(path, config.dtype, device)
        prepare_model(draft, min(vocab_size, config.draft_vocab or vocab_size), "draft")
    target = models.load_model(target_path, config.dtype, device)
    found = None
    for path in heads:  # before the target's layers are packed, of which a head may take some
        found = load_head(
            path,
            target,
            vocab_size=vocab_size,
            attention=ATTENTION_NAME,
            tokenizer=tokenizer,
            packs=True,
        )
    prepare_model(target, vocab_size, "target")
    pair = ModelPair(
        target,
        draft,
        vocab_size,
        stop_tokens(target, tokenizer),
        looks_up=config.looks_up,
        confidence=config.lookup_confidence,
        model_levels=config.model_levels,
    )
    if found is not None:
        pair = replace(pair, head=found.head, head_summary=found.summary)
    return pair, tokenizer


def make_workload(
    config: ServeConfig, pair: ModelPair, tokenizer: PreTrainedTokenizerBase, *, calibrates: bool
) -> Workload:
    """Take the prompts and give each request its seed and its arrival.

    Args:
        config: the options.
        pair: the models, whose positions must do.
        tokenizer: the target's.
        calibrates: also take prompts for calibration, which are not evaluated.

    Raises:
        InputError: a file cannot be used, there are too few prompts, or a request exceeds a
            model's positions.
    """
    num_calibration = config.calibration_requests if calibrates else 0
    every = take_prompts(config, tokenizer, num_calibration)
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None:
            _require_positions(role, models.context_limit(model), every, config.max_new_tokens)
    # Calibration prompts stand last, so that the evaluated ones are the same without them.
    num_evaluated = len(every) - num_calibration
    if num_evaluated < 1:
        raise InputError(
            f"prompts: calibration takes {num_calibration} prompts that are not evaluated, but "
            f"there are {len(every)} in all; give more prompts, fewer --calibration-requests, or "
            "--calibration FILE."
        )
    gaps = np.zeros(num_evaluated)
    if config.rate is not None:
        gaps = np.random.default_rng([config.seed, ARRIVE]).exponential(
            1 / config.rate, num_evaluated
        )
    arrivals = [*np.cumsum(gaps).tolist(), *[0.0] * num_calibration]
    requests = tuple(
        ServeRequest(
            number,
            prompt.token_ids,
            config.max_new_tokens,
            request_seed(config.seed, number),
            arrival,
        )
        for number, (prompt, arrival) in enumerate(zip(every, arrivals, strict=True))
    )
    return Workload(
        tuple(every[:num_evaluated]), requests[:num_evaluated], requests[num_evaluated:]
    )


def _require_positions(
    role: str, limit: int | None, prompts: Sequence[Prompt], max_new_tokens: int
) -> None:
    for prompt in prompts:
        needed = len(prompt.token_ids) + max_new_tokens
        if limit is not None and needed > limit:
            raise InputError(
                f"{role}: prompt and output must fit in {limit} positions; {prompt.task} question "
                f"{prompt.question_id} needs {needed}. Lower --max-new-tokens or set "
                "--max-prompt-tokens."
            )


def take_prompts(
    config: ServeConfig, tokenizer: PreTrainedTokenizerBase, num_more: int = 0
) -> list[Prompt]:
    """The first prompts of every file, in turn: as many as asked for, and ``num_more``.

    Raises:
        InputError: a file cannot be read or has no prompt that is short enough.
    """
    wanted = None if config.requests is None else config.requests + num_more
    share = None if wanted is None else -(-wanted // len(config.prompts))
    chosen = build_config(
        requests_per_set=share,
        max_prompt_tokens=config.max_prompt_tokens,
        calibration_fraction=0.0,
    )
    files = [load_prompts(path, task_name(path), tokenizer, chosen) for path in config.prompts]
    in_turn = [prompt for row in zip_longest(*files) for prompt in row if prompt is not None]
    return in_turn[:wanted]
