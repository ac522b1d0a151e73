"""Tiny EAGLE-3 heads for tiny targets, and the slow truth about both."""

import torch

from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.head_config import HeadConfig, default_taps
from gpu_backend.model_preparation import prepare_model
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


@torch.inference_mode()
def features(target, text, taps):
    """[T, F]: what transformers says enters the tapped layers, taps side by side."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0] for tap in taps], dim=-1)


@torch.inference_mode()
def whole_pass(head, tokens, hidden):
    """Run pairs at positions 0, 1, ... with a dense causal mask; (fed, logits) of every row."""
    count = len(tokens)
    mask = torch.full((count, count), -torch.inf).triu_(1)[None, None]
    out = head(torch.tensor([tokens]), hidden[None], torch.arange(count)[None], attention_mask=mask)
    return out.fed[0], head.logits(out.normed[0])


def rms_norm(states, weight, eps):
    return states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(states_hTd, theta):
    """Rotary positions 0, 1, ...; the two halves of a head are the two components."""
    half = states_hTd.shape[-1] // 2
    frequency = theta ** (-torch.arange(half) / half)
    angle = torch.arange(states_hTd.shape[1])[:, None] * frequency
    one, two = states_hTd[..., :half], states_hTd[..., half:]
    return torch.cat(
        [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], dim=-1
    )


def by_hand(weights, config, tokens, hidden):
    """The forward of a head written out: (fed, logits) of pairs at positions 0, 1, ..."""
    eps, count = config.rms_norm_eps, len(tokens)

    def norm(states, name):
        return rms_norm(states, weights[f"{name}.weight"], eps)

    def heads(name, number):
        states = pair @ weights[f"self_attn.{name}.weight"].T
        return states.view(count, number, config.head_dim).transpose(0, 1)

    embedded = weights["embed_tokens.weight"][torch.tensor(tokens)]
    normed = norm(hidden, "hidden_norm")
    pair = torch.cat([norm(embedded, "input_layernorm"), normed], dim=-1)
    theta, groups = (
        config.rope_parameters["rope_theta"],
        config.num_attention_heads // config.num_key_value_heads,
    )
    query = rotated(heads("q_proj", config.num_attention_heads), theta)
    key = rotated(heads("k_proj", config.num_key_value_heads), theta)
    key, value = (
        states.repeat_interleave(groups, 0)
        for states in (key, heads("v_proj", config.num_key_value_heads))
    )
    scores = query @ key.transpose(1, 2) / config.head_dim**0.5
    scores = scores + torch.full((count, count), -torch.inf).triu(1)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
    middle = normed if config.norm_before_residual else hidden
    middle = middle + attended @ weights["self_attn.o_proj.weight"].T
    inner = norm(middle, "post_attention_layernorm")
    gate = torch.nn.functional.silu(inner @ weights["mlp.gate_proj.weight"].T)
    out = (gate * (inner @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T
    out = out + middle
    last = norm(out, "norm")
    return last if config.norm_output else out, last @ weights["lm_head.weight"].T


class SlowDraft:
    """What a head proposes after any text and any branch, everything computed anew by hand."""

    def __init__(self, head, target):
        self.config = head.config
        self.weights = {name: value.detach() for name, value in head.named_parameters()}
        self.token_ids = head.token_ids
        self.target = target
        self._fused = {}

    def fused(self, text):
        """Fused features of all positions but the last, whose token is the newest."""
        if tuple(text) not in self._fused:
            taken = features(self.target, text, self.config.taps)[:-1]
            if self.config.fc_norm:
                parts = taken.split(self.config.target_hidden_size, dim=-1)
                taken = torch.cat(
                    [
                        rms_norm(
                            part, self.weights[f"fc_norm.{i}.weight"], self.config.rms_norm_eps
                        )
                        for i, part in enumerate(parts)
                    ],
                    dim=-1,
                )
            self._fused = {tuple(text): taken @ self.weights["fc.weight"].T}
        return self._fused[tuple(text)]

    @torch.inference_mode()
    def logits(self, text, branch=()):
        """Logits over the draft vocabulary after ``text`` and the drafted tokens behind it."""
        hidden, tokens = self.fused(text), list(text[1:])
        fed, logits = by_hand(self.weights, self.config, tokens, hidden)
        for token in branch:
            hidden = torch.cat([hidden, fed[-1:]])
            tokens.append(token)
            fed, logits = by_hand(self.weights, self.config, tokens, hidden)
        return logits[-1]

    def children(self, text, branch, top_k):
        """The target's token ids and log-probabilities, by (logit descending, id ascending)."""
        logits = self.logits(text, branch)
        order = torch.argsort(logits, descending=True, stable=True)[:top_k]
        logp = torch.log_softmax(logits.double(), 0)[order]
        return self.token_ids[order].tolist(), logp.tolist()


def head_pair(head, target=None, stops=()):
    """A prepared target and a head that drafts for it."""
    target = target or tiny_target()
    prepare_model(target, VOCAB)
    return ModelPair(target, None, VOCAB, frozenset(stops), head=head)
