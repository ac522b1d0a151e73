"""Recording of one request with an EAGLE-3 head as the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_backend import models
from gpu_backend.attention import ATTENTION_NAME
from gpu_backend.config import RecordConfig
from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.head_tree import HeadTree
from gpu_backend.eagle3.head_trie import HeadTrie
from gpu_backend.eagle3.loading import load_head
from gpu_backend.greedy import TargetOutput
from gpu_backend.model_preparation import prepare_model
from gpu_backend.prompts import Prompt
from gpu_backend.ragged_model import Extension, RaggedModel
from gpu_backend.recorder import record_positions
from traces.schema import PositionArrays

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class HeadRecorder:
    """A head, the target whose features it reads, and what to record."""

    target: PreTrainedModel
    """Prepared by :func:`gpu_backend.model_preparation.prepare_model`."""
    head: Eagle3Head
    """Made for tree attention."""
    config: RecordConfig

    @classmethod
    def load(
        cls,
        target: Path,
        head: Path,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        config: RecordConfig,
    ) -> HeadRecorder:
        """Load both.

        Args:
            target: its files.
            head: folder of the head.
            tokenizer: the target's.
            vocab_size: real tokens.
            config: widths, levels and dtype.

        Raises:
            InputError: either cannot be used.
        """
        model = models.load_model(target, config.dtype)
        found = load_head(
            head,
            model,
            vocab_size=vocab_size,
            attention=ATTENTION_NAME,
            tokenizer=tokenizer,
            packs=True,
        )
        prepare_model(model, vocab_size, "target")
        return cls(model, found.head, config)

    def record(self, prompt: Prompt, output: TargetOutput) -> PositionArrays:
        """Record all positions of one request."""
        config, text = self.config, [*prompt.token_ids, *output.tokens]
        tree = HeadTree(
            self.head, capacity=len(text), width=config.num_children, row_chunk=config.row_chunk
        )
        taps = self.head.config.taps
        features = target_features(self.target, text, taps, config.row_chunk)
        trie = HeadTrie(tree, prompt.token_ids, output.tokens, features, config.chain_levels)
        return record_positions(trie, output.tokens, output.num_emitted, config)


def target_features(
    target: PreTrainedModel, text: Sequence[int], taps: Sequence[int], row_chunk: int
) -> Tensor:
    """Features ``[tokens, taps * width]`` at every token of a text."""
    model = RaggedModel(target, vocab_size=1, num_slots=len(text), taps=taps)
    model.table.reserve(0, len(text))
    parts = []
    for start in range(0, len(text), row_chunk):
        model.extend([Extension(0, text[start : start + row_chunk])], scores=False)
        assert model.features is not None
        parts.append(model.features)
    return torch.cat(parts)
