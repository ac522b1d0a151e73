"""Models of a hub, from a server on this machine."""

import errno
import json
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import XetDownloadError

from echo_policies.errors import InputError, MissingExtraError
from gpu_backend import models
from gpu_backend.sources import errors, hub
from gpu_backend.sources.errors import UnreachableError
from tests.gpu_backend.fake_hub import REVISION, repository, running_hub
from tests.gpu_backend.tiny import save_model

WHOLE = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w" * 100}


@pytest.fixture
def server(monkeypatch, tmp_path):
    with running_hub(monkeypatch, tmp_path / "hub") as running:
        yield running


def ignore(*report):
    pass


def test_weights_configuration_and_tokenizer_are_fetched_once(server, tmp_path):
    server.repositories["tiny/model"] = repository(save_model(tmp_path / "m", seed=1))
    said = []
    assert hub.cached("tiny/model") is None
    folder = hub.fetch("tiny/model", lambda *report: said.append(report))
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert "README.md" not in server.fetched
    assert said[-1] == ("tiny/model", total, total)
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)
    info = models.describe_model(folder, "float32")
    assert info.weights == f"safetensors, hub revision {REVISION}"
    assert hub.cached("tiny/model") == folder
    assert hub.cached_names() == ["tiny/model"]
    before = len(server.fetched)
    assert hub.fetch("tiny/model", ignore) == folder
    assert len(server.fetched) == before


def test_shards_and_second_copies(server):
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    server.repositories["tiny/shards"] = {
        "config.json": b"{}",
        "model-1.safetensors": b"1",
        "model-2.safetensors": b"2",
        "consolidated.safetensors": b"12",
        "onnx/model.safetensors": b"12",
        "model.safetensors.index.json": index.encode(),
    }
    folder = hub.fetch("tiny/shards", ignore)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json",
    }  # fmt: skip
    (folder / "model-2.safetensors").unlink()
    assert hub.cached("tiny/shards") is None  # half a model is none


def test_gguf_file_by_name(server):
    files = {"a-q4.gguf": b"GGUFa", "b.gguf": b"GGUFb"}
    server.repositories["tiny/model-GGUF"] = files
    path = hub.fetch("tiny/model-GGUF/b.gguf", ignore)
    assert path.read_bytes() == b"GGUFb"
    assert hub.cached("tiny/model-GGUF/b.gguf") == path
    with pytest.raises(InputError, match=r"such as tiny/model-GGUF/a-q4\.gguf"):
        hub.fetch("tiny/model-GGUF", ignore)
    with pytest.raises(InputError, match=r"no file c\.gguf; its GGUF files: a-q4\.gguf, b\.gguf"):
        hub.fetch("tiny/model-GGUF/c.gguf", ignore)


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (404, "RepoNotFound", InputError, "gives no repository tiny/model"),
        (403, "GatedRepo", InputError, "gated: accept its terms"),
        (503, "", UnreachableError, "answered with status 503"),
        (418, "", InputError, "refused tiny/model with status 418"),
    ],
)
def test_answers_of_the_hub(server, status, code, kind, said):
    server.status, server.error_code = status, code
    with pytest.raises(kind, match=said) as caught:
        hub.fetch("tiny/model", ignore)
    assert type(caught.value) is kind
    assert not hub.is_reachable("tiny/model")


def test_no_network_and_offline(server, monkeypatch):
    monkeypatch.setattr(hub, "make_api", lambda: HfApi(endpoint="http://127.0.0.1:9", token=False))
    with pytest.raises(UnreachableError, match="the hub cannot be reached"):
        hub.fetch("tiny/model", ignore)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE forbids"):
        hub.fetch("tiny/model", ignore)
    assert not hub.is_reachable("tiny/model")


def test_too_little_space(server, monkeypatch):
    server.repositories["tiny/model"] = WHOLE
    monkeypatch.setattr(errors.shutil, "disk_usage", lambda _: SimpleNamespace(free=50))
    with pytest.raises(InputError, match="HF_HOME"):
        hub.fetch("tiny/model", ignore)
    assert server.fetched == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room"),
        (
            OSError("Consistency check failed\nmore"),
            r"\(Consistency check failed\): choose another",
        ),
        (XetDownloadError("x"), "broke off: give the same command again"),
    ],
)
def test_transfer_that_breaks_off(server, monkeypatch, error, said):
    def failing(*args, **options):
        raise error

    server.repositories["tiny/model"] = WHOLE
    monkeypatch.setattr(HfApi, "hf_hub_download", failing)
    with pytest.raises(InputError, match=said):
        hub.fetch("tiny/model", ignore)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert hub.cached("tiny/model") is None
    assert hub.cached_names() == []
    assert not hub.is_reachable("tiny/model")
    with pytest.raises(MissingExtraError, match=r"\[models\]"):
        hub.fetch("tiny/model", ignore)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b", ("a/b", None)),
        ("a/b/c.gguf", ("a/b", "c.gguf")),
        ("a/b/d/c.gguf", ("a/b", "d/c.gguf")),
        ("a/b/c", None),
        ("a", None),
        ("../b/c d", None),
    ],
)
def test_names(name, parts):
    assert hub.split_name(name) == parts
