"""Names and shapes of the tensors in an EAGLE-3 head's file.

Two layouts name the decoder layer differently; everything else is named alike. What the project
calls a parameter is its name in :class:`gpu_backend.eagle3.head.Eagle3Head`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

from echo_policies.errors import InputError

Layout = Literal["original", "speculators"]

EMBEDDING: Final = "embed_tokens.weight"
OUTPUT_LAYER: Final = "lm_head.weight"

_LAYER_PREFIX: Final[dict[Layout, str]] = {"original": "midlayer.", "speculators": "layers.0."}
_LAYER_PARTS: Final = (
    "hidden_norm.",
    "input_layernorm.",
    "post_attention_layernorm.",
    "self_attn.",
    "mlp.",
)
_MAPS: Final = {"d2t": "d2t", "draft_id_to_target_id": "d2t", "t2d": "t2d"}
# Copies of the target's own tensors that some trainers leave in the file.
_IGNORED: Final = "verifier_"


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """What a file holds, by the project's names."""

    weights: dict[str, Tensor]
    """Parameters by name."""
    d2t: Tensor | None
    """int64 [Vd]: what to add to a draft id to get the target's; None where the file has none."""
    t2d: Tensor | None
    """bool [V]: the tokens that the head can propose; None where the file has none."""

    @property
    def owns_embedding(self) -> bool:
        """Whether the head brings its embedding."""
        return EMBEDDING in self.weights

    @property
    def owns_output_layer(self) -> bool:
        """Whether the head brings its output layer."""
        return OUTPUT_LAYER in self.weights


def name_in_file(parameter: str, layout: Layout) -> str:
    """What a layout calls a parameter of the head."""
    if parameter.startswith(_LAYER_PARTS):
        return _LAYER_PREFIX[layout] + parameter
    return parameter


def sort_tensors(tensors: Mapping[str, Tensor], where: str) -> HeadTensors:
    """Find out what the tensors of a file are, in either layout.

    Args:
        tensors: by their names in the file.
        where: the file, for messages.

    Raises:
        InputError: two tensors are the same parameter, or the head has more than one layer.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        if short.startswith(_IGNORED):
            continue
        ours = _MAPS.get(short, _parameter(short, where))
        if ours in found:
            raise InputError(
                f"{where}: a head must hold every tensor once; {name} is there under two names."
            )
        found[ours] = tensor
    return HeadTensors(
        {name: tensor for name, tensor in found.items() if name not in {"d2t", "t2d"}},
        found.get("d2t"),
        found.get("t2d"),
    )


def check_weights(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str
) -> None:
    """Refuse weights that are not exactly those of the configuration.

    Args:
        weights: what the file holds, without what is borrowed from the target.
        expected: what the head takes from the file; only the shapes matter.
        where: the file, for messages.

    Raises:
        InputError: naming the first tensor that is missing, surplus or of another shape or kind.
    """
    for name, wanted in expected.items():
        if name not in weights:
            raise InputError(
                f"{where}: a head must hold every tensor of its configuration; {name} is missing. "
                "Fetch the head again, or correct its config.json."
            )
        given = weights[name]
        if given.shape != wanted.shape or not given.is_floating_point():
            raise InputError(
                f"{where}: {name} must be a floating-point tensor of shape "
                f"{list(wanted.shape)}; it is {_kind(given)} of shape {list(given.shape)}."
            )
    surplus = sorted(set(weights) - set(expected))
    if surplus:
        raise InputError(
            f"{where}: a head must hold no tensor that its configuration does not use; "
            f"{surplus[0]} is one. Correct its config.json."
        )


def _parameter(short: str, where: str) -> str:
    for prefix in _LAYER_PREFIX.values():
        if short.startswith(prefix):
            return short.removeprefix(prefix)
    if short.startswith("layers."):
        raise InputError(
            f"{where}: a head must have one decoder layer; the file has {short}. "
            "Heads with more layers are not supported."
        )
    return short


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
