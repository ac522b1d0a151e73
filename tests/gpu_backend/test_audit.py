"""An engine's outputs are the plain model's own; one that is not is caught and named."""

import signal

import pytest
import torch
from typer.testing import CliRunner

from gpu_backend import acceptance, audit
from gpu_backend.audit import MARGINS, Margin, audit_outputs
from gpu_backend.cli import app
from gpu_backend.packed_linear import PackedLinear, can_pack
from gpu_backend.sampling import Sampling, choose
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving_batch import Finished
from tests.gpu_backend.serve import make_engine, make_pair, requests, true_output
from tests.gpu_backend.tiny import VOCAB, save_model, tiny_model, write_prompts

PROMPTS = [[5, 9, 40, 7], [11, 3], [60, 61, 62, 63, 64]]
TREE = "eagle3:levels=3,top_k=3,nodes=6"


def finished(pair, spec=TREE, asked=None):
    asked = asked or requests(PROMPTS, [9, 12, 6])
    engine = make_engine(pair, spec, asked)
    serve_all(engine, asked)
    return engine.finished


def audited(done, margin, dtype=torch.float32):
    """What the target of :func:`make_pair` says, as it comes from its library."""
    return audit_outputs(tiny_model(seed=1).to(dtype), VOCAB, done, margin)


def test_every_token_is_the_argmax():
    report = audited(finished(make_pair(draft="close")), MARGINS[torch.float32])
    assert (report.requests, report.tokens) == (3, 27)
    assert report.violations == ()


def test_a_wrong_token_is_named():
    """The gap is that of the plain model at the very place, whatever was said before."""
    (request,) = requests(PROMPTS[:1], 8)
    plain = tiny_model(seed=1)
    output = true_output(plain, request)
    logits = plain(torch.tensor([[*request.prompt, *output[:3]]])).logits[0, -1, :VOCAB].detach()
    second = int(logits.topk(2).indices[1])
    output[3] = second
    done = Finished(request, tuple(output), "length", 0.0, 1.0)
    report = audited([done], MARGINS[torch.float32])
    choice = report.violations[0]
    assert (choice.request, choice.place, choice.token) == (0, 3, second)
    assert choice.best_token == int(logits.argmax())
    assert choice.gap == pytest.approx(float(logits.max() - logits[second]), rel=1e-3)
    assert choice.best == pytest.approx(float(logits.max()), rel=1e-4)
    wide = audited([done], Margin(0.0, choice.gap + 1e-6))
    assert choice.place in [tie.place for tie in wide.near_ties]


def test_margins_are_relative_or_absolute():
    margin = MARGINS[torch.bfloat16]
    assert margin.allows(0.05, 1.0)
    assert not margin.allows(0.06, 1.0)
    assert margin.allows(0.3, -20.0)
    assert not margin.allows(0.4, 20.0)


def test_bfloat16_is_within_its_margin():
    pair = make_pair(draft="close")
    for model in (pair.target, pair.draft):
        model.to(torch.bfloat16)
    report = audited(finished(pair), MARGINS[torch.bfloat16], torch.bfloat16)
    assert report.violations == ()


class Careless(Sampling):
    """Takes the second-best token at every third position."""

    def choose(self, logits_NV, seed_N, position_N):
        best = choose(logits_NV, seed_N, position_N, Sampling())
        second = logits_NV.topk(2, dim=1).indices[:, 1]
        return torch.where(position_N % 3 == 0, second, best)


def test_an_engine_that_accepts_wrong_tokens_is_caught():
    """Planted fault: consistent between policies, so that equality of outputs would not show it."""
    pair = make_pair(draft="close")
    asked = requests(PROMPTS, [9, 12, 6])
    engine = make_engine(pair, TREE, asked, sampling=Careless())
    serve_all(engine, asked)
    report = audited(engine.finished, MARGINS[torch.float32])
    places = {(choice.request, choice.place) for choice in report.violations}
    wrong = {
        (done.request.number, place)
        for done in engine.finished
        for place in range(len(done.output))
        if (len(done.request.prompt) + place) % 3 == 0
    }
    assert places == wrong


@pytest.fixture
def arguments(tmp_path):
    target, draft = (
        save_model(tmp_path / "target", 1),
        save_model(tmp_path / "draft", 1, noise=0.05),
    )
    prompts = write_prompts(tmp_path / "one.jsonl", 3)
    models = ["--target", str(target), "--draft", str(draft), "--prompts", str(prompts)]
    small = ["--max-new-tokens", "6", "--k-max", "8", "--batch-size", "1,2"]
    return ["audit", *models, *small, "--policy", TREE]


@pytest.mark.skipif(not can_pack(), reason="nothing is packed here")
def test_a_fault_in_layers_of_ours_is_caught(arguments, monkeypatch):
    """Kind: an audit by a model with the same layers, which says the same wrong thing."""
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda layer, given: -right(layer, given))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "VIOLATION" in result.output


def test_command(arguments, monkeypatch):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.startswith(TREE)]
    assert [(row[1], row[2], row[3], row[6]) for row in rows] == [
        ("1", "3", "18", "0"),
        ("2", "3", "18", "0"),
    ]
    assert "Every token is the plain model's argmax" in result.output
    calls = []

    def interrupting(*given):
        calls.append(given)
        signal.raise_signal(signal.SIGINT)
        return audit_outputs(*given)

    with monkeypatch.context() as patch:
        patch.setattr(audit, "audit_outputs", interrupting)
        stopped = CliRunner().invoke(app, arguments)
    assert stopped.exit_code == 130
    assert len(calls) == 1  # the run at hand is finished and reported, no other begins
    assert "autoregressive" in stopped.output
    assert TREE not in stopped.output
    said = CliRunner().invoke(app, [*arguments, "--temperature", "0.5"])
    assert said.exit_code == 2
    assert "an audit must be of greedy outputs" in said.output
    original = acceptance._walk

    def wrong(*args, **options):
        tokens, *others = original(*args, **options)
        return (tokens + 1) % VOCAB, *others

    monkeypatch.setattr(acceptance, "_walk", wrong)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "VIOLATION, request 0 after 1 output tokens" in result.output
