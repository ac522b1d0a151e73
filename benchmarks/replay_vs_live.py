"""Replay against the real draft model: are plans and accepted lengths the same?

    python -m benchmarks.replay_vs_live --draft PATH --prompts FILE.jsonl [...] [--trace NAME]

At evenly spread positions of the recording's evaluation requests, every policy is driven live on
the draft model (a forward for each node that it expands, acceptance by token ids) and replayed on
the recording. Steps with unrevealed nodes are counted apart: replay does not know their children.
Prints one line per policy; the recording and the draft must be of one dtype.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from echo_policies.api import CalibrationContext, Policy
from echo_policies.registry import parse_list
from gpu_backend import models
from gpu_backend.draft_tree import DraftTree
from gpu_backend.drafter import DraftModelDrafter, TextVerifier
from gpu_backend.model_preparation import prepare_model
from gpu_backend.node_trie import NodeTrie
from gpu_backend.recorded_prompts import recorded_prompts
from traces.calibrate import calibration_samples
from traces.library import open_trace
from traces.positions import agreement, batch_context, drive
from traces.replay import RecordedDrafter, RecordedVerifier, replay_tables
from traces.request_key import key_label, request_key
from traces.schema import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POLICIES = (
    "chain:levels=8,static,static:tree=eagle25,eagle3,eagle3_sglang,"
    "echo:w_topk=1,echo:w_topk=3,dense:w_topk=2,fixed:w_topk=2"
)


@dataclass
class Tally:
    """What one policy did at all positions."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(4, dtype=np.int64))
    """As `Agreement.counts` gives them."""
    first: list[str] = field(default_factory=list)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--trace", default="qwen2.5-coder-1.5b")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--positions", type=int, default=200)
    parser.add_argument("--k-per-request", type=int, default=6)
    options = parser.parse_args()
    trace = open_trace(options.trace)
    samples = calibration_samples(trace, trace.split("calibration"))
    policies = [
        policy.calibrate(samples, CalibrationContext(1, options.k_per_request))
        for policy in parse_list([options.policies])
    ]
    texts = recorded_prompts(trace, options.prompts, models.load_tokenizer(options.draft))
    draft = models.load_model(options.draft, trace.header.draft.dtype)
    prepare_model(draft, trace.header.vocab_size)
    tables = replay_tables(trace)
    tallies = {policy.name: Tally() for policy in policies}
    evaluated = [q for q in trace.split("evaluation") if q in texts]
    share = -(-options.positions // len(evaluated))
    for request in evaluated:
        where = trace.positions(request)
        count = min(share, where.stop - where.start)
        chosen = np.unique(np.linspace(0, where.stop - where.start - 1, count).astype(int))
        output = trace.all_tokens(request).tolist()
        trie = _trie(trace, draft, texts[request], output)
        for policy in policies:
            _compare(
                trace,
                request,
                chosen,
                policy,
                DraftModelDrafter(trie, output),
                RecordedDrafter(tables),
                options.k_per_request,
                tallies[policy.name],
            )
        print(f"{_label(trace, request)}: {len(chosen)} positions", flush=True)
    _print(tallies)


def _print(tallies: dict[str, Tally]) -> None:
    for name, tally in tallies.items():
        positions, unrevealed, plans, accepted = tally.counts
        print(
            f"{name:24} positions {positions:4}  with unrevealed nodes {unrevealed:3}  "
            f"of the others: plans differ {plans}, accepted lengths differ {accepted}  "
            f"{' '.join(tally.first[:3])}"
        )


def _label(trace: Trace, request: int) -> str:
    return key_label(request_key(trace.header.requests[request]))


def _trie(trace: Trace, draft: PreTrainedModel, prompt: list[int], output: list[int]) -> NodeTrie:
    """Nodes of one request; policies share those that several of them expand."""
    tree = DraftTree(
        draft,
        prefix_capacity=len(prompt) + len(output),
        width=trace.header.root_width,
    )
    return NodeTrie(tree, prompt, output, max_branch=32, shares_path=False)


def _compare(
    trace: Trace,
    request: int,
    chosen: np.ndarray,
    policy: Policy,
    live: DraftModelDrafter,
    played: RecordedDrafter,
    k_per_request: int,
    tally: Tally,
) -> None:
    position_B = torch.from_numpy(chosen)
    live.seek(position_B)
    played.seek(position_B + trace.positions(request).start)
    remaining_B = trace.header.requests[request].max_new_tokens - 1 - position_B
    ctx = batch_context(remaining_B, k_per_request)
    with torch.inference_mode():
        there = drive(policy, live, TextVerifier(live), ctx)
        here = drive(policy, played, RecordedVerifier(played), ctx)
    found = agreement(there, here, played.unrevealed_B == 0)
    tally.counts += found.counts()
    differs = np.flatnonzero(found.plan_differs_B)
    tally.first += [f"{_label(trace, request)}@{chosen[i]}" for i in differs]


if __name__ == "__main__":
    main()
