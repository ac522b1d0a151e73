"""Options that the commands on real models share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpu_backend.models_cli import MODEL_HELP
from gpu_backend.prompt_lookup import MATCH, MODEL_LEVELS, PROMPT_LOOKUP
from gpu_backend.serve_defaults import SMALL, TARGET

PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        help="NAME[:field=value,...] or FILE.py:CLASS; repeat it, or separate by commas.",
    ),
]
TargetOption = Annotated[str | None, typer.Option(help=f"Target [{TARGET}]: {MODEL_HELP}")]
DraftOption = Annotated[
    str | None,
    typer.Option(
        help=f"Draft, likewise, {PROMPT_LOOKUP!r} (default), or {PROMPT_LOOKUP + '+MODEL'!r}."
    ),
]
DraftVocabOption = Annotated[
    int | None, typer.Option(help="Tokens the draft model proposes, by lowest id; all if unset.")
]
LookupMatchOption = Annotated[
    int | None,
    typer.Option(help=f"{PROMPT_LOOKUP}+MODEL: tokens that must repeat for a lookup [{MATCH}]."),
]
ModelLevelsOption = Annotated[
    int | None,
    typer.Option(help=f"{PROMPT_LOOKUP}+MODEL: depths the model proposes [{MODEL_LEVELS}]."),
]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSONL file of prompts; repeat it for more. If unset, bundled ones, and defaults of "
        "other options are smaller: " + ", ".join(f"{k} {v}" for k, v in SMALL.items()) + "."
    ),
]
BatchSizeOption = Annotated[int | None, typer.Option(help="Requests served at a time [8].")]
RequestsOption = Annotated[int | None, typer.Option(help="Prompts in all; every one if unset.")]
MaxNewTokensOption = Annotated[
    int | None, typer.Option(help="Output tokens per request, at most [256].")
]
MaxPromptTokensOption = Annotated[
    int | None, typer.Option(help="Pass over prompts longer than this.")
]
TemperatureOption = Annotated[float | None, typer.Option(help="0 (default) is greedy.")]
TopPOption = Annotated[float | None, typer.Option(help="Draw from this much mass [1].")]
TopKOption = Annotated[int | None, typer.Option(help="Draw from so many tokens; 0 is all.")]
PenaltyOption = Annotated[float | None, typer.Option(help="Not supported: refused unless 1.")]
SeedOption = Annotated[int | None, typer.Option(help="Seed of sampling and intervals [0].")]
DtypeOption = Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto (default), cpu or cuda.")]
KMaxOption = Annotated[
    int | None, typer.Option(help="Candidate nodes per batch step; default: timed knee.")
]
KMaxFactorOption = Annotated[
    float | None, typer.Option(help="Knee rule: t(k_max + B) <= factor * t(B) [1.25].")
]
CapAllOption = Annotated[bool, typer.Option("--cap-all", help="Clamp every policy to k_max.")]
ModeOption = Annotated[
    str | None, typer.Option(help="staged saves draft layers at checks; masked does not.")
]
PrefillChunkOption = Annotated[int | None, typer.Option(help="Prompt tokens read per step [512].")]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="Calibration file of `simulate calibrate`, or the name of a bundled trace."),
]
CalibrationRequestsOption = Annotated[
    int | None, typer.Option(help="Prompts to fit gates on, without a file [8].")
]
