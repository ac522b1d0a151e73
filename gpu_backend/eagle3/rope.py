"""Rotary parameters of a head: its own, never the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from echo_policies.errors import InputError
from gpu_backend.eagle3.config_keys import ConfigKeys

DEFAULT_THETA: Final = 10000.0
"""What a missing ``rope_theta`` means: published Llama-3.1 heads lack it and were trained so."""

_LAYER_TYPE: Final = "full_attention"
# What each kind must say; kinds that depend on max_position_embeddings, which in a head is the
# length that training used, are not among them.
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def rope_parameters(keys: ConfigKeys) -> dict[str, Any]:
    """Rotary parameters as transformers 5 spells them, from old keys or new ones.

    Raises:
        InputError: they contradict each other, or are of a kind that a head cannot have.
    """
    scaling = dict(_scaling(keys))
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", kind) or "default"
    theta = scaling.pop("rope_theta", None)
    outside = keys.number("rope_theta") if "rope_theta" in keys else None
    if theta is not None and outside is not None and theta != outside:
        raise InputError(
            f"{keys.where}: rope_theta must be said once; it is {outside!r} at the top and "
            f"{theta!r} in the rotary parameters."
        )
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise InputError(
            f"{keys.where}: the rotary positions of a head must be of a kind in "
            f"{', '.join(_NEEDED)}; they are {kind!r}."
        )
    said = ConfigKeys(scaling, f"{keys.where}, rotary parameters")
    for name in _NEEDED[kind]:
        said.number(name)
    if said.number("partial_rotary_factor", 1.0) != 1.0:
        raise said.refusal("partial_rotary_factor", "1")
    chosen = ConfigKeys({"rope_theta": theta if theta is not None else outside}, keys.where)
    rest = {name: value for name, value in scaling.items() if value is not None}
    return {"rope_type": kind, "rope_theta": chosen.number("rope_theta", DEFAULT_THETA), **rest}


def describe_rope(parameters: Mapping[str, Any]) -> str:
    """Rotary parameters in a few words."""
    rest = {k: v for k, v in parameters.items() if k not in {"rope_type", "rope_theta"}}
    words = f"rope theta {parameters['rope_theta']:g}"
    if parameters["rope_type"] != "default":
        words += f", {parameters['rope_type']}"
    return words + "".join(f" {name} {value}" for name, value in rest.items())


def _scaling(keys: ConfigKeys) -> Mapping[str, Any]:
    given = [name for name in ("rope_parameters", "rope_scaling") if keys.raw(name)]
    if len(given) > 1 and keys.raw(given[0]) != keys.raw(given[1]):
        raise InputError(
            f"{keys.where}: rotary parameters must be said once; rope_parameters and rope_scaling "
            "differ."
        )
    found: Any = keys.part(given[0]).raw(_LAYER_TYPE) if given else {}
    if found is None:
        found = keys.raw(given[0])
    if not isinstance(found, Mapping):
        raise keys.refusal(given[0], "an object")
    return found
