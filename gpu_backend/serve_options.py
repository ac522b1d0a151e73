"""Options that the commands on real models share, and how a command takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from echo_policies.errors import InputError
from gpu_backend.models_cli import MODEL_HELP
from gpu_backend.prompt_lookup import CONFIDENCE, MODEL_LEVELS, PROMPT_LOOKUP
from gpu_backend.serve_defaults import TARGET, small_options
from traces.arguments import whole_numbers

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
LookupConfidenceOption = Annotated[
    float | None,
    typer.Option(help=f"{PROMPT_LOOKUP}+MODEL: probability that needs no model [{CONFIDENCE}]."),
]
ModelLevelsOption = Annotated[
    int | None,
    typer.Option(help=f"{PROMPT_LOOKUP}+MODEL: depths the model proposes [{MODEL_LEVELS}]."),
]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSONL file of prompts; repeat it for more. If unset, bundled ones, and defaults of "
        f"other options are smaller: {small_options()}."
    ),
]
BatchSizeOption = Annotated[
    str | None, typer.Option(help="Requests served at a time, comma-separated: 1,8,32 [8].")
]
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
AttentionOption = Annotated[
    str | None,
    typer.Option(
        help="On CUDA: fa3, flashinfer, fa2, torch, or auto (default), the first that imports."
    ),
]
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
RateOption = Annotated[
    float | None, typer.Option(help="Arrivals per second; all at once if unset.")
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="Calibration file of `simulate calibrate`, or the name of a bundled trace."),
]
CalibrationRequestsOption = Annotated[
    int | None, typer.Option(help="Prompts to fit gates on, without a file [8].")
]

SAMPLING: Final[Mapping[str, Any]] = {
    "temperature": TemperatureOption,
    "top_p": TopPOption,
    "top_k": TopKOption,
    "repetition_penalty": PenaltyOption,
}
"""Options of ``Sampling``, by name."""

OPTIONS: Final[Mapping[str, Any]] = {
    "policy": PolicyOption,
    "target": TargetOption,
    "draft": DraftOption,
    "draft_vocab": DraftVocabOption,
    "lookup_confidence": LookupConfidenceOption,
    "model_levels": ModelLevelsOption,
    "prompts": PromptsOption,
    "batch_size": BatchSizeOption,
    "requests": RequestsOption,
    "max_new_tokens": MaxNewTokensOption,
    "max_prompt_tokens": MaxPromptTokensOption,
    **SAMPLING,
    "seed": SeedOption,
    "dtype": DtypeOption,
    "device": DeviceOption,
    "attention": AttentionOption,
    "k_max": KMaxOption,
    "k_max_factor": KMaxFactorOption,
    "cap_all": CapAllOption,
    "mode": ModeOption,
    "prefill_chunk": PrefillChunkOption,
    "rate": RateOption,
    "calibration": CalibrationOption,
    "calibration_requests": CalibrationRequestsOption,
}
"""Every option that a run on real models depends on, by name."""

FLAGS: Final = ("cap_all",)
"""Options that are given or not, and have no value."""


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """What a user typed of the shared options; None where nothing was said."""

    values: Mapping[str, Any]

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of ``Sampling``."""
        return {name: self.values[name] for name in SAMPLING}

    def require_none(self, command: str) -> None:
        """Refuse options in front of a command, which would go unheard.

        Raises:
            InputError: naming the first of them.
        """
        for name, value in self.values.items():
            if value:
                option = name.replace("_", "-")
                raise InputError(
                    f"Options must follow the command they are for; --{option} stands in front of "
                    f"{command!r}. Write `run_gpu {command} --{option} ...`."
                )

    def config(self) -> dict[str, Any]:
        """Options of ``ServeConfig``.

        Raises:
            InputError: the batch sizes are no whole numbers.
        """
        options = {name: value for name, value in self.values.items() if name not in SAMPLING}
        policies, prompts = options.pop("policy"), options["prompts"]
        sizes = whole_numbers("--batch-size", options.pop("batch_size"))
        flags = {name: options[name] or None for name in FLAGS}
        given = {"policies": tuple(policies or ()) or None, "batch_sizes": sizes}
        return {**options, **flags, **given, "prompts": tuple(prompts or ()) or None}


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared options: it gets them as one value, its first argument."""
    _, *others = inspect.signature(command, eval_str=True).parameters.values()
    named = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(name, named, default=False if name in FLAGS else None, annotation=kind)
        for name, kind in OPTIONS.items()
    ]
    parameters = [*shared, *others]

    @wraps(command)
    def run(**values: Any) -> None:
        given = GivenOptions({name: values.pop(name) for name in OPTIONS})
        command(given, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {part.name: part.annotation for part in parameters}
    return run
