"""Loading models and tokenizers, and what is refused."""

import struct

import pytest
import torch

from echo_policies.errors import InputError, MissingExtraError
from gpu_backend import models
from gpu_backend.gguf_header import read_general
from gpu_backend.half_products import WideLinear
from tests.gpu_backend.tiny import VOCAB, save_model, tiny_tokenizer


def test_directory(tmp_path):
    folder = save_model(tmp_path / "m", seed=1)
    info = models.describe_model(folder, "float32")
    assert (info.name, info.dtype, info.weights) == ("m", "float32", "safetensors")
    assert len(info.digest) == 64
    model = models.load_model(folder, "float32")
    assert not model.training
    assert models.context_limit(model) == 256
    assert models.real_vocab_size(models.load_tokenizer(folder)) == VOCAB


def test_layers_are_widened_by_the_device_that_they_are_for(tmp_path, monkeypatch):
    """Kind: float32 products on a GPU whose host's CPU has no half-precision instructions."""
    monkeypatch.setattr(models, "needs_widening", lambda _, device: device.type == "cpu")
    folder = save_model(tmp_path / "m", seed=1)

    def has_wide_layers(device):
        model = models.load_model(folder, "bfloat16", torch.device(device))
        assert model.device.type == device
        return any(isinstance(module, WideLinear) for module in model.modules())

    assert has_wide_layers("cpu")
    assert not has_wide_layers("meta")


@pytest.mark.parametrize("load", [models.load_model, models.describe_model])
def test_paths_that_hold_no_model(tmp_path, load):
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        load(tmp_path / "nowhere", "float32")
    with pytest.raises(InputError, match=r"holds no config\.json"):
        load(tmp_path, "float32")
    wrong = tmp_path / "m.bin"
    wrong.touch()
    with pytest.raises(InputError, match=r"must be a directory or a \.gguf file"):
        load(wrong, "float32")


def test_broken_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML")
    with pytest.raises(InputError, match="must start with 'GGUF'"):
        models.describe_model(path, "float32")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 5))
    with pytest.raises(InputError, match="cut short or damaged"):
        models.describe_model(path, "float32")


def test_gguf_header(tmp_path):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    path = tmp_path / "m.gguf"
    path.write_bytes(
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 3)
        + text("general.name")
        + struct.pack("<I", 8)
        + text("tiny")
        + text("general.file_type")
        + struct.pack("<II", 4, 15)
        + text("tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, 0)
    )
    assert read_general(path) == {"general.name": "tiny", "general.file_type": 15}
    info = models.describe_model(path, "float32")
    assert (info.name, info.weights) == ("tiny", "GGUF Q4_K_M, dequantised")


def test_missing_extra(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "m", seed=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[models\]"):
        models.load_model(folder, "float32")


def test_padding_is_no_part_of_the_vocabulary():
    padded = tiny_tokenizer(padding=7)
    assert len(padded) == VOCAB + 7
    assert models.real_vocab_size(padded) == VOCAB
    assert models.tokenizer_fingerprint(padded) == models.tokenizer_fingerprint(tiny_tokenizer())
    models.require_same_tokens(padded, tiny_tokenizer())


@pytest.mark.parametrize("other", [{"swap": True}, {"vocab": VOCAB - 1}, {"vocab": VOCAB + 1}])
def test_other_vocabulary_is_refused(other):
    """Sizes alone do not tell: two tokens that changed places are found too."""
    draft = tiny_tokenizer(**other)
    assert models.tokenizer_fingerprint(draft) != models.tokenizer_fingerprint(tiny_tokenizer())
    with pytest.raises(InputError, match="must share one vocabulary; token"):
        models.require_same_tokens(tiny_tokenizer(), draft)
