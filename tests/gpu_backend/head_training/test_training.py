"""From a target's own text to a saved head: the stages, a stop in the middle, and what is refused.

The target is tiny and random, so nothing here says how good a head gets.
"""

import dataclasses
import gc
import json
import weakref

import pytest
import torch
from typer.testing import CliRunner

from echo_policies.errors import InputError
from gpu_backend import models
from gpu_backend.cli import app
from gpu_backend.head_training import self_text
from gpu_backend.head_training.config import train_config
from gpu_backend.head_training.features import load_examples, read_features, save_examples
from gpu_backend.head_training.job import TrainJob, train_head
from gpu_backend.head_training.self_text import (
    Dialogue,
    DialogueWriter,
    load_dialogues,
    load_openings,
    save_dialogues,
)
from gpu_backend.head_training.start import frequent_tokens, head_config, new_head, taps_of
from gpu_backend.head_training.trainer import Trainer
from gpu_backend.model_preparation import prepare_model
from gpu_backend.serving import ModelPair
from tests.gpu_backend.tiny import STOP, VOCAB, save_model, tiny_model, tiny_tokenizer

CONFIG = train_config(
    conversations=12, draft_vocab=60, steps=3, epochs=3, batch_tokens=64, held_out=0.2
)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    """Most of a run's time would go into users' turns, whose length nothing here asks for."""
    openings = tuple(dataclasses.replace(o, max_tokens=6) for o in load_openings())
    monkeypatch.setattr(self_text, "load_openings", lambda: openings)


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", num_hidden_layers=7).eval()


@pytest.fixture(scope="module")
def examples(target):
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, VOCAB, (12, 30), generator=generator).tolist()
    dialogues = [Dialogue(i, tuple(text[: 12 + i]), 6) for i, text in enumerate(texts)]
    return read_features(target, taps_of(target), dialogues, lambda count: None)


def make_trainer(target, examples, checkpoint, config=CONFIG):
    torch.manual_seed(0)
    ids = frequent_tokens(examples[3:], VOCAB, config.draft_vocab)
    head = new_head(head_config(target, VOCAB, len(ids)), target, ids)
    return head, Trainer(head, config, examples[3:], examples[:3], checkpoint)


def train(trainer):
    trainer.run(lambda done, total: None, lambda epoch: None)
    return trainer.epochs


def test_loss_falls_and_shared_weights_stay(target, examples, tmp_path):
    head, trainer = make_trainer(target, examples, tmp_path / "c.pt")
    epochs = train(trainer)
    assert epochs[-1].loss < epochs[0].loss
    assert all(0 <= share <= 1 for epoch in epochs for share in epoch.acceptance)
    weight = target.get_input_embeddings().weight
    assert torch.equal(head.embed_tokens.weight, weight)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[head.token_ids])


class StopError(Exception):
    """Stands for a kill."""


def test_a_stopped_training_goes_on_as_if_nothing_had_happened(target, examples, tmp_path):
    """Kind: optimiser state, order of the data or learning rate lost in a checkpoint."""
    whole_head, whole = make_trainer(target, examples, tmp_path / "whole.pt")
    train(whole)

    def stop(epoch):
        if epoch.number == 2:
            raise StopError

    _, stopped = make_trainer(target, examples, tmp_path / "c.pt")
    with pytest.raises(StopError):
        stopped.run(lambda done, total: None, stop)
    head, resumed = make_trainer(target, examples, tmp_path / "c.pt")
    assert [epoch.number for epoch in train(resumed)] == [1, 2, 3]
    assert resumed.epochs == whole.epochs
    for ours, theirs in zip(head.parameters(), whole_head.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_examples_on_disk_are_those_in_memory(examples, tmp_path):
    save_examples(tmp_path / "e.safetensors", examples)
    loaded = load_examples(tmp_path / "e.safetensors")
    for ours, theirs in zip(loaded, examples, strict=True):
        for field in dataclasses.fields(ours):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert a == b if isinstance(a, int) else torch.equal(a, b)


@torch.no_grad()
def test_features_are_inputs_of_the_tapped_layers(target):
    """Kind: layer ids off by one."""
    seen = {}
    hooks = [
        layer.register_forward_pre_hook(lambda m, args, i=i: seen.update({i: args[0]}))
        for i, layer in enumerate(target.model.layers)
    ]
    dialogue = Dialogue(0, (5, 6, 7, 8), 2)
    (example,) = read_features(target, (2, 3, 4), [dialogue], lambda count: None)
    for hook in hooks:
        hook.remove()
    expected = torch.cat([seen[i][0] for i in (2, 3, 4)], dim=-1)
    assert torch.equal(example.features_TF, expected.bfloat16())
    logits = target(torch.tensor([[5, 6, 7, 8]])).logits[0]
    assert torch.equal(example.best_T, logits.argmax(-1))


def test_frequent_tokens_are_ascending_and_filled_up_with_low_ids(examples):
    few = [dataclasses.replace(examples[0], best_T=torch.tensor([9, 9, 7]), answer_start=0)]
    assert frequent_tokens(few, VOCAB, 1).tolist() == [9]
    assert frequent_tokens(few, VOCAB, 4).tolist() == [0, 1, 7, 9]


def write(target, numbers, max_answer=6, seed=0):
    tokenizer = tiny_tokenizer()
    pair = ModelPair(target, None, VOCAB, frozenset({STOP}))
    writer = DialogueWriter(pair, tokenizer, max_answer=max_answer, seed=seed)
    return writer.write(numbers, lambda count: None)


@pytest.fixture(scope="module")
def speaker():
    model = tiny_model("llama", num_hidden_layers=7)
    prepare_model(model, VOCAB, "target")
    return model


def test_a_dialogue_depends_on_its_number_and_the_seed_only(speaker, tmp_path):
    dialogues = write(speaker, range(5))
    assert write(speaker, [3]) == [dialogues[3]]
    assert write(speaker, [3], seed=1) != [dialogues[3]]
    for dialogue in dialogues:
        assert 1 <= len(dialogue.tokens) - dialogue.answer_start <= 6
        assert STOP not in dialogue.tokens[: dialogue.answer_start]
    save_dialogues(tmp_path / "d.jsonl", dialogues)
    assert load_dialogues(tmp_path / "d.jsonl") == dialogues


def test_openings_differ_and_leave_room():
    openings = load_openings()
    assert len(openings) > 10
    assert all(opening.max_tokens > 0 for opening in openings)


def test_a_target_without_chat_template_is_refused(speaker):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    pair = ModelPair(speaker, None, VOCAB, frozenset({STOP}))
    writer = DialogueWriter(pair, tokenizer, max_answer=4, seed=0)
    with pytest.raises(InputError, match="chat template"):
        writer.write([0], lambda count: None)


def test_a_shallow_target_is_refused():
    with pytest.raises(InputError, match="at least 7 layers; this one has 2"):
        taps_of(tiny_model("llama"))


def run(folder, out, *options):
    small = ["--conversations", "8", "--max-answer", "8", "--draft-vocab", "50", "--epochs", "1"]
    arguments = ["train-head", "--target", str(folder), "--out", str(out), *small, *options]
    return CliRunner().invoke(app, arguments)


def test_command_writes_a_head_with_its_card(tmp_path):
    folder = save_model(tmp_path / "target", 0, num_hidden_layers=7)
    result = run(folder, tmp_path / "head")
    assert result.exit_code == 0, result.output
    assert "held-out acceptance by depth" in result.stdout
    card = json.loads((tmp_path / "head" / "config.json").read_text())["metadata"]
    assert card["training"]["conversations"] == 8
    assert len(card["held_out_acceptance_by_depth"]) == 4
    assert card["tokenizer_sha256"] == models.tokenizer_fingerprint(models.load_tokenizer(folder))
    again = run(folder, tmp_path / "head")
    assert again.exit_code == 2
    assert "exists already" in again.output
    other = run(folder, tmp_path / "head", "--seed", "1", "--out", str(tmp_path / "head2"))
    assert other.exit_code == 0
    # The finished pieces of the first run are of another seed.
    (tmp_path / "head").rename(tmp_path / "old")
    refused = run(folder, tmp_path / "head", "--seed", "1")
    assert refused.exit_code == 2
    assert "another target or text" in refused.output


def test_no_target_is_held_while_the_head_learns(tmp_path, monkeypatch):
    """Kind: memory of a model that is not needed any more."""
    folder = save_model(tmp_path / "target", 0, num_hidden_layers=7)
    original, loaded, held = models.load_model, [], []

    def load_model(*arguments):
        model = original(*arguments)
        loaded.append(weakref.ref(model))
        return model

    def on_epoch(epoch):
        gc.collect()
        held.extend(target() is not None for target in loaded)

    monkeypatch.setattr(models, "load_model", load_model)
    config = train_config(conversations=4, max_answer=8, draft_vocab=50, epochs=1)
    job = TrainJob(folder, "tiny", tmp_path / "head", config)
    train_head(job, lambda stage, done, total: None, on_epoch)
    assert held == [False, False]


def test_more_conversations_add_to_a_part_that_was_not_full(tmp_path):
    """Kind: finished pieces that are taken for whole because they are there."""
    folder = save_model(tmp_path / "target", 0, num_hidden_layers=7)
    assert run(folder, tmp_path / "head").exit_code == 0
    text = tmp_path / "head.work" / "text" / "part-00000.jsonl"
    eight = text.read_text().splitlines()
    (tmp_path / "head").rename(tmp_path / "old")
    assert run(folder, tmp_path / "head", "--conversations", "11").exit_code == 0
    eleven = text.read_text().splitlines()
    assert (len(eight), len(eleven)) == (8, 11)
    assert sorted(eight) == sorted(eleven[:8])
    card = json.loads((tmp_path / "head" / "config.json").read_text())["metadata"]
    tokens = [json.loads(line) for line in eleven]
    assert card["trained_on_tokens"] == sum(len(one["tokens"]) for one in tokens[1:])
    fewer = run(folder, tmp_path / "fewer", "--conversations", "5")
    assert fewer.exit_code == 0


def test_bad_settings_are_refused_by_name(tmp_path):
    result = run(tmp_path, tmp_path / "head", "--steps", "0")
    assert result.exit_code == 2
    assert "train-head.steps: Input should be greater than or equal to 1; got 0" in result.output
