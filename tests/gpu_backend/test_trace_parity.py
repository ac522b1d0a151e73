"""A live run with recorded tokens decides as replay does; planted faults are told from rounding."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from gpu_backend import score_check, trace_parity
from gpu_backend.batch_drafter import BatchDrafter
from gpu_backend.cli import app
from gpu_backend.score_check import is_near
from gpu_backend.serve_options import OPTIONS, GivenOptions
from gpu_backend.sources.locate import LocatedModel
from gpu_backend.trace_parity import Recording, check_trace_parity
from gpu_backend.trace_setup import prepare_trace, trace_config
from tests.gpu_backend.serve import calibrated
from tests.gpu_backend.tiny import save_model, write_prompts
from traces.replay import replay_tables
from traces.store import load

POLICIES = [
    "chain:levels=4",
    "static:tree=0/1/2/00/01/10/000",
    "eagle3:levels=3,top_k=3,nodes=6",
    "echo:levels=3,top_k=3,w_topk=2",
    "dense:levels=3,top_k=3,w_topk=1,budget_order=round_robin",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two recordings, of a draft model and of prompt lookup, and the files they are made of."""
    folder = tmp_path_factory.mktemp("trace")
    target = save_model(folder / "target", seed=1)
    draft = save_model(folder / "draft", seed=1, noise=0.05)
    prompts = write_prompts(folder / "one.jsonl", 6)
    more = write_prompts(folder / "two.jsonl", 4, first=50)
    files = ["--prompts", str(prompts), "--prompts", str(more)]
    small = ["--max-new-tokens", "10", "--levels", "3", "--beam-width", "4", "--root-width", "8"]
    small += ["--top-k", "4", "--chain-levels", "5"]
    paths = {}
    for name, drafter in (("model", str(draft)), ("lookup", "prompt-lookup")):
        paths[name] = folder / f"{name}.safetensors"
        arguments = ["record", "--target", str(target), "--draft", drafter, *files, *small]
        result = CliRunner().invoke(app, [*arguments, "--out", str(paths[name])])
        assert result.exit_code == 0, result.output
    return {"folder": folder, "target": target, "draft": draft, "files": files, **paths}


@pytest.fixture(scope="module")
def ready(made):
    """The recording of the draft model and what serves it."""
    trace = load(made["model"])
    values = dict.fromkeys(OPTIONS) | {
        "policy": ["chain"],
        "target": str(made["target"]),
        "draft": str(made["draft"]),
        "prompts": made["files"][1::2],
        "batch_size": "3",
        "k_max": 9,
    }
    config = trace_config(GivenOptions(values), trace)
    located = [LocatedModel(made[role], None, "local") for role in ("target", "draft")]
    return prepare_trace(config, trace, located)


def check(ready, spec, recording=None, **changes):
    settings = replace(ready.batches[0].settings, **changes)
    return check_trace_parity(
        ready.pair, calibrated(spec), settings, recording or ready.recording, ready.requests
    )


def with_arrays(recording, **arrays):
    changed = replace(recording.trace, arrays=replace(recording.trace.arrays, **arrays))
    return Recording(changed, replay_tables(changed))


@pytest.mark.parametrize("spec", POLICIES)
def test_every_decision_is_the_recordings(ready, spec):
    report = check(ready, spec)
    assert report.faults == []
    assert report.drafts > 10
    assert report.scores.compared > 40
    assert report.tokens == sum(
        len(ready.recording.trace.output_tokens(request.number)) for request in ready.requests
    )
    assert report.target_gap < 1e-3


def test_requests_alternate_between_data_sets(ready):
    header = ready.recording.trace.header
    tasks = [header.requests[request.number].task for request in ready.requests]
    assert tasks[:4] == ["one", "two", "one", "two"]
    assert all(header.requests[r.number].split == "evaluation" for r in ready.requests)


def test_recorded_tokens_are_committed_whatever_the_target_says(ready):
    """Other tokens in the recording are far from the target's best, and said to be."""
    trace = ready.recording.trace
    request = ready.requests[1].number
    place = int(trace.arrays.token_offset[request]) + 3
    tokens = trace.arrays.tokens.copy()
    tokens[place] = (tokens[place] + 1) % 90 + 2
    report = check(ready, "chain:levels=4", with_arrays(ready.recording, tokens=tokens))
    assert any("the target's best token lies" in fault for fault in report.faults)
    assert report.target_ties >= 1


def test_nodes_that_were_not_recorded_are_counted_apart(ready):
    """Recorded with 4 nodes a layer: without their slots a wide tree has unknown children."""
    slots = ready.recording.trace.arrays.slot_child.copy()
    slots[:, :, 1:] = -1
    children = ready.recording.trace.arrays.child_logp.copy()
    children[:, :, 1:] = -np.inf
    recording = with_arrays(ready.recording, slot_child=slots, child_logp=children)
    report = check(ready, "eagle3:levels=3,top_k=3,nodes=6", recording)
    assert report.unrevealed > 0
    assert report.unrevealed_differences > 0
    assert report.faults == []


def nudged(recording, steps):
    """Scores of the recorded roots moved by steps of float16, so that plans change."""
    logp = recording.trace.arrays.root_logp.copy()
    bits = logp.view(np.int16)
    bits[:, 1::2] += np.int16(steps)  # of a negative number: downwards
    return with_arrays(recording, root_logp=logp)


def test_rounding_is_told_from_a_fault(ready, monkeypatch):
    """One step of float16 is a tie, whatever it decides; a hundred are a fault."""
    spec = "eagle3:levels=3,top_k=3,nodes=6"
    far = check(ready, spec, nudged(ready.recording, 300))
    assert far.faults
    assert "step " in far.faults[0]
    assert "depth " in far.faults[0]
    assert "recorded" in far.faults[0]
    assert far.scores.beyond
    monkeypatch.setattr(score_check, "NOISE", 100.0)
    near = check(ready, spec, nudged(ready.recording, 300))
    assert near.faults == []
    assert near.score_ties > 0


def test_a_decision_that_no_score_explains_is_a_fault(ready, monkeypatch):
    """Planted fault: the live policy has another budget than its replay."""
    original = trace_parity.build_engine
    monkeypatch.setattr(
        trace_parity,
        "build_engine",
        lambda pair, policy, settings: original(
            pair, policy.model_copy(update={"scheduler": other.scheduler}), settings
        ),
    )
    other = calibrated("eagle3:levels=3,top_k=3,nodes=5")
    report = check(ready, "eagle3:levels=3,top_k=3,nodes=6")
    assert any("no score differs enough" in fault for fault in report.faults)
    assert any("replay of the live run itself" in fault for fault in report.faults)


def test_a_draft_that_reads_wrong_text_is_a_fault(ready, monkeypatch):
    """Planted fault in the engine alone: the draft misses a committed token."""
    original = BatchDrafter.commit
    monkeypatch.setattr(
        BatchDrafter, "commit", lambda self, slot, tokens, _: original(self, slot, tokens[-1:])
    )
    report = check(ready, "echo:levels=3,top_k=3,w_topk=2")
    assert report.scores.beyond
    assert any("live" in fault and "recorded" in fault for fault in report.faults)


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        (-1.0, -1.0, True),
        (-1.0, -1.001, True),
        (-1.0, -1.01, False),
        (-8.0, -8.0078, True),
        (-np.inf, -np.inf, True),
        (-np.inf, -9.0, False),
        (-1e-5, 0.0, True),
    ],
)
def test_near_scores(one, other, near):
    assert is_near(np.float16(one), np.float16(other)) is near
    assert is_near(np.float16(other), np.float16(one)) is near


def command(made, trace, *more):
    files = made["files"]
    arguments = ["parity", "--trace", str(made[trace]), "--target", str(made["target"]), *files]
    return CliRunner().invoke(app, [*arguments, "--k-max", "9", *more])


def test_command(made):
    draft = ["--draft", str(made["draft"])]
    policies = ["--policy", "chain:levels=3,eagle3:levels=3,top_k=3,nodes=6"]
    result = command(made, "model", *draft, *policies, "--batch-size", "1,3", "--requests", "3")
    assert result.exit_code == 0, result.output
    assert "trace     model, 3 requests, recorded tokens committed" in result.output
    rows = [line.split() for line in result.output.splitlines() if line.startswith("eagle3")]
    assert [row[1] for row in rows if row[-1] == "0"] == ["1", "3"]
    assert "Every decision is the recording's" in result.output


def test_command_with_prompt_lookup(made):
    """Nothing is rounded twice: not one score may differ."""
    policies = ["--policy", "chain:levels=3,eagle3:levels=3,top_k=3,nodes=6"]
    result = command(made, "lookup", *policies, "--batch-size", "2", "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output
    assert result.output.count(" 0 not the same float16") == 2


def test_refusals(made, tmp_path):
    def said(*more, trace="model"):
        result = command(made, trace, *more)
        assert result.exit_code == 2, result.output
        return result.output

    draft = ["--draft", str(made["draft"])]
    assert "--trace model needs --draft: draft" in said()
    assert "--draft must be what the trace was recorded with" in said(*draft, trace="lookup")
    assert "nothing is drawn" in said(*draft, "--temperature", "0.5")
    other = ["--target", str(save_model(tmp_path / "other", seed=3))]
    assert "--target must be the model that was recorded" in said(*draft, *other)
    assert "its dtype is 'float32'" in said(*draft, "--dtype", "bfloat16")
    elsewhere = write_prompts(tmp_path / "three.jsonl", 2)
    arguments = ["parity", "--trace", str(made["model"]), "--target", str(made["target"])]
    result = CliRunner().invoke(app, [*arguments, *draft, "--prompts", str(elsewhere)])
    assert "no evaluation request of model has its prompt" in result.output
    result = CliRunner().invoke(app, ["parity", "--trace", "qwen235b", *draft])
    assert "--trace must be a recording" in result.output
    changed = write_prompts(tmp_path / "one.jsonl", 6, first=20)
    changed.write_text(changed.read_text().replace("w020", "w020 w021"))
    result = CliRunner().invoke(app, [*arguments, *draft, "--prompts", str(changed)])
    assert "a prompt must be as it was recorded; one/0 has" in result.output
