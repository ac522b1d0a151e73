"""``run_gpu`` on what it cannot use: one sentence, exit status 2, no traceback, nothing written."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from gpu_backend import kv_pool, serve_prepare
from gpu_backend.cli import app
from tests.gpu_backend.gguf_files import write_gguf
from tests.gpu_backend.tiny import save_model, tiny_tokenizer, write_prompts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder with a target, a draft and prompts."""
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder / "target", seed=1)
    save_model(folder / "draft", seed=2)
    write_prompts(folder / "one.jsonl", 3)
    return folder


@pytest.fixture
def given(whole, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(whole, tmp_path / "given")


def run(folder, *arguments):
    files = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    small = ["--prompts", str(folder / "one.jsonl"), "--max-new-tokens", "5", "--k-max", "8"]
    out = ["--json", str(folder / "out.json")]
    policy = ["--policy", "chain:levels=2", "--batch-size", "2"]
    return CliRunner().invoke(app, [*files, *small, *out, *policy, *arguments])


def sentence(folder, *arguments):
    """What is printed, which must be all there is."""
    result = run(folder, *arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert not (folder / "out.json").exists()
    return lines[0]


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_no_such_model(given):
    assert "gone does not exist" in sentence(given, "--target", str(given / "gone"))
    assert "No model or path named 'qwen9-1b'" in sentence(given, "--target", "qwen9-1b")
    assert "No model or path named 'qwen9-1b'" in sentence(given, "--draft", "qwen9-1b")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_corrupt_weights(given, role):
    path = given / role / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    assert "the weights cannot be read" in sentence(given)


def test_configuration_without_a_key(given):
    edit(
        given / "target" / "config.json",
        lambda config: {k: v for k, v in config.items() if k != "num_attention_heads"},
    )
    assert "config.json must have the key 'num_attention_heads'; it lacks it." in sentence(given)


def test_gguf_of_an_unknown_architecture(given):
    path = write_gguf(given / "m.gguf", architecture="qwen9", weights=False)
    assert "it does not read 'qwen9'" in sentence(given, "--target", str(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "line 3: a prompt must be a JSON object with a list of texts 'turns'"),
        ('{"question_id": 9}', "line 3: a prompt must be"),
        ('{"turns": ["w010"], "stop": ["x"]}', "line 3: a prompt cannot ask for 'stop'"),
        ('{"turns": ["w010"], "response_format": {}}', "cannot ask for 'response_format'"),
    ],
)
def test_broken_line_of_prompts(given, line, said):
    path = given / "one.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    assert said in sentence(given)


def test_columns_of_data_sets_are_no_request(given):
    line = {"turns": ["w010"], "category": "math", "reference": []}
    (given / "one.jsonl").write_text(json.dumps(line))
    assert run(given).exit_code == 0


@pytest.mark.parametrize("role", ["target", "draft"])
def test_prompt_longer_than_a_model(given, role):
    save_model(given / "short", seed=1, limit=8)
    said = sentence(given, f"--{role}", str(given / "short"))
    assert f"{role}: prompt and output must fit in 8 positions; one question 0 needs 10" in said


def test_tokenizers_that_differ(given):
    save_model(given / "other", seed=2, tokenizer=tiny_tokenizer(swap=True))
    assert "must share one vocabulary; token 5" in sentence(given, "--draft", str(given / "other"))


def no_memory(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")


def no_host_memory(*args, **options):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] . can't allocate memory: you tried 9")


@pytest.mark.parametrize("place", ["load", "move", "pool", "forward"])
def test_memory_that_runs_out(given, place, monkeypatch):
    """Kind: an allocation that fails elsewhere than in reading the weights ends in a traceback."""
    if place == "load":
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", no_memory)
        assert "does not fit into this machine's memory; its weights" in sentence(given)
        return
    owner, name = {
        "move": (torch.nn.Module, "to"),
        "pool": (kv_pool.KvPool, "of"),
        "forward": (kv_pool.KvPool, "write"),
    }[place]
    monkeypatch.setattr(owner, name, no_memory if place == "move" else no_host_memory)
    assert "Memory must hold weights, keys and values, and one forward" in sentence(given)


def test_a_bug_is_not_called_bad_input(given, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(serve_prepare, "make_workload", fails)
    assert isinstance(run(given).exception, RuntimeError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(given):
    assert "device: cuda needs a CUDA device" in sentence(given, "--device", "cuda")


@pytest.mark.parametrize("name", ["fa3", "flashinfer", "fa2"])
def test_attention_that_needs_a_gpu(given, name):
    """It is refused before a model is looked for."""
    asked = ["--attention", name, "--device", "cpu", "--dtype", "bfloat16"]
    said = sentence(given, *asked, "--target", str(given / "gone"))
    assert f"attention: {name} needs a CUDA device; the model runs on cpu. Use --atte" in said


def test_attention_that_does_not_exist(given):
    said = sentence(given, "--attention", "fa9")
    assert "attention: Input should be 'auto', 'torch', 'fa3', 'flashinfer' or 'fa2'" in said


@pytest.mark.parametrize(
    "option",
    ["--stop", "--grammar", "--prefix-cache", "--presence-penalty", "--prompt-logprobs", "--tp"],
)
def test_what_there_is_not_is_refused_by_name(given, option):
    """Kind: a feature that is accepted and then ignored by speculation."""
    result = run(given, option, "1")
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert option in result.output


def test_logits_that_are_no_numbers(given):
    """Kind: NaN read as a token. An overflow of float16 looks like this."""
    from safetensors.torch import load_file, save_file

    path = given / "target" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    assert "target: logits must be numbers; some are NaN in float32" in sentence(given)


def test_speculation_that_is_off_is_said(given):
    """Kind: a draft is loaded and speculation silently does nothing."""
    result = run(given, "--cap-all", "--k-max", "0")
    assert result.exit_code == 0, result.output
    assert "chain:levels=2: ! no node was verified in any step, so this is" in result.output
    assert "no node was verified" not in run(given).output
