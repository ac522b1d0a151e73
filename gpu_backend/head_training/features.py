"""What the target thinks of a text: tapped features and the state before its output layer.

Kept on disk, a file per part of the text, because every pass over the data needs them again and
they cost a forward of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpu_backend.head_training.self_text import Dialogue
from traces.store import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Example:
    """One dialogue as the head learns from it; T tokens, F features side by side, h_t wide."""

    tokens_T: Tensor
    """int64."""
    features_TF: Tensor
    """Half precision: the target's features of every position."""
    last_Th: Tensor
    """Half precision: the target's state before its output layer, which says the next token."""
    best_T: Tensor
    """int64: the token that the target thinks most likely to come next."""
    answer_start: int

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens_T) - self.answer_start


@torch.inference_mode()
def read_features(
    target: PreTrainedModel,
    taps: tuple[int, ...],
    dialogues: Sequence[Dialogue],
    on_read: Callable[[int], None],
) -> list[Example]:
    """Run a target over dialogues.

    Args:
        target: with an attention of transformers' own.
        taps: features by the layer whose input they are.
        dialogues: to read.
        on_read: called with how many are read.
    """
    decoder: Any = target.get_decoder()  # type: ignore[no-untyped-call]
    output: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    examples = []
    for dialogue in dialogues:
        tokens_T = torch.tensor(dialogue.tokens)
        out = decoder(
            input_ids=tokens_T.to(target.device)[None], output_hidden_states=True, use_cache=False
        )
        logits_TV = output(out.last_hidden_state[0])
        # bfloat16 has float32's range: some features are beyond float16's.
        features_TF = torch.cat([out.hidden_states[tap][0] for tap in taps], dim=-1)
        examples.append(
            Example(
                tokens_T,
                features_TF.to("cpu", torch.bfloat16),
                out.last_hidden_state[0].to("cpu", torch.bfloat16),
                logits_TV.argmax(-1).cpu(),
                dialogue.answer_start,
            )
        )
        on_read(len(examples))
    return examples


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write examples, whole or not at all."""
    from safetensors.torch import save

    lengths = torch.tensor([len(example.tokens_T) for example in examples])
    write_whole(
        path,
        save(
            {
                "length": lengths,
                "answer_start": torch.tensor([example.answer_start for example in examples]),
                "tokens": torch.cat([example.tokens_T for example in examples]),
                "features": torch.cat([example.features_TF for example in examples]),
                "best": torch.cat([example.best_T for example in examples]),
                "last": torch.cat([example.last_Th for example in examples]),
            }
        ),
    )


def load_examples(path: Path) -> list[Example]:
    """Read what :func:`save_examples` wrote; the arrays stay on disk until they are used."""
    from safetensors.torch import load_file

    held = load_file(path)
    lengths = held["length"].tolist()
    parts = zip(
        *(torch.split(held[name], lengths) for name in ("tokens", "features", "last", "best")),
        held["answer_start"].tolist(),
        strict=True,
    )
    return [Example(*part) for part in parts]
