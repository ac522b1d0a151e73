"""From what a user names to a costed pair: the catalogue, or HF ``config.json`` files."""

from __future__ import annotations

from pathlib import Path

from echo_policies.errors import InputError
from simulator.cost.catalogue import find_pair
from simulator.cost.hf_config import read_hf_config, read_pair
from simulator.cost.models import CostedPair, Eagle3Head, Transformer


def resolve_pair(target: str, draft: str | None = None) -> CostedPair:
    """Return the pair of a catalogue name, or of a ``config.json`` or its folder.

    Raises:
        InputError: a draft is given for a name of the catalogue, or a file cannot be used.
        UnknownNameError: neither a name nor a path.
    """
    if not Path(target).exists():
        pair = find_pair(target)
        if draft is not None:
            raise InputError(f"draft goes with a config.json; {target} has {pair.draft.name}.")
        return pair
    if draft is not None:
        return read_pair(target, draft)
    model = read_hf_config(target)
    if isinstance(model, Eagle3Head):
        raise InputError(f"{target} must describe a whole model; it is an EAGLE-3 head.")
    return CostedPair(model, assumed_head(model))


def assumed_head(model: Transformer) -> Eagle3Head:
    """Return an EAGLE-3 head of the target's own layer shape, for targets without a known one."""
    return Eagle3Head(
        name="assumed EAGLE-3 head",
        target_hidden=model.hidden,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        vocab=min(model.vocab, 32_000),
        head_dim=model.head_dim,
        source="assumed: one layer of the target's shape",
        is_verified=False,
    )
