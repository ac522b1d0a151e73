"""What a draft model was good for lately, depth by depth."""

from __future__ import annotations

from dataclasses import dataclass

from echo_policies.views import ModelDepth


@dataclass(frozen=True, slots=True)
class ModelMeans:
    """What a draft model was good for at one depth, in sums that fade."""

    offered: float = 0.0
    """Request-steps in which it might be asked that deep."""
    asked: float = 0.0
    verified: float = 0.0
    accepted: float = 0.0

    def after(self, fade: float, offered: int, new: ModelDepth) -> ModelMeans:
        """Return the sums with a step more in them."""
        return ModelMeans(
            fade * self.offered + offered,
            fade * self.asked + new.asked,
            fade * self.verified + new.verified,
            fade * self.accepted + new.accepted,
        )

    def per_request(self, prior: ModelMeans) -> ModelMeans:
        """Return means per request-step, with a prior that counts like so many of them."""
        whole = prior.offered + self.offered
        return ModelMeans(
            prior.offered,
            (prior.offered * prior.asked + self.asked) / whole,
            (prior.offered * prior.verified + self.verified) / whole,
            (prior.offered * prior.accepted + self.accepted) / whole,
        )
