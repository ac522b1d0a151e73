"""Choosing the next token: noise keyed by request and position, so that nothing else matters.

A token is the argmax of the warped logits plus Gumbel noise, and the noise is a hash of (request
seed, absolute position, token id). Temperature 0 is the same rule without noise. So a request's
output does not depend on the policy, on what was drafted or on who shares the batch, and a drafted
token is accepted exactly if it is the token that plain sampling would have drawn there.

Shape letters: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from gpu_backend.scoring import ranked_top_k

# Multipliers and shifts of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit numbers.
_GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64
_MIX: Final = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT: Final = 31
_MANTISSA: Final = 52


class TokenRule(Protocol):
    """Says which token follows: drawn from the target's logits, or known from elsewhere."""

    def choose(self, logits_NV: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        """Choose one token per row, as :func:`choose` does; a token below 0 matches no draft."""
        ...


class Sampling(BaseModel):
    """How tokens are drawn from the target's distribution."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(0.0, ge=0, description="0 takes the most likely token")
    top_p: float = Field(1.0, gt=0, le=1, description="smallest set of tokens with this mass")
    top_k: int = Field(0, ge=0, description="most likely tokens drawn from; 0: all")
    repetition_penalty: float = Field(1.0, description="not supported; must be 1")

    @field_validator("repetition_penalty")
    @classmethod
    def _no_penalty(cls, penalty: float) -> float:
        if penalty != 1.0:
            raise ValueError(
                "repetition_penalty must be 1: a penalty depends on the path of every node, which "
                f"this engine does not follow; got {penalty}"
            )
        return penalty

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def choose(self, logits_NV: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        """Choose one token per row; see :func:`choose`."""
        return choose(logits_NV, seed_N, position_N, self)


def choose(logits_NV: Tensor, seed_N: Tensor, position_N: Tensor, sampling: Sampling) -> Tensor:
    """Choose one token per row.

    Args:
        logits_NV: over the real vocabulary; not modified.
        seed_N: int64, seed of each row's request.
        position_N: int64, absolute position of the token to choose.
        sampling: temperature and warpers, applied in the order temperature, top-k, top-p.

    Returns:
        int64 [N]; among equals the lowest token id.
    """
    if sampling.is_greedy:
        # argmax is documented to return the first of equal maxima.
        return logits_NV.argmax(dim=1)
    scaled_NV = logits_NV.double() / sampling.temperature
    tokens = torch.arange(scaled_NV.shape[1], device=scaled_NV.device).expand_as(scaled_NV)
    scaled = scaled_NV
    if sampling.top_k:
        # Noise and nucleus only of what can be drawn: a vocabulary is a thousand times larger.
        scaled, tokens = ranked_top_k(scaled_NV, sampling.top_k)
    elif sampling.top_p < 1:
        scaled, tokens = torch.sort(scaled_NV, dim=1, descending=True, stable=True)
    if sampling.top_p < 1:
        scaled = scaled.masked_fill(~_nucleus(scaled, sampling.top_p), -torch.inf)
    noisy = scaled + gumbel(seed_N[:, None], position_N[:, None], tokens)
    return tokens.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of int64 keys that broadcast together."""
    uniform = (_logical_shift(noise_bits(seed, position, token), 64 - _MANTISSA).double() + 0.5) * (
        2.0**-_MANTISSA
    )
    return -torch.log(-torch.log(uniform))


def noise_bits(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """64 hashed bits per key as int64; integer arithmetic, so equal on every device."""
    return _mix(_mix(_mix(seed) + position) + token)


def request_seed(run_seed: int, request: int) -> int:
    """Seed of one request of a run; the same whoever else is in the run."""
    return int(_mix(_mix(torch.tensor(run_seed)) + request))


def _mix(value: Tensor) -> Tensor:
    """One splitmix64 step; products wrap around, as torch's int64 does on every device."""
    value = value + _GAMMA
    for shift, factor in _MIX:
        value = (value ^ _logical_shift(value, shift)) * factor
    return value ^ _logical_shift(value, _LAST_SHIFT)


def _logical_shift(value: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own fills with the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _nucleus(ordered_NK: Tensor, top_p: float) -> Tensor:
    """bool [N, K]: the first tokens that together have the mass, the best one always."""
    mass_NK = torch.softmax(ordered_NK, dim=1)
    is_in = mass_NK.cumsum(dim=1) - mass_NK < top_p
    is_in[:, 0] = True
    return is_in
