"""How the commands on real models start: options checked, defaults named, models located."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from gpu_backend.models_cli import locate_models
from gpu_backend.serve_defaults import with_defaults

if TYPE_CHECKING:
    from gpu_backend.serve_config import ServeConfig
    from gpu_backend.sources.locate import LocatedModel


def start(
    options: dict[str, Any], sampling: dict[str, Any]
) -> tuple[ServeConfig, list[LocatedModel]]:
    """Check the options, say which defaults are taken, and find or fetch the models.

    Args:
        options: of ``ServeConfig``; None where the user said nothing.
        sampling: of ``Sampling``, likewise.

    Returns:
        The options, and the models that ``prepare`` needs.

    Raises:
        InputError: an option, the device or a policy cannot be used.
        SignalError: a policy asks for what prompt lookup does not propose.
    """
    from gpu_backend.serve_config import make_serve_config
    from gpu_backend.serve_setup import models_needed

    filled, said = with_defaults(options)
    config = make_serve_config(sampling, **filled)
    needed = models_needed(config)
    if said:
        typer.echo(f"defaults  {said}")
    return config, locate_models(*needed)
