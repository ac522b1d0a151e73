"""Both layouts load to the same head; whatever does not fit is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_policies.errors import InputError
from gpu_backend.eagle3.head_files import is_head_folder
from gpu_backend.eagle3.loading import load_head
from gpu_backend.eagle3.writing import save_head
from gpu_backend.models import tokenizer_fingerprint
from tests.gpu_backend.eagle3.heads import (
    DRAFTED,
    LAYERS,
    head_config,
    tiny_head,
    tiny_target,
    whole_pass,
)
from tests.gpu_backend.tiny import VOCAB, save_model, tiny_tokenizer

LAYOUTS = ("original", "speculators")
TOKENS = [5, 17, 90, 3, 41]
# Numerically odd on purpose: a lost flag or key must show.
RICH = {
    "attention_bias": True,
    "mlp_bias": True,
    "fc_bias": True,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_residual": True,
    "hidden_act": "gelu",
    "rms_norm_eps": 3e-3,
    "taps": (1, 3, 4, 7),
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
SPECULATORS_ONLY = {"qk_norm": True, "norm_before_fc": True, "norm_output": True, "taps": (0, 2)}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def says(head):
    """Logits and fed states of a few rows, from features as numbers."""
    width = len(head.config.taps) * head.config.target_hidden_size
    some = torch.randn(len(TOKENS), width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return whole_pass(head, TOKENS, head.fuse(some))


def saved(tmp_path, head=None, layout="original", name="head", **options):
    folder = tmp_path / name
    options = {"target_num_layers": LAYERS, "with_embedding": True, **options}
    save_head(head or tiny_head(), folder, layout, **options)
    return folder


def loaded(folder, target, **options):
    return load_head(folder, target, vocab_size=VOCAB, **options)


def edit(folder, change):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, RICH, {"norm_before_residual": True}], ids=str)
def test_a_saved_head_loads_to_the_same_numbers(tmp_path, target, layout, changes):
    head = tiny_head(head_config(**changes))
    found = loaded(saved(tmp_path, head, layout), target).head
    assert found.config == head.config
    for ours, theirs in zip(says(found), says(head), strict=True):
        assert torch.equal(ours, theirs)
    assert found.token_ids.tolist() == DRAFTED


def test_what_only_the_speculators_layout_can_say(tmp_path, target):
    head = tiny_head(head_config(**SPECULATORS_ONLY))
    found = loaded(saved(tmp_path, head, "speculators"), target).head
    assert all(map(torch.equal, says(found), says(head)))
    for changes, said in [
        ({"qk_norm": True}, "no norms of queries"),
        ({"norm_output": True}, "counts only beside fc_norm"),
        ({"taps": (0, 2, 5)}, "the embedding's output cannot be one"),
    ]:
        with pytest.raises(InputError, match=said):
            saved(tmp_path, tiny_head(head_config(**changes)), name="other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_in_the_file_is_the_targets(tmp_path, target, layout):
    config = head_config(shares_target_head=True)
    folder = saved(tmp_path, tiny_head(config), layout, with_embedding=False)
    found = loaded(folder, target)
    assert found.head.embed_tokens.weight is target.get_input_embeddings().weight
    assert torch.equal(found.head.lm_head.weight, target.lm_head.weight[DRAFTED])
    assert "the target's embedding and output layer" in found.summary


def test_a_head_for_the_whole_vocabulary_needs_neither_map_nor_output_layer(tmp_path, target):
    folder = saved(tmp_path, tiny_head(head_config(draft_vocab_size=VOCAB)))
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    edit(folder, lambda config: config.pop("draft_vocab_size"))
    found = loaded(folder, target).head
    assert torch.equal(found.lm_head.weight, target.lm_head.weight)
    assert found.token_ids.tolist() == list(range(VOCAB))


def test_tokens_beyond_the_real_vocabulary_are_never_proposed(tmp_path):
    """Kind: padding of a vocabulary taken for tokens."""
    head = tiny_head()
    folder = saved(tmp_path, head)
    found = load_head(folder, tiny_target(), vocab_size=VOCAB - 10).head
    assert found.token_ids.tolist() == [i for i in DRAFTED if i < VOCAB - 10]
    count = len(found.token_ids)
    torch.testing.assert_close(says(found)[1], says(head)[1][:, :count])


def test_the_line_says_what_was_understood(tmp_path, target):
    folder = saved(tmp_path, tiny_head(head_config(**RICH)))
    assert loaded(folder, target).summary == (
        "EAGLE-3, original layout; inputs of layers 1, 3, 4, 7 of 8; rope theta 500, llama3 factor "
        "8.0 low_freq_factor 1.0 high_freq_factor 4.0 original_max_position_embeddings 64; norms: "
        "norm_before_residual, fc_norm, norm_output; 78 of 97 tokens"
    )


def test_other_spellings_of_names(tmp_path, target):
    """Prefix, d2t's long name, what trainers leave behind, and pickled weights."""
    head = tiny_head()
    folder = saved(tmp_path, head)
    tensors = {f"model.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    tensors["model.draft_id_to_target_id"] = tensors.pop("model.d2t")
    tensors["verifier_lm_head.weight"] = torch.zeros(3)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert all(map(torch.equal, says(loaded(folder, target).head), says(head)))


def test_pickled_code_is_not_run(tmp_path, target):
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": tiny_head()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="must hold tensors only"):
        loaded(folder, target)


TENSORS = sorted(load for load in [
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
])  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("good"))


def copied(good, tmp_path):
    return shutil.copytree(good, tmp_path / "head")


def test_the_list_of_tensors_is_complete(good):
    names = set(load_file(good / "model.safetensors"))
    assert names == {*TENSORS, "embed_tokens.weight", "t2d"}


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor_is_named(good, tmp_path, target, name):
    folder = copied(good, tmp_path)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(InputError, match=name.removeprefix("midlayer.")) as said:
        loaded(folder, target)
    assert "missing" in str(said.value)


@pytest.mark.parametrize("name", [*TENSORS, "embed_tokens.weight", "t2d"])
def test_another_shape_is_named(good, tmp_path, target, name):
    folder = copied(good, tmp_path)

    def grow(tensors):
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    rewrite(folder, grow)
    with pytest.raises(InputError, match=name.removeprefix("midlayer.")):
        loaded(folder, target)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mask_hidden", "mask_hidden is one"),
        ("midlayer.self_attn.q_proj.bias", "q_proj.bias is one"),
        ("midlayer.self_attn.q_norm.weight", "q_norm.weight is one"),
        ("input_norm.weight", "input_norm.weight is one"),
        ("fc_norm.0.weight", "fc_norm.0.weight is one"),
        ("fc.bias", "fc.bias is one"),
        ("layers.1.mlp.up_proj.weight", "one decoder layer"),
        ("layers.0.hidden_norm.weight", "under two names"),
    ],
)
def test_a_surplus_tensor_is_named(good, tmp_path, target, name, said):
    folder = copied(good, tmp_path)
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(InputError, match=said):
        loaded(folder, target)


def shift_map(tensors):
    tensors["d2t"] = tensors["d2t"] + 50


def swap_map(tensors):
    ids = tensors["d2t"] + torch.arange(len(DRAFTED))
    ids[[3, 4]] = ids[[4, 3]]
    tensors["d2t"] = ids - torch.arange(len(DRAFTED))


def other_tokens(tensors):
    tensors["t2d"] = tensors["t2d"].roll(1)


def ids_instead_of_offsets(tensors):
    """Kind: offsets mistaken for ids by whoever wrote the file."""
    tensors["d2t"] = torch.tensor(DRAFTED)


def map_of_fractions(tensors):
    tensors["d2t"] = tensors["d2t"].float()


def whole_number_weights(tensors):
    tensors["norm.weight"] = torch.ones(32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (shift_map, "below 97"),
        (swap_map, "ascending order"),
        (other_tokens, "t2d and d2t must name the same tokens"),
        (ids_instead_of_offsets, "below 97"),
        (map_of_fractions, "78 whole numbers"),
        (whole_number_weights, "norm.weight must be a floating-point tensor"),
    ],
)
def test_faulty_maps_and_kinds(good, tmp_path, target, fault, said):
    folder = copied(good, tmp_path)
    rewrite(folder, fault)
    with pytest.raises(InputError, match=said):
        loaded(folder, target)


KEYS = [
    ("hidden_size", 36, "target_hidden_size is 36"),
    ("intermediate_size", 41, "mlp"),
    ("num_attention_heads", 8, "q_proj"),
    ("num_attention_heads", 0, "positive whole number"),
    ("num_attention_heads", 3, "must divide"),
    ("num_key_value_heads", 4, "k_proj"),
    ("head_dim", None, "proj"),  # the default is another one
    ("head_dim", 13, "even"),
    ("num_hidden_layers", 2, "num_hidden_layers must be 1"),
    ("rms_norm_eps", None, "rms_norm_eps"),
    ("rms_norm_eps", "small", "positive number"),
    ("hidden_act", "smooth", "hidden_act"),
    ("vocab_size", 98, "vocab_size is 98"),
    ("draft_vocab_size", 77, "shape"),
    ("draft_vocab_size", 98, "at most vocab_size"),
    ("draft_vocab_size", None, "lm_head.weight"),
    ("target_hidden_size", 64, "target_hidden_size is 64"),
    ("attention_bias", True, "bias is missing"),
    ("mlp_bias", True, "bias is missing"),
    ("bias", True, "fc.bias is missing"),
    ("bias", 1, "true or false"),
    ("norm_before_fc", True, "input_norm.weight is missing"),
    ("fc_norm", True, "fc_norm.0.weight is missing"),
    ("num_aux_hidden_states", 2, "the number of features"),
    ("model_type", "gpt2", "model_type"),
    ("sliding_window", 128, "sliding_window"),
    ("layer_types", ["sliding_attention"], "layer_types"),
    ("rope_theta", -1, "rope_theta"),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "of a kind in"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}, "said once"),
    ("eagle_aux_hidden_state_layer_ids", [2, 4, 5], "must stand in eagle_config"),
    ("eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state"),
    ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "layers of the target"),
    ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3]}, "number of features"),
    ("eagle_config", {"eagle_aux_hidden_state_layer_ids": "1"}, "list of whole numbers"),
    ("target_num_hidden_layers", 9, "target_num_hidden_layers is 9"),
    ("lm_head", "target", "lm_head.weight is one"),
    ("lm_head", "own", "lm_head must be 'target'"),
    ("speculators_model_type", "eagle", "speculators_model_type"),
    ("speculators_model_type", "eagle3", "transformer_layer_config"),
]


@pytest.mark.parametrize("change", KEYS, ids=str)
def test_a_changed_key_is_refused_in_one_sentence(good, tmp_path, target, change):
    key, value, said = change
    folder = copied(good, tmp_path)
    edit(folder, lambda config: config.update({key: value}))
    with pytest.raises(InputError, match=said) as error:
        loaded(folder, target)
    assert "\n" not in str(error.value)


NUMBERS = [
    ("rms_norm_eps", 0.5),
    ("hidden_act", "relu"),
    ("norm_before_residual", True),
    ("rope_theta", 3.0),
    ("rope_scaling", {"rope_type": "linear", "factor": 4.0}),
]


@pytest.mark.parametrize(("key", "value"), NUMBERS)
def test_a_changed_key_changes_the_numbers(good, tmp_path, target, key, value):
    folder = copied(good, tmp_path)
    edit(folder, lambda config: config.update({key: value}))
    assert not torch.allclose(says(loaded(folder, target).head)[1], says(tiny_head())[1])


def test_rope_defaults_to_ten_thousand_whatever_the_target_has(tmp_path, good):
    """Kind: a head that inherits the target's base frequency."""
    folder = copied(good, tmp_path)
    edit(folder, lambda config: config.pop("rope_theta"))
    theirs = tiny_target(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    head = loaded(folder, theirs).head
    assert head.config.rope_parameters["rope_theta"] == 10000.0
    assert all(map(torch.equal, says(head), says(tiny_head())))


@pytest.mark.parametrize("nested", [True, False])
def test_rope_parameters_of_new_configurations(tmp_path, target, nested):
    folder = saved(tmp_path, layout="speculators")
    rope = {"rope_type": "default", "rope_theta": 77.0}

    def change(config):
        layer = config["transformer_layer_config"]
        layer["rope_parameters"] = {"full_attention": rope} if nested else rope

    edit(folder, change)
    assert loaded(folder, target).head.config.rope_parameters["rope_theta"] == 77.0


def test_positions_of_the_configuration_are_ignored(good, tmp_path, target):
    """Kind: the length that training used, taken for a limit."""
    folder = copied(good, tmp_path)
    edit(folder, lambda config: config.update(max_position_embeddings=4))
    assert all(map(torch.equal, says(loaded(folder, target).head), says(tiny_head())))


def test_layer_ids_of_the_two_conventions(tmp_path, target):
    """Kind: off by one between outputs and inputs of layers."""
    ids = "eagle_aux_hidden_state_layer_ids"
    one = saved(tmp_path, name="one")
    other = saved(tmp_path, layout="speculators", name="other")
    for folder in (one, other):
        assert loaded(folder, target).head.config.taps == (2, 4, 5)
    edit(one, lambda config: config["eagle_config"].update({ids: [0, 2, 5]}))
    edit(other, lambda config: config.update({ids: [0, 2, 5]}))
    assert loaded(one, target).head.config.taps == (1, 3, 6)
    assert loaded(other, target).head.config.taps == (0, 2, 5)
    edit(one, lambda config: config["eagle_config"].pop(ids))
    edit(other, lambda config: config.pop(ids))
    for folder in (one, other):
        assert loaded(folder, target).head.config.taps == (2, 4, 5)
    shallow = tiny_target(num_hidden_layers=6)
    edit(one, lambda config: config.pop("target_num_hidden_layers"))
    with pytest.raises(InputError, match="for a target of 6 layers"):
        loaded(one, shallow)
    edit(one, lambda config: config["eagle_config"].update({ids: [1, 2, 2]}))
    assert loaded(one, shallow).head.config.taps == (2, 3, 3)


def test_norm_output_of_another_trainer_is_not_eagle_3_1s(tmp_path, target):
    """Kind: one name, two meanings."""
    one = saved(tmp_path, name="one")
    other = saved(tmp_path, layout="speculators", name="other")
    for folder in (one, other):
        edit(folder, lambda config: config.update(norm_output=True))
    assert not loaded(one, target).head.config.norm_output
    assert loaded(other, target).head.config.norm_output


def test_a_head_of_another_width_brings_its_embedding(tmp_path, target):
    head = tiny_head(head_config(hidden_size=24))
    folder = saved(tmp_path, head)
    assert all(map(torch.equal, says(loaded(folder, target).head), says(head)))
    rewrite(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    with pytest.raises(InputError, match="24 wide, the target 32"):
        loaded(folder, target)
    with pytest.raises(InputError, match="with_embedding=True"):
        saved(tmp_path, head, name="bare", with_embedding=False)


def test_another_tokenizer_is_refused(tmp_path, target):
    own, other = tiny_tokenizer(), tiny_tokenizer(swap=True)
    marked = saved(tmp_path, metadata={"tokenizer_sha256": tokenizer_fingerprint(own)})
    loaded(marked, target, tokenizer=own)
    with pytest.raises(InputError, match="trained with the target's tokenizer"):
        loaded(marked, target, tokenizer=other)
    with_file = saved(tmp_path, name="file")
    own.save_pretrained(with_file)
    loaded(with_file, target, tokenizer=own)
    with pytest.raises(InputError, match="token 5"):
        loaded(with_file, target, tokenizer=other)


def test_which_folders_are_heads(tmp_path, good):
    assert is_head_folder(good)
    assert is_head_folder(saved(tmp_path, layout="speculators"))
    bare = saved(tmp_path, name="bare")
    edit(bare, lambda config: config.pop("draft_vocab_size"))
    assert is_head_folder(bare)
    assert not is_head_folder(save_model(tmp_path / "model", seed=1))
    assert not is_head_folder(tmp_path)
    assert not is_head_folder(tmp_path / "absent")


def test_unreadable_files(good, tmp_path, target):
    folder = copied(good, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InputError, match="cannot be read"):
        loaded(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="it has neither"):
        loaded(folder, target)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="JSON object"):
        loaded(folder, target)


def test_nothing_is_overwritten_and_nothing_half_written(good, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="exists already"):
        save_head(tiny_head(), good, target_num_layers=LAYERS)

    def fails(*args, **options):
        raise OSError("full")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="full"):
        saved(tmp_path)
    assert list(tmp_path.iterdir()) == []
