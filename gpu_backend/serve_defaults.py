"""What a run on real models takes where a user says nothing: a run anybody can start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpu_backend.prompt_lookup import PROMPT_LOOKUP

POLICY: Final = "echo"

TARGET: Final = "smollm2-135m"

DRAFT: Final = f"{PROMPT_LOOKUP}+smollm2-135m-eagle3"
"""For the default target: its bundled head, behind prompt lookup."""

PROMPTS: Final = Path(__file__).parent / "data" / "prompts.jsonl"
"""The bundled prompts."""

SMALL: Final[Mapping[str, Any]] = {
    "batch_sizes": (4,),
    "max_new_tokens": 64,
    "calibration_requests": 4,
}
"""Go with the bundled prompts, so that the run takes minutes on a CPU."""


def small_options() -> str:
    """The smaller defaults, as options that one would type."""
    return ", ".join(_typed(name, value) for name, value in SMALL.items())


def with_defaults(options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Fill in models and prompts, and for the bundled prompts a small run.

    Args:
        options: of ``ServeConfig``; None where nothing was said.

    Returns:
        All options, and what was filled in, in words; empty if nothing was.
    """
    filled, said = dict(options), []
    if not filled.get("policies"):
        filled["policies"] = (POLICY,)
    default_draft = PROMPT_LOOKUP if filled.get("target") else DRAFT
    if not filled.get("target"):
        filled["target"] = TARGET
        said.append(f"--target {TARGET}")
    if not filled.get("draft"):
        filled["draft"] = default_draft
        said.append(f"--draft {default_draft}")
    if not filled.get("prompts"):
        filled["prompts"] = (PROMPTS,)
        said.append("the bundled prompts")
        for name, value in SMALL.items():
            if filled.get(name) is None:
                filled[name] = value
                said.append(_typed(name, value))
    return filled, ", ".join(said)


def left_out(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the options that a user did not give, in the order of the commands."""
    drawn = {f"sampling.{name}": value for name, value in sampling.items()}
    return tuple(name for name, value in {**options, **drawn}.items() if value is None)


def _typed(name: str, value: Any) -> str:
    """An option as one would type it."""
    if name == "batch_sizes":
        return "--batch-size " + ",".join(map(str, value))
    return f"--{name.replace('_', '-')} {value}"
