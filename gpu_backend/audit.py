"""Audit of a run's outputs: the plain model must have said every token, or nearly so.

After a greedy run every output is given to the model as it comes from its library, with attention
and layers of its own, in one causal forward. Each token must be the argmax where it stands, or lie
so little below it that rounding explains the choice. That holds of an engine in any arithmetic,
where token for token equality with another run does not.

Shape letters: n output tokens, V real tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gpu_backend.serving_batch import Finished

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Margin:
    """How far below the best token's logit a token may lie and still be put down to rounding."""

    relative: float
    """Of the best logit's magnitude."""
    absolute: float
    """In logits; the wider of the two counts."""

    def allows(self, gap: float, best: float) -> bool:
        """Whether a token that lies ``gap`` below the best logit is a near-tie."""
        return gap <= max(self.relative * abs(best), self.absolute)


MARGINS: Final[Mapping[torch.dtype, Margin]] = {
    torch.bfloat16: Margin(2.0**-6, 0.05),
    # Three more bits.
    torch.float16: Margin(2.0**-9, 0.05 / 8),
    # Far above what sums of float32 in another order differ by, and far below any real choice.
    torch.float32: Margin(2.0**-16, 1e-3),
}
"""Margins by the arithmetic of the model."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that is not the plain model's argmax."""

    request: int
    place: int
    """Output tokens before it."""
    token: int
    best_token: int
    gap: float
    """Logits between the two."""
    best: float
    """Logit of the best token."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the plain model says of one run's outputs."""

    requests: int
    tokens: int
    near_ties: tuple[Choice, ...]
    """Tokens that are not the argmax, but within the margin."""
    violations: tuple[Choice, ...]
    """Tokens that the model did not say."""

    @property
    def largest_gap(self) -> float:
        """Of the near-ties, in logits; 0 where there is none."""
        return max((choice.gap for choice in self.near_ties), default=0.0)


def audit_outputs(
    model: PreTrainedModel, vocab_size: int, finished: Sequence[Finished], margin: Margin
) -> AuditReport:
    """Hold the outputs of a greedy run against the plain model.

    Args:
        model: the target as it was loaded, not prepared for serving.
        vocab_size: its real tokens; nothing else can be said.
        finished: requests that left the engine; one without output is passed over.
        margin: what counts as a near-tie.
    """
    audited = [done for done in finished if done.output]
    with torch.inference_mode():
        choices = [choice for done in audited for choice in _choices(model, vocab_size, done)]
    is_tie = [margin.allows(choice.gap, choice.best) for choice in choices]
    return AuditReport(
        requests=len(audited),
        tokens=sum(len(done.output) for done in audited),
        near_ties=tuple(c for c, tie in zip(choices, is_tie, strict=True) if tie),
        violations=tuple(c for c, tie in zip(choices, is_tie, strict=True) if not tie),
    )


def _choices(model: PreTrainedModel, vocab_size: int, done: Finished) -> Iterator[Choice]:
    """Tokens of one output that are not the argmax of the logits before them."""
    text = torch.tensor([[*done.request.prompt, *done.output[:-1]]], device=model.device)
    count = len(done.output)
    logits_nV = model(text, use_cache=False, logits_to_keep=count).logits[0, :, :vocab_size].float()
    token_n = torch.tensor(done.output, device=model.device)
    best_n, best_token_n = logits_nV.max(dim=1)
    gap_n = best_n - logits_nV.gather(1, token_n[:, None])[:, 0]
    for place in _places(gap_n):
        yield Choice(
            request=done.request.number,
            place=place,
            token=int(token_n[place]),
            best_token=int(best_token_n[place]),
            gap=float(gap_n[place]),
            best=float(best_n[place]),
        )


def _places(gap_n: Tensor) -> list[int]:
    """Where a token is not as good as the best one; equals of a lower token id count as ties."""
    return (gap_n > 0).nonzero()[:, 0].tolist()
