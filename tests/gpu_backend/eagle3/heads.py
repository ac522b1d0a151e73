"""Tiny EAGLE-3 heads for tiny targets, and the slow truth about both."""

import dataclasses

import torch

from gpu_backend.draft_tree import prepare_draft
from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.head_config import HeadConfig, default_taps
from gpu_backend.serving import ModelPair
from tests.gpu_backend.tiny import VOCAB, tiny_model

LAYERS = 8
DRAFTED = [i for i in range(VOCAB) if i % 5 != 2]
"""Tokens that a head with a map proposes."""


def tiny_target(seed=1, **changes):
    return tiny_model("llama", seed=seed, **{"num_hidden_layers": LAYERS, **changes})


def head_config(**changes):
    """Small, and every width different from every other."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(DRAFTED),
        "target_hidden_size": 32,
        "taps": default_taps(LAYERS),
    }
    return HeadConfig(**{**sizes, **changes})


def tiny_head(config=None, seed=3, attention="sdpa"):
    """A random head whose distributions are far from uniform and from each other."""
    config = config or head_config()
    torch.manual_seed(seed)
    head = Eagle3Head(config, attention).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    if config.draft_vocab_size < config.vocab_size:
        head.token_ids = torch.tensor(DRAFTED)
    return head


def with_changes(config, **changes):
    return dataclasses.replace(config, **changes)


@torch.inference_mode()
def features(target, text, taps):
    """[T, F]: what transformers says enters the tapped layers, taps side by side."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0] for tap in taps], dim=-1)


@torch.inference_mode()
def whole_pass(head, tokens, hidden, feed=None):
    """Run pairs at positions 0, 1, ... with a dense causal mask; (fed, logits) of every row."""
    del feed
    count = len(tokens)
    mask = torch.full((count, count), -torch.inf).triu_(1)[None, None]
    out = head(torch.tensor([tokens]), hidden[None], torch.arange(count)[None], attention_mask=mask)
    return out.fed[0], head.logits(out.normed[0])


class SlowDraft:
    """What a head proposes after any text and any branch, everything computed anew."""

    def __init__(self, head, target, taps=None):
        self.head = head
        self.target = target
        self.taps = head.config.taps if taps is None else taps

    @torch.inference_mode()
    def logits(self, text, branch=()):
        """Logits over the draft vocabulary after ``text`` and the drafted tokens behind it."""
        fused = self.head.fuse(features(self.target, text, self.taps)[:-1])
        tokens = list(text[1:])
        fed, logits = whole_pass(self.head, tokens, fused)
        hidden = fused
        for token in branch:
            hidden = torch.cat([hidden, fed[-1:]])
            tokens.append(token)
            fed, logits = whole_pass(self.head, tokens, hidden)
        return logits[-1]

    def children(self, text, branch, top_k):
        """The target's token ids and log-probabilities, by (logit descending, id ascending)."""
        logits = self.logits(text, branch)
        order = torch.argsort(logits, descending=True, stable=True)[:top_k]
        logp = torch.log_softmax(logits.double(), 0)[order]
        return self.head.token_ids[order].tolist(), logp.tolist()


def head_pair(head, target=None, stops=()):
    """A prepared target and a head that drafts for it."""
    target = target or tiny_target()
    prepare_draft(target, VOCAB)
    return ModelPair(target, None, VOCAB, frozenset(stops), head=head)
