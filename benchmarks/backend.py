"""The serving engine on this machine, against transformers and policy against policy.

    python benchmarks/backend.py plain    [--batch-sizes 1 4 16]
    python benchmarks/backend.py assisted [--lengths 3 5 8] [--policy POLICY ...]
    python benchmarks/backend.py policies [--policy POLICY ...] [--prompts FILE ...] [--lookup-too]

- `plain`: plain decoding of the engine against `generate` of transformers (greedy, left-padded
  batch, dynamic cache).
- `assisted`: policies at batch 1 against transformers' assisted generation with the same draft at
  constant lengths, and against its prompt lookup.
- `policies`: policies against plain decoding of the same engine, per prompt set, with the time by
  part of a step. `--lookup-too` runs each with prompt lookup alone as well.

Models, draft and policies as `run_gpu` takes them; the default pair is Qwen2.5-Coder 1.5B/0.5B.
Every output has `--max-new-tokens` tokens, stop tokens or not, so all contestants do the same work.
Contestants take turns (`--repeats`) after a short warm-up, prefill is included, and the best turn
of each counts. In `policies` engines take turns step by step, whoever has spent least goes next, so
that a slow spell of the machine slows all of them. Two ratios are printed: of elapsed time, and of
processor time, which other work on the machine disturbs less. transformers gets models of its own,
freshly loaded, so memory must hold both. `--json FILE` writes everything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("TQDM_DISABLE", "1")
# A script's folder comes first on the path, where simulator.py would hide the package.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]

import torch

from echo_policies.api import Policy
from echo_policies.presets import autoregressive
from gpu_backend import models
from gpu_backend.engine import Engine
from gpu_backend.models_cli import locate_models
from gpu_backend.serve_config import make_serve_config
from gpu_backend.serve_defaults import with_defaults
from gpu_backend.serve_loop import serve_all, serve_side_by_side
from gpu_backend.serve_prepare import Prepared, prepare
from gpu_backend.serve_run import describe_device
from gpu_backend.serve_setup import models_needed
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest

WARM_UP_TOKENS: Final = 4

MEASURED: Final = ("name", "elapsed_s", "processor_s", "parts", "outputs")

PARTS: Final = ("draft", "verify", "decide", "host", "prefill")
Outputs = list[list[int]]
Run = Callable[[], tuple[Outputs, dict[str, float]]]
"""Serves all requests; returns outputs by request and seconds by part where they are known."""


@dataclass
class Contestant:
    """What is measured, and what was measured of it."""

    name: str
    run: Run
    warm_up: Run
    """A few tokens of one request."""
    make_engine: Callable[[], Engine] | None = None
    """None where it is not ours."""
    elapsed_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    outputs: Outputs = field(default_factory=list)

    def take_turn(self) -> None:
        """Serve once and note the times."""
        elapsed, processor = time.perf_counter(), time.process_time()
        outputs, parts = self.run()
        self.note(time.perf_counter() - elapsed, time.process_time() - processor, outputs, parts)

    def note(
        self, elapsed_s: float, processor_s: float, outputs: Outputs, parts: dict[str, float]
    ) -> None:
        """Note the times of a turn."""
        self.elapsed_s.append(elapsed_s)
        self.processor_s.append(processor_s)
        self.outputs = outputs
        self.parts.append(parts)

    @property
    def best_parts(self) -> dict[str, float]:
        """Seconds by part of the fastest turn."""
        return self.parts[self.elapsed_s.index(min(self.elapsed_s))]


def main() -> None:
    """Measure and print."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(describe_device(torch.device(options.device)), flush=True)
    rounds = {"plain": _plain, "assisted": _assisted, "policies": _policies}[options.part]
    tables = []
    for title, contestants in rounds(options):
        tables.append({"title": title, "rows": _rows(contestants)})
        _print(title, contestants)
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
        _take_turns(rows, options.repeats)
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
        _take_turns(rows, options.repeats)
        yield f"{task}, batch 1, {len(every)} requests", rows


def _policies(options: argparse.Namespace) -> Iterator[tuple[str, list[Contestant]]]:
    """Policies against plain decoding of the same engine, per batch size and prompt set."""
    for size in options.batch_sizes:
        requests = (options.requests or size) * _num_sets(options)
        ready = _prepare(options, _chosen(options), [size], requests)
        _print_costs(ready)
        for task, every in _by_task(ready):
            rows = _served(ready, every, options)
            _step_in_turns(rows, every, options.repeats)
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

    def serve(requests: Sequence[ServeRequest]) -> tuple[Outputs, dict[str, float]]:
        engine = make_engine()
        serve_all(engine, requests)
        return _outcome(engine, requests)

    name = "plain decoding" if policy == autoregressive() else policy.name
    short = [replace(requests[0], max_new_tokens=WARM_UP_TOKENS)]
    return Contestant(name, lambda: serve(requests), lambda: serve(short), make_engine)


def _outcome(engine: Engine, requests: Sequence[ServeRequest]) -> tuple[Outputs, dict[str, float]]:
    """Outputs by request, and seconds by part."""
    times = engine.log.times
    parts = {
        "draft": sum(step.draft_s for step in times),
        "verify": sum(step.verify_s for step in times),
        "decide": sum(step.check_s + step.select_s for step in times),
        "host": sum(step.host_s for step in times),
        "prefill": sum(step.prefill_s for step in times),
    }
    done = {end.request.number: list(end.output) for end in engine.finished}
    return [done[request.number] for request in requests], parts


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

    def run(tokens: int = options.max_new_tokens) -> tuple[Outputs, dict[str, float]]:
        outputs: Outputs = []
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
        return outputs, {}

    return Contestant(name, run, lambda: run(WARM_UP_TOKENS))


def _take_turns(contestants: Sequence[Contestant], repeats: int) -> None:
    for contestant in contestants:
        contestant.warm_up()
    for _ in range(repeats):
        for contestant in contestants:
            contestant.take_turn()


def _step_in_turns(
    contestants: Sequence[Contestant], requests: Sequence[ServeRequest], repeats: int
) -> None:
    for contestant in contestants:
        contestant.warm_up()
    for _ in range(repeats):
        engines = [one.make_engine() for one in contestants if one.make_engine is not None]
        spent = serve_side_by_side(engines, requests, [time.perf_counter, time.process_time])
        for contestant, engine, seconds in zip(contestants, engines, spent.tolist(), strict=True):
            contestant.note(*seconds, *_outcome(engine, requests))


def _print_costs(ready: Prepared) -> None:
    """What policies that weigh costs go by."""
    costs = ready.batches[0].costs
    for what, curve in (("verify", costs.verify), ("draft", costs.draft)) if costs else ():
        if curve is not None:
            timed = zip(curve.rows, curve.seconds, strict=True)
            told = ", ".join(f"{rows}: {1e3 * seconds:.0f}" for rows, seconds in timed)
            print(f"{what} ms by rows: {told}", flush=True)


def _rows(contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """What is known of each, and ratios to the first."""
    base, rows = contestants[0], []
    for one in contestants:
        row: dict[str, Any] = {name: getattr(one, name) for name in MEASURED}
        row["tokens"] = sum(map(len, one.outputs))
        row["speedup_elapsed"] = min(base.elapsed_s) / min(one.elapsed_s)
        row["speedup_processor"] = min(base.processor_s) / min(one.processor_s)
        same = [a == b for a, b in zip(one.outputs, base.outputs, strict=True)]
        row["same_outputs"] = sum(same)
        rows.append(row)
    return rows


def _print(title: str, contestants: Sequence[Contestant]) -> None:
    parts = "".join(f"{part:>9}" for part in PARTS)
    print(f"\n{title}\n{'':34}{'tok/s':>8}{'x time':>8}{'x cpu':>8}{'same':>7}{parts}")
    for row, one in zip(_rows(contestants), contestants, strict=True):
        shares = "".join(
            f"{100 * one.best_parts[part] / min(one.elapsed_s):8.1f}%"
            for part in PARTS
            if one.best_parts
        )
        same = f"{row['same_outputs']}/{len(one.outputs)}"
        print(
            f"{one.name:34}{row['tokens'] / min(one.elapsed_s):8.2f}"
            f"{row['speedup_elapsed']:8.2f}{row['speedup_processor']:8.2f}{same:>7}{shares}",
            flush=True,
        )


if __name__ == "__main__":
    main()
