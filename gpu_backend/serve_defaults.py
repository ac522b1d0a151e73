"""What a run on real models takes where a user says nothing: a run anybody can start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from gpu_backend.prompt_lookup import PROMPT_LOOKUP

TARGET: Final = "smollm2-135m"

PROMPTS: Final = Path(__file__).parent / "data" / "prompts.jsonl"
"""The bundled prompts."""

SMALL: Final = {"batch_size": 4, "max_new_tokens": 64, "calibration_requests": 4}
"""Go with the bundled prompts, so that the run takes minutes on a CPU."""


def with_defaults(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Fill in models and prompts, and for the bundled prompts a small run.

    Args:
        options: of ``ServeConfig``; None or an empty sequence where nothing was said.

    Returns:
        All options, and what was filled in, in words; empty if nothing was.
    """
    filled, said = dict(options), []
    if not filled.get("target"):
        filled["target"] = TARGET
        said.append(f"--target {TARGET}")
    if not filled.get("draft"):
        filled["draft"] = PROMPT_LOOKUP
        said.append(f"--draft {PROMPT_LOOKUP}")
    if not filled.get("prompts"):
        filled["prompts"] = (PROMPTS,)
        said.append("the bundled prompts")
        for name, value in SMALL.items():
            if filled.get(name) is None:
                filled[name] = value
                said.append(f"--{name.replace('_', '-')} {value}")
    return filled, ", ".join(said)
