"""Tiny random models, their tokenizer and prompts: everything a recording needs, no download."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 97
STOP = 1
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w003"


def word(i):
    """Text of a token; of one length, so that no word is the beginning of another."""
    return f"w{i:03d}"


def tiny_model(kind="qwen2", seed=0, vocab=VOCAB, limit=256, **changes):
    """Two layers, grouped queries; weights large enough that distributions are far from uniform."""
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "olmo2": (Olmo2Config, Olmo2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    }[kind]
    if kind.startswith("qwen3"):
        changes = {"head_dim": 12, **changes}  # unlike hidden_size / heads
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        changes = {**experts, **changes}
    config = config_class(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=limit,
        bos_token_id=0,
        eos_token_id=STOP,
        pad_token_id=0,
        **{"num_hidden_layers": 2, **changes},
    )
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return model


def tiny_tokenizer(vocab=VOCAB, swap=False, padding=0):
    """Words ``w000 ..``, one per id; ``swap`` exchanges two of them, ``padding`` adds filler."""
    words = {word(i): i for i in range(vocab)}
    if swap:
        words[word(5)], words[word(6)] = 6, 5
    words |= {f"[PAD{vocab + i}]": vocab + i for i in range(padding)}
    backend = Tokenizer(models.WordLevel(words, unk_token=word(2)))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=word(STOP),
        unk_token=word(2),
        chat_template=CHAT_TEMPLATE,
    )


def disturb(model, noise):
    """Shift every weight a little, for a draft that agrees with its target most of the time."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            shift = torch.randn(parameter.shape, generator=generator)
            parameter.add_(shift * noise * parameter.std())
    return model


def save_model(folder: Path, seed: int, tokenizer=None, noise=0.0, **changes) -> Path:
    """A model directory as transformers writes it.

    OLMo 2, because transformers reads the tokenizer of the others by a class of its own.
    """
    disturb(tiny_model("olmo2", seed=seed, **changes), noise).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int, first: int = 10) -> Path:
    lines = [
        {"question_id": i, "turns": [" ".join(word(first + i + j) for j in range(4 + i))]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
