"""``run_gpu record`` from prompts to a valid trace, killed on the way and started again."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from gpu_backend import recording
from gpu_backend.cli import app
from tests.gpu_backend.tiny import STOP, save_model, tiny_model, tiny_tokenizer, write_prompts
from traces.store import load
from traces.version import package_version

SMALL = {
    "max-new-tokens": 8,
    "levels": 3,
    "beam-width": 2,
    "root-width": 5,
    "top-k": 3,
    "chain-levels": 4,
    "target-batch": 2,
    "costed-as": "llama-3.1-8b",
    "recorded-as": "tiny",
    "licence": "none",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_model(folder / "target", seed=1)
    draft = save_model(folder / "draft", seed=2)
    first = write_prompts(folder / "one.jsonl", 3)
    second = write_prompts(folder / "sum.question.jsonl", 2, first=40)
    files = ["--prompts", str(first), "--prompts", str(second)]
    return ["record", "--target", str(target), "--draft", str(draft), *files]


def arguments(given, out):
    settings = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    return [given[0], *settings, *given[1:], "--out", str(out)]


def run(given, out):
    return CliRunner().invoke(app, arguments(given, out))


def test_trace_is_valid_and_says_what_it_is(pair, tmp_path):
    out = tmp_path / "a.safetensors"
    result = run(pair, out)
    assert result.exit_code == 0, result.output
    trace = load(out)
    header = trace.header
    assert [r.task for r in header.requests] == ["one"] * 3 + ["cnn_dm"] * 2
    assert [r.split[0] for r in header.requests] == ["e", "c", "e", "e", "c"]
    assert (header.name, header.recorded_as, header.costing.target) == ("a", "tiny", "llama-3.1-8b")
    assert header.provenance.kind == "recorded"
    assert header.provenance.libraries["torch"] == torch.__version__
    assert header.provenance.generator.endswith(package_version())
    assert list(tmp_path.iterdir()) == [out]
    for q, info in enumerate(header.requests):
        assert len(trace.output_tokens(q)) <= info.max_new_tokens
    assert "5 requests" in result.output


@pytest.mark.parametrize("after", [1, 4])
def test_killed_run_goes_on_with_equal_content(pair, tmp_path, monkeypatch, after):
    whole, stopped = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    name = ["--name", "same"]
    run([*pair, *name], whole)
    calls = []
    stage = {1: "decode_greedy", 4: "record_request"}[after]
    original = getattr(recording, stage)

    def killing(*args, **kwargs):
        calls.append(1)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(recording, stage, killing)
    result = run([*pair, *name], stopped)
    assert result.exit_code == 130
    assert "same command again" in result.output
    assert not stopped.exists()
    result = run([*pair, *name], stopped)
    assert result.exit_code == 0, result.output
    assert len(calls) == {1: 4, 4: 6}[after]  # one call was lost, none was made twice
    assert load(stopped).digest == load(whole).digest
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "stopped.safetensors",
        "whole.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["outputs-1-0000.json", "request-0002.safetensors"])
def test_killed_process_goes_on_with_equal_content(pair, tmp_path, seen):
    """SIGKILL, which no handler sees: only what is whole on disk counts."""
    whole, killed = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    name = ["--name", "same"]
    run([*pair, *name], whole)
    command = [sys.executable, "-m", "gpu_backend.cli", *arguments([*pair, *name], killed)]
    parts = tmp_path / "killed.safetensors.parts"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (parts / seen).exists():
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it must have been killed, not have finished"
    assert not killed.exists()
    result = run([*pair, *name], killed)
    assert result.exit_code == 0, result.output
    assert load(killed).digest == load(whole).digest
    assert not parts.exists()


def test_both_turns_of_a_dialogue(pair, tmp_path):
    prompts = tmp_path / "chat.jsonl"
    prompts.write_text('{"question_id": 1, "turns": ["w010 w011", "w012"]}\n')
    out = tmp_path / "a.safetensors"
    result = run([*pair[:5], "--prompts", str(prompts)], out)
    assert result.exit_code == 0, result.output
    trace = load(out)
    first, second = trace.header.requests
    assert (first.turn, second.turn) == (1, 2)
    assert first.source == second.source
    answered = sum(token != STOP for token in trace.output_tokens(0).tolist())
    assert second.prompt_tokens == first.prompt_tokens + answered + 1
    assert run([*pair[:5], "--prompts", str(prompts), "--turns", "1"], out).exit_code == 0
    assert load(out).num_requests == 1


def test_prompt_lookup_over_the_same_outputs(pair, tmp_path):
    model, lookup = tmp_path / "model.safetensors", tmp_path / "lookup.safetensors"
    assert run(pair, model).exit_code == 0
    options = ["--draft", "prompt-lookup", "--outputs-of", str(model)]
    result = run([*pair, *options], lookup)
    assert result.exit_code == 0, result.output
    ours, theirs = load(lookup), load(model)
    assert (ours.header.drafter, ours.header.draft.name) == ("prompt_lookup", "prompt lookup")
    assert ours.arrays.tokens.tolist() == theirs.arrays.tokens.tolist()
    assert ours.header.requests == theirs.header.requests
    fresh = tmp_path / "fresh.safetensors"
    assert run([*pair, "--draft", "prompt-lookup", "--name", "lookup"], fresh).exit_code == 0
    assert load(fresh).digest == ours.digest


def test_outputs_of_other_prompts_are_refused(pair, tmp_path):
    model = tmp_path / "model.safetensors"
    assert run(pair, model).exit_code == 0
    other = write_prompts(tmp_path / "other.jsonl", 1)
    asked = [*pair[:5], "--prompts", str(other), "--outputs-of", str(model)]
    said = error_of(asked, tmp_path)
    assert "every prompt must be in the recording; other question 0 is not" in said
    assert "--chain-levels" in error_of(
        [*pair, "--chain-levels", "5", "--outputs-of", str(model)], tmp_path
    )


def test_parts_of_another_command_are_refused(pair, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    out = tmp_path / "a.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(recording, "decode_greedy", interrupt)
        assert run(pair, out).exit_code == 130
    result = run([*pair, "--calibration-fraction", "0.2"], out)
    assert result.exit_code == 2
    assert "other models, prompts or settings" in result.output


def error_of(given, tmp_path):
    result = run(given, tmp_path / "a.safetensors")
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) <= 2  # a progress line and the sentence
    return result.output


def test_other_tokenizer_is_refused(pair, tmp_path):
    draft = save_model(tmp_path / "draft", seed=2, tokenizer=tiny_tokenizer(swap=True))
    said = error_of([*pair, "--draft", str(draft)], tmp_path)
    assert "token 5 is 'w005' in the target and 'w006' in the draft" in said


def test_prompt_beyond_the_positions_is_named(pair, tmp_path):
    target = save_model(tmp_path / "target", seed=1, limit=18)
    said = error_of([*pair, "--target", str(target)], tmp_path)
    assert "target: prompt, output and look-ahead must fit in 18 positions" in said
    assert "one question 2 needs 19" in said


def test_missing_model_and_folder(pair, tmp_path):
    assert "does not exist" in error_of([*pair, "--draft", str(tmp_path / "none")], tmp_path)
    result = run(pair, tmp_path / "none" / "a.safetensors")
    assert result.exit_code == 2
    assert "create it" in result.output


def test_bad_setting(pair, tmp_path):
    assert "record.dtype" in error_of([*pair, "--dtype", "f4"], tmp_path)


def test_one_token_outputs(pair, tmp_path, monkeypatch):
    """A prompt that the target answers with a stop token at once has no positions."""
    model = tiny_model("olmo2", seed=1)
    first = int(model(torch.tensor([[10, 11, 12, 13, 3]])).logits[0, -1].argmax())
    monkeypatch.setattr(recording, "stop_tokens", lambda *_: frozenset({first}))
    out = tmp_path / "a.safetensors"
    assert run(pair, out).exit_code == 0
    trace = load(out)
    assert trace.positions(0) == slice(0, 0)
    assert trace.header.requests[0].finish_reason == "stop"


def test_help_and_version_need_no_models():
    code = (
        "import sys; from gpu_backend.cli import app; "
        "app(['record', '--help'], standalone_mode=False); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert b"--target" in done.stdout
    result = CliRunner().invoke(app, ["--version"])
    assert result.output.strip() == package_version()
