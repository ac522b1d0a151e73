"""Prompt lookup for a whole batch: candidates are what followed the same words earlier.

No model runs, and nothing is kept but an index of every request's text, which is its prompt and
its output up to the root of the draft. Where a context has not occurred before, nothing is
proposed: chains end, trees have fewer candidates.

Shape letters: B slots of the batch, F expanded nodes of a layer, W candidates of a layer,
N candidates of all layers, k children.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from gpu_backend.candidates import Children
from gpu_backend.draft_step import DraftStep, StepDrafter
from gpu_backend.prompt_lookup import ContextIndex
from gpu_backend.ragged_model import Extension
from traces.lookup_plans import lookup_objection

IntArray = npt.NDArray[np.int64]

Branch = tuple[int, ...]
"""Tokens from a root, which is not among them, down to a node."""


class LookupDrafter(StepDrafter):
    """Drafts for every slot of a batch from its own text.

    Log-probabilities are rounded to float16 before they are added, as recordings have them, and
    children stand in the order of :class:`gpu_backend.prompt_lookup.Followers`.
    """

    taps: tuple[int, ...] = ()
    """It reads no features of the target."""
    num_forwards: int = 0
    """No model runs."""
    unread: tuple[int, ...] = ()
    """No model is behind."""
    looks_up: bool = True
    """It does nothing else."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        """Start without requests.

        Args:
            num_slots: slots of the batch, B.
            vocab_size: real tokens, over which an entropy is spread.
        """
        self._vocab_size = vocab_size
        self._texts: list[ContextIndex | None] = [None] * num_slots
        self.step = DraftStep(num_slots)
        self._branch_BF: list[list[Branch]] = []
        """Branches of the newest expanded nodes; any where nothing was expanded."""

    def objection(self, plan: DraftPlan) -> str | None:
        """Refuse fixed trees other than chains."""
        return lookup_objection(plan)

    def require_room(self, num_tokens: int) -> None:
        """Refuses nothing: a text is as long as it is."""

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Start an empty text."""
        del num_tokens
        self._texts[slot] = ContextIndex()
        return True

    def read(self, chunks: Sequence[Extension], features: Sequence[Tensor] | None = None) -> None:
        """Index prompt tokens."""
        del features
        for chunk in chunks:
            self._text(chunk.key).extend(chunk.tokens)

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Index emitted tokens."""
        del features
        self._text(slot).extend(tokens)

    def release(self, slot: int) -> None:
        """Forget a text."""
        self._texts[slot] = None

    def check_integrity(self, slots: Sequence[int]) -> None:
        """Check that exactly these requests have a text."""
        held = {slot for slot, text in enumerate(self._texts) if text is not None}
        assert held == set(slots), "a text of a request that has left, or none of one served"

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Look up what follows each text."""
        self.start(plan)
        mask_BF = drafting_B[:, None]
        return self.step.reveal(self.look_up(mask_BF), torch.zeros_like(mask_BF))

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Look up what follows the texts with the frontier's branches behind them."""
        self.descend(frontier)
        by_model_BF = torch.zeros_like(frontier.mask_BF)
        return self.step.reveal(self.look_up(frontier.mask_BF), by_model_BF, layer, frontier)

    def start(self, plan: DraftPlan) -> None:
        """Start a step at the roots."""
        self.step.start(plan)
        self._branch_BF = [[()] for _ in self._texts]

    def descend(self, frontier: Frontier) -> None:
        """Go on to nodes of the newest layer, masked out or not."""
        index_BF = frontier.index_BF.cpu().numpy()
        parent_BF = self.step.parents(index_BF)
        token_BF = np.take_along_axis(self.token_layers[-1], index_BF, axis=1)
        self._branch_BF = [
            [(*above[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for above, parents, tokens in zip(
                self._branch_BF, parent_BF.tolist(), token_BF.tolist(), strict=True
            )
        ]

    def _text(self, slot: int) -> ContextIndex:
        text = self._texts[slot]
        assert text is not None, f"slot {slot} is idle"
        return text

    def look_up(self, mask_BF: Tensor) -> Children:
        """Children of these of the newest expanded nodes."""
        shape, top_k = tuple(mask_BF.shape), self.step.plan.top_k
        token_BFk = np.zeros((*shape, top_k), dtype=np.int64)
        logp_BFk = np.full((*shape, top_k), -np.inf, dtype=np.float16)
        entropy_BF = np.zeros(shape, dtype=np.float16)
        for slot, place in np.argwhere(mask_BF.cpu().numpy()).tolist():
            found = self._text(slot).followers(self._branch_BF[slot][place])
            count = min(top_k, len(found.tokens))
            token_BFk[slot, place, :count] = found.tokens[:count]
            logp_BFk[slot, place, :count] = found.log_probs[:count]
            entropy_BF[slot, place] = found.entropy(self._vocab_size)
        device = mask_BF.device
        return Children(
            torch.from_numpy(token_BFk).to(device),
            torch.from_numpy(logp_BFk).to(device).float(),
            torch.from_numpy(entropy_BF).to(device).float(),
        )
