"""The order in which sources are asked, and what is said when none has a model."""

import pytest
from huggingface_hub import HfApi, constants

from echo_policies.errors import InputError, UnknownNameError
from gpu_backend.sources import hub, mirror
from gpu_backend.sources.errors import UnreachableError
from gpu_backend.sources.locate import LocatedModel, locate, understand
from tests.gpu_backend.wheels import CONTENT, cut_off, entry, write_wheels

ENTRIES = (entry(),)


@pytest.fixture(autouse=True)
def cut(tmp_path, monkeypatch):
    """No hub, no index, an empty cache."""
    cut_off(monkeypatch)
    monkeypatch.setenv("ECHO_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "make_api", lambda: HfApi(endpoint="http://127.0.0.1:9", token=False))


def find(text):
    return locate(understand(text, ENTRIES), lambda *report: None)


def cache(tmp_path):
    path = tmp_path / "models" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


def test_a_path_comes_first(tmp_path, monkeypatch):
    cache(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    for text in ("tiny", "local:tiny", str(tmp_path / "tiny")):
        found = find(text)
        assert (found.path.name, found.name, found.origin) == ("tiny", None, "local")
    assert find("tiny-model").origin == "cache"


@pytest.mark.parametrize("text", ["./none", "/none/x", "none.gguf", "x/none.gguf", "~/none"])
def test_paths_that_do_not_exist(text):
    with pytest.raises(InputError, match="does not exist"):
        find(text)


@pytest.mark.parametrize("text", ["tiny", "TINY-Model", "tiny/model", "Tiny/Model", "cache:tiny"])
def test_names_and_aliases_in_the_cache(tmp_path, text):
    path = cache(tmp_path)
    assert find(text) == LocatedModel(path, "Tiny/Model", "cache")


def test_cache_then_hub_then_mirror(tmp_path, monkeypatch):
    found = [tmp_path / name for name in ("cached", "hub", "mirror")]
    monkeypatch.setattr(mirror, "fetch", lambda *_: found[2])
    assert find("tiny") == LocatedModel(
        found[2], "Tiny/Model", "mirror", "the hub cannot be reached"
    )
    monkeypatch.setattr(hub, "fetch", lambda *_: found[1])
    assert find("tiny") == LocatedModel(found[1], "Tiny/Model", "hub")
    monkeypatch.setattr(hub, "cached", lambda _: found[0])
    assert find("tiny") == LocatedModel(found[0], "Tiny/Model", "cache")
    assert find("hub:tiny").origin == "hub"
    assert find("mirror:tiny").origin == "mirror"


def test_what_the_hub_refuses_is_not_sought_elsewhere(monkeypatch):
    """Kind: a fault of one source hidden by another that has other weights."""

    def refusing(*_):
        raise InputError("gated")

    monkeypatch.setattr(hub, "fetch", refusing)
    monkeypatch.setattr(mirror, "fetch", lambda *_: pytest.fail("it went on"))
    with pytest.raises(InputError, match="gated"):
        find("tiny")


def test_offline_hub_leaves_the_mirror(tmp_path, monkeypatch):
    cut_off(monkeypatch, write_wheels(tmp_path / "links"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = find("tiny")
    assert found.path.read_bytes() == CONTENT
    assert (found.origin, found.note) == ("mirror", "HF_HUB_OFFLINE forbids asking the hub")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("tiny-modl", UnknownNameError, "No model or path named 'tiny-modl'. Did you mean"),
        ("mirror:a/b", UnknownNameError, "No model of the mirror named 'a/b'"),
        ("cache:tiny", InputError, "Tiny/Model is not in the cache"),
        ("tiny", UnreachableError, "the hub cannot be reached, and the package index cannot be"),
        (
            "hub:tiny",
            UnreachableError,
            "the hub cannot be reached. Check the network, leave the pr",
        ),
        ("mirror:tiny", UnreachableError, "fetched: the package index cannot be reached"),
        ("Tiny/Modle", UnreachableError, "is no local path .* Did you mean 'Tiny/Model'?"),
    ],
)
def test_nothing_can_be_reached(tmp_path, text, kind, said):
    with pytest.raises(kind, match=said) as caught:
        find(text)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.gguf"))
