"""The head that ships: what it is without its target, and what its data card says of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_backend.eagle3.head_files import is_head_folder
from gpu_backend.head_training.config import TrainConfig
from gpu_backend.sources.bundled import bundled_heads, head_target
from gpu_backend.sources.catalogue import find, load_catalogue
from gpu_backend.sources.locate import locate, understand

NAME = "smollm2-135m-eagle3"
CARD = Path(__file__).parents[3] / "docs" / "heads.md"
MOST_BYTES = 15e6


@pytest.fixture(scope="module")
def folder():
    return bundled_heads()[NAME]


@pytest.fixture(scope="module")
def config(folder):
    return json.loads((folder / "config.json").read_text())


def test_it_is_found_by_name_without_a_fetch(folder):
    found = locate(understand(NAME, load_catalogue()), lambda *progress: pytest.fail("fetched"))
    assert (found.path, found.name, found.origin) == (folder, NAME, "bundled")
    assert is_head_folder(folder)
    assert find(load_catalogue(), head_target(folder)) is not None


def test_it_is_small_and_whole(folder, config):
    tensors = load_file(folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size < MOST_BYTES
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
    ids = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)


def test_its_card_says_how_it_was_trained_and_how_good_it_is(config):
    card, told = CARD.read_text(), config["metadata"]
    TrainConfig.model_validate(told["training"])
    for option in ("conversations", "draft_vocab", "epochs", "steps", "batch_tokens"):
        assert f"--{option.replace('_', '-')} {told['training'][option]}" in card
    shares = " / ".join(f"{share:.2f}" for share in told["held_out_acceptance_by_depth"])
    assert shares in card
    assert f"{told['trained_on_tokens']:,} tokens" in card
