"""The serving engine on this machine, against transformers and policy against policy.

    python -m benchmarks.backend plain    [--batch-sizes 1 4 16]
    python -m benchmarks.backend assisted [--lengths 3 5 8] [--policy POLICY ...]
    python -m benchmarks.backend policies [--policy POLICY ...] [--prompts FILE ...] [--lookup-too]

- `plain`: plain decoding of the engine against `generate` of transformers (greedy, left-padded
  batch, dynamic cache).
- `assisted`: policies at batch 1 against transformers' assisted generation with the same draft at
  constant lengths, and against its prompt lookup.
- `policies`: policies against plain decoding of the same engine, per prompt set, with the time by
  part of a step. `--lookup-too` runs each with prompt lookup alone as well.

Models, draft and policies as `run_gpu` takes them; the default pair is Qwen2.5-Coder 1.5B/0.5B.
Every output has `--max-new-tokens` tokens, stop tokens or not, so all contestants do the same
work. Contestants take turns (`--repeats`) after a short warm-up, prefill is included, and the best
turn of each counts. In `policies` engines take turns step by step, whoever has spent least goes
next, so that a slow spell of the machine slows all of them. Ratios to the first row are printed:
of elapsed time, of processor time, which other work on the machine disturbs less, and of decoding
while no slot is idle (`x full`), as behind a queue that does not end. transformers gets models of
its own, freshly loaded, so memory must hold both. `--json FILE` writes everything.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("TQDM_DISABLE", "1")
import numpy as np
import torch

from benchmarks.contest import Contestant, Outcome, print_table, step_in_turns, table, take_turns
from echo_policies.api import Policy
from echo_policies.presets import autoregressive
from gpu_backend import models
from gpu_backend.engine import Engine
from gpu_backend.models_cli import locate_models
from gpu_backend.serve_config import make_serve_config
from gpu_backend.serve_defaults import with_defaults
from gpu_backend.serve_loop import serve_all
from gpu_backend.serve_prepare import Prepared, prepare
from gpu_backend.serve_run import describe_device
from gpu_backend.serve_setup import models_needed
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest

WARM_UP_TOKENS: Final = 4


def main() -> None:
    """Measure and print."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(describe_device(torch.device(options.device)), flush=True)
    rounds = {"plain": _plain, "assisted": _assisted, "policies": _policies}[options.part]
    tables = []
    for title, contestants in rounds(options):
        tables.append({"title": title, "rows": table(contestants)})
        print_table(title, contestants)
    if options.json is not None:
        told = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": told, "tables": tables}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("plain", "assisted", "policies"))
    parser.add_argument("--target", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b", help="as run_gpu takes it")
    parser.add_argument(
        "--policy", action="append", help="repeat it; default: chain:levels=3, echo"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSONL files; default: bundled")
    parser.add_argument("--requests", type=int, help="per prompt set; default: the batch size")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int)
    parser.add_argument("--k-max", type=int, help="candidate nodes per step; default: timed knee")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-requests", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lookup-too", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _plain(options: argparse.Namespace) -> Iterator[tuple[str, list[Contestant]]]:
    """The engine without drafts against `generate`, one round per batch size."""
    most = options.requests or max(options.batch_sizes)
    ready = _prepare(options, ("autoregressive",), options.batch_sizes, most)
    model = _fresh(options, options.target)
    for index, size in enumerate(options.batch_sizes):
        every = ready.workload.requests[: options.requests or size]
        prompts = [list(request.prompt) for request in every]
        rows = _served(ready, every, options, index)
        rows.append(_generator("transformers generate", options, prompts, size, model))
        take_turns(rows, options.repeats)
        yield f"batch {size}, {len(every)} requests", rows


def _assisted(options: argparse.Namespace) -> Iterator[tuple[str, list[Contestant]]]:
    """Policies at batch 1 against assisted generation and prompt lookup, per prompt set."""
    ready = _prepare(options, _chosen(options), [1], (options.requests or 2) * _num_sets(options))
    model = _fresh(options, options.target)
    name = options.draft.removeprefix("prompt-lookup").removeprefix("+")
    draft = _fresh(options, name) if name else None
    for task, every in _by_task(ready):
        prompts = [list(request.prompt) for request in every]
        rows = _served(ready, every, options)
        rows.append(_generator("transformers generate", options, prompts, 1, model))
        for length in options.lengths:
            kind = {"prompt_lookup_num_tokens": length}
            said = f"transformers prompt lookup {length}"
            rows.append(_generator(said, options, prompts, 1, model, **kind))
            if draft is not None:
                said, kind = f"transformers assisted {length}", {"draft": draft, "length": length}
                rows.append(_generator(said, options, prompts, 1, model, **kind))
        take_turns(rows, options.repeats)
        yield f"{task}, batch 1, {len(every)} requests", rows


def _policies(options: argparse.Namespace) -> Iterator[tuple[str, list[Contestant]]]:
    """Policies against plain decoding of the same engine, per batch size and prompt set."""
    for size in options.batch_sizes:
        requests = (options.requests or size) * _num_sets(options)
        ready = _prepare(options, _chosen(options), [size], requests)
        _print_costs(ready)
        for task, every in _by_task(ready):
            rows = _served(ready, every, options)
            step_in_turns(rows, every, options.repeats)
            k_max = ready.batches[0].settings.k_max
            yield f"{task}, batch {size}, k_max {k_max}, {len(every)} requests", rows


def _num_sets(options: argparse.Namespace) -> int:
    return len(options.prompts or [None])


def _by_task(ready: Prepared) -> Iterator[tuple[str, list[ServeRequest]]]:
    """Requests by the prompt set that they are of."""
    tasks = [prompt.task for prompt in ready.workload.prompts]
    for task in dict.fromkeys(tasks):
        requests = zip(ready.workload.requests, tasks, strict=True)
        yield task, [request for request, its_task in requests if its_task == task]


def _chosen(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(options.policy or ("chain:levels=3", "echo"))


def _prepare(
    options: argparse.Namespace,
    policies: Sequence[str],
    batch_sizes: Sequence[int],
    requests: int,
) -> Prepared:
    """Models, requests and fitted policies of one side of a comparison."""
    asked: dict[str, Any] = {
        "policies": tuple(policies),
        "target": options.target,
        "draft": options.draft,
        "prompts": tuple(options.prompts or ()),
        "batch_sizes": tuple(batch_sizes),
        "requests": requests,
        "max_new_tokens": options.max_new_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
        "k_max": 0 if tuple(policies) == ("autoregressive",) else options.k_max,
        "calibration": options.calibration,
        "calibration_requests": options.calibration_requests,
        "dtype": options.dtype,
        "device": options.device,
    }
    filled, _ = with_defaults(asked)
    config = make_serve_config({}, **filled)
    ready = prepare(config, locate_models(*models_needed(config)))
    return replace(ready, pair=replace(ready.pair, stops=frozenset()))


def _served(
    ready: Prepared,
    requests: Sequence[ServeRequest],
    options: argparse.Namespace,
    index: int = 0,
) -> list[Contestant]:
    """Every policy on the engine; with prompt lookup alone as well, if that is wanted."""
    batch = ready.batches[index]
    found = [_contestant(policy, ready.pair, batch.settings, requests) for policy in batch.policies]
    if not options.lookup_too:
        return found
    lookup = replace(ready.pair, draft=None, head=None, looks_up=True)
    for policy in batch.policies[1:]:
        one = _contestant(policy, lookup, batch.settings, requests)
        found.append(replace(one, name=f"{one.name}, prompt lookup"))
    return found


def _contestant(
    policy: Policy, pair: ModelPair, settings: ServeSettings, requests: Sequence[ServeRequest]
) -> Contestant:
    """One policy on the engine."""

    def make_engine() -> Engine:
        return build_engine(pair, policy, settings)

    def serve(requests: Sequence[ServeRequest]) -> Outcome:
        engine = make_engine()
        serve_all(engine, requests)
        return _outcome(engine, requests)

    return Contestant(
        name="plain decoding" if policy == autoregressive() else policy.name,
        run=lambda: serve(requests),
        warm_up=lambda: serve([replace(requests[0], max_new_tokens=WARM_UP_TOKENS)]),
        make_engine=make_engine,
        outcome_of=lambda engine: _outcome(engine, requests),
    )


def _outcome(engine: Engine, requests: Sequence[ServeRequest]) -> Outcome:
    """What an engine has served."""
    times, records = engine.log.times, engine.log.freeze()
    parts = {
        "draft": sum(step.draft_s for step in times),
        "verify": sum(step.verify_s for step in times),
        "decide": sum(step.check_s + step.select_s for step in times),
        "host": sum(step.host_s for step in times),
        "prefill": sum(step.prefill_s for step in times),
    }
    is_full_S = records.live_SB.all(1)
    decoding_S = np.array([step.total_s - step.prefill_s for step in times])
    full_rate = None
    if is_full_S.any():
        full_rate = float(records.emitted_SB[is_full_S].sum() / decoding_S[is_full_S].sum())
    done = {end.request.number: list(end.output) for end in engine.finished}
    return Outcome([done[request.number] for request in requests], parts, full_rate)


def _fresh(options: argparse.Namespace, name: str) -> Any:
    """A model that nothing of ours has changed."""
    (found,) = locate_models(name)
    model: Any = models.load_model(found.path, options.dtype).to(options.device)
    model.generation_config.eos_token_id = None
    return model


def _generator(
    name: str,
    options: argparse.Namespace,
    prompts: list[list[int]],
    batch_size: int,
    model: Any,
    *,
    draft: Any = None,
    length: int = 0,
    **kind: Any,
) -> Contestant:
    """`generate` over left-padded batches, greedy, every output of full length."""
    kind |= {} if draft is None else {"assistant_model": draft}
    asked = {"do_sample": False, "pad_token_id": 0}

    def run(tokens: int = options.max_new_tokens) -> Outcome:
        outputs: list[list[int]] = []
        if draft is not None:
            draft.generation_config.num_assistant_tokens = length
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(text)) + text for text in batch])
            mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in batch])
            ids, mask = ids.to(options.device), mask.to(options.device)
            with torch.inference_mode():
                found = model.generate(
                    ids, attention_mask=mask, max_new_tokens=tokens, **asked, **kind
                )
            outputs += found[:, longest:].tolist()
        return Outcome(outputs)

    return Contestant(name, run, lambda: run(WARM_UP_TOKENS))


def _print_costs(ready: Prepared) -> None:
    """What policies that weigh costs go by."""
    costs = ready.batches[0].costs
    for what, curve in (("verify", costs.verify), ("draft", costs.draft)) if costs else ():
        if curve is not None:
            timed = zip(curve.rows, curve.seconds, strict=True)
            told = ", ".join(f"{rows}: {1e3 * seconds:.0f}" for rows, seconds in timed)
            print(f"{what} ms by rows: {told}", flush=True)


if __name__ == "__main__":
    main()
