"""Shapes read from config.json: the catalogue's models as their publishers describe them."""

import json

import pytest

from echo_policies.errors import InputError
from simulator.cost.catalogue import PAIRS, find_pair
from simulator.cost.hf_config import read_hf_config, read_pair
from simulator.cost.models import Experts

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA_3 = LLAMA | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "layer_types": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN_2 = {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 151936}


def shape(layers, hidden, heads, ffn):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }


TARGETS = {
    "vicuna-13b": LLAMA | shape(40, 5120, 40, 13824) | {"vocab_size": 32000},
    "llama-3.1-8b": LLAMA_3 | shape(32, 4096, 32, 14336),
    "llama-3.3-70b": LLAMA_3 | shape(80, 8192, 64, 28672),
    "qwen3-8b": QWEN_3 | shape(36, 4096, 32, 12288),
    "qwen3-32b": QWEN_3 | shape(64, 5120, 64, 25600),
    "qwen3-235b": QWEN_3
    | shape(94, 4096, 64, 12288)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen2.5-coder-1.5b": QWEN_2 | shape(28, 1536, 12, 8960) | {"num_key_value_heads": 2},
}
HEADS = {
    "llama-3.1-8b": LLAMA_3
    | shape(1, 4096, 32, 14336)
    | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
    "llama-3.3-70b": LLAMA_3
    | shape(1, 6144, 48, 16384)
    | {"draft_vocab_size": 32000, "target_hidden_size": 8192},
    "qwen3-235b": LLAMA
    | shape(1, 4096, 64, 24576)
    | {"head_dim": 128, "num_key_value_heads": 4, "vocab_size": 151936, "draft_vocab_size": 32000}
    | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}},
    "vicuna-13b": LLAMA
    | shape(1, 5120, 40, 13824)
    | {"vocab_size": 32000, "draft_vocab_size": None},
}


@pytest.fixture
def written(tmp_path):
    def write(config, folder="model"):
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        text = config if isinstance(config, str) else json.dumps(config)
        (path / "config.json").write_text(text)
        return path / "config.json"

    return write


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_of_the_catalogue(name, written):
    assert read_hf_config(written(TARGETS[name]), name) == find_pair(name).target


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_the_catalogue(name, written):
    head = read_hf_config(written(HEADS[name]))
    known = find_pair(name).draft
    for field in ("target_hidden", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim"):
        assert getattr(head, field) == getattr(known, field)


def test_a_head_of_the_speculators_layout(written):
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": HEADS["qwen3-235b"] | {"draft_vocab_size": None},
        "draft_vocab_size": 32000,
    }
    head = read_hf_config(written(config), "x")
    assert (head.hidden, head.heads, head.ffn, head.vocab) == (4096, 64, 24576, 32000)


def test_smollm2_and_mixtral(written):
    small = read_hf_config(
        written(
            LLAMA
            | shape(30, 576, 9, 1536)
            | {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
        )
    )
    assert small.parameters == pytest.approx(134.5e6, rel=1e-3)
    mixtral = read_hf_config(
        written(
            {"model_type": "mixtral", "num_key_value_heads": 8, "vocab_size": 32000}
            | shape(32, 4096, 32, 14336)
            | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
        )
    )
    assert mixtral.experts == Experts(count=8, per_token=2, ffn=14336)
    assert mixtral.parameters == pytest.approx(46.7e9, rel=1e-3)


def test_a_shared_expert_counts_as_experts_always_chosen(written):
    config = QWEN_2 | shape(24, 2048, 16, 5632)
    config |= {"model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4}
    config |= {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    config |= {"tie_word_embeddings": False}
    model = read_hf_config(written(config))
    assert model.experts == Experts(count=64, per_token=8, ffn=1408)
    assert model.parameters == pytest.approx(14.3e9, rel=0.01)  # Qwen1.5-MoE-A2.7B's card


def test_an_unknown_architecture_with_the_keys_is_taken(written):
    config = {"model_type": "newest", "vocab_size": 1000} | shape(2, 64, 4, 128)
    path = written(config, "newest-1b")
    model = read_hf_config(path.parent)
    assert (model.name, model.kv_heads, model.head_dim) == ("newest-1b", 4, 16)
    assert not model.has_tied_head


def test_gemma_ties_its_head_and_qk_norm_is_seen(written):
    config = {"model_type": "gemma3_text", "vocab_size": 1000} | shape(2, 64, 4, 128)
    model = read_hf_config(written({"model_type": "gemma3", "text_config": config}))
    assert model.has_tied_head
    assert model.has_qk_norm


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_key_is_named(key, written):
    config = {k: v for k, v in TARGETS["llama-3.1-8b"].items() if k != key}
    with pytest.raises(InputError, match=f"config.json must have the key '{key}'; it has not"):
        read_hf_config(written(config))


@pytest.mark.parametrize("key", ["num_experts_per_tok", "intermediate_size"])
def test_a_missing_key_of_experts_is_named(key, written):
    config = {k: v for k, v in TARGETS["qwen3-235b"].items() if k != "moe_intermediate_size"}
    del config[key]
    with pytest.raises(InputError, match=f"the key '{key}'"):
        read_hf_config(written(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size must be a whole number above 0; got '4096'"),
        ({"hidden_size": -1}, "hidden_size must be a whole number above 0; got -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 7}, "num_key_value_heads must divide the 32"),
        ({"hidden_size": 4097}, "must have the key 'head_dim', because hidden_size 4097"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention"]}, "layers of type 'linear_attention'"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "must not exceed the 4 of num_experts"),
        ({"num_experts": 4, "decoder_sparse_step": 2}, "dense layers among sparse"),
        ({"num_experts": 4, "decoder_sparse_step": [1]}, "dense layers among sparse"),
        ({"num_experts": 4, "mlp_only_layers": [0]}, "dense layers among sparse"),
        (
            {"draft_vocab_size": 0, "num_hidden_layers": 1},
            "draft_vocab_size must be a whole number above 0; got 0",
        ),
        ({"draft_vocab_size": 9, "num_hidden_layers": 2}, "more than one draft layer"),
        (
            {"draft_vocab_size": 9, "num_hidden_layers": 1}
            | {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            "2 auxiliary hidden states",
        ),
    ],
)
def test_what_cannot_be_costed_is_refused(change, message, written):
    with pytest.raises(InputError, match=message):
        read_hf_config(written(TARGETS["llama-3.1-8b"] | change))


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_what_is_no_config_is_refused(text, written):
    with pytest.raises(InputError, match=r"config.json must"):
        read_hf_config(written(text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        read_hf_config(tmp_path / "nowhere")


def test_a_pair(written):
    target, head = written(TARGETS["llama-3.1-8b"], "a"), written(HEADS["llama-3.1-8b"], "b")
    pair = read_pair(target, head)
    assert pair.target.kv_bytes_per_token == PAIRS["llama-3.1-8b"].target.kv_bytes_per_token
    with pytest.raises(InputError, match="hidden states of width 4096; it takes 8192"):
        read_pair(target, written(HEADS["llama-3.3-70b"], "c"))
    with pytest.raises(InputError, match="must describe a whole model"):
        read_pair(head, head)
