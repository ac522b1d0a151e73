"""Files that cannot be loaded, each with the sentence that says why."""

import json

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from echo_policies.errors import InputError
from gpu_backend import models
from gpu_backend.model_files import num_parameters
from tests.gpu_backend.gguf_files import TOKENS, write_gguf
from tests.gpu_backend.tiny import save_model, tiny_model


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "m", seed=1)


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def refused(path, said):
    with pytest.raises(InputError, match=said) as caught:
        models.load_model(path, "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "olmo9"}, r"transformers \S+ knows no architecture 'olmo9'"),
        ({"model_type": None}, "must have the key 'model_type'"),
        ({"hidden_size": None}, r"config\.json must have the key 'hidden_size'; it lacks it"),
        ({"vocab_size": None}, "must have the key 'vocab_size'"),
        ({"num_hidden_layers": "two"}, r"config\.json cannot be used: .*num_hidden_layers"),
    ],
)
def test_configuration(folder, changes, said):
    edit_config(folder, **changes)
    refused(folder, said)


def test_configuration_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    refused(folder, r"config\.json must be JSON: .*line 1")
    with pytest.raises(InputError, match="must be JSON"):
        models.load_tokenizer(folder)


def test_tokenizer_that_cannot_be_read(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:-50])
    with pytest.raises(InputError, match="the tokenizer cannot be read: "):
        models.load_tokenizer(folder)
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(InputError, match="the tokenizer cannot be read: "):
        models.load_tokenizer(folder)


def test_corrupt_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, r"the weights cannot be read: .* cut short or damaged; fetch it again")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "the model cannot be read: .*no file named")


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_that_are_not_all_there(folder, change):
    """Kind: gaps that transformers fills with random numbers."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, path, metadata={"format": "pt"})
    refused(folder, "weights|size mismatch")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 12"),
    ],
)
def test_memory(folder, tmp_path, monkeypatch, error):
    def failing(*args, **options):
        raise error

    count = sum(p.numel() for p in tiny_model("olmo2").parameters())
    assert num_parameters(folder) == count
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", failing)
    refused(folder, rf"does not fit .*; its weights alone take {4 * count / 1000:.1f} kB in this")
    refused(write_gguf(tmp_path / "m.gguf"), "weights alone take .* kB in this dtype: use --dtype")


def test_gguf_that_can_be_read(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    model = models.load_model(path, "float32")
    assert model.config.model_type == "qwen2"
    assert not model.training
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear"
    assert models.real_vocab_size(models.load_tokenizer(path)) == len(TOKENS)
    assert models.describe_model(path, "float32").weights == "GGUF F32, dequantised"


def test_gguf_of_an_unknown_architecture(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", architecture="qwen9", weights=False)
    refused(path, r"m\.gguf: .* it does not read 'qwen9'\. It reads .*qwen2.*safetensors")
    with pytest.raises(InputError, match="does not read 'qwen9'"):
        models.load_tokenizer(path)


def test_gguf_without_weights(tmp_path):
    refused(write_gguf(tmp_path / "m.gguf", weights=False), "must hold every weight|cannot be read")
