"""How the commands on real models start: options checked, defaults named, models located."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gpu_backend.models_cli import locate_models
from gpu_backend.serve_defaults import left_out, with_defaults
from gpu_backend.serve_options import GivenOptions

if TYPE_CHECKING:
    from gpu_backend.serve_config import ServeConfig
    from gpu_backend.sources.locate import LocatedModel


def start(given: GivenOptions) -> tuple[ServeConfig, list[LocatedModel]]:
    """Check the options, say which defaults are taken, and find or fetch the models.

    Args:
        given: what the user typed.

    Returns:
        The options, and the models that ``prepare`` needs.

    Raises:
        InputError: an option, the device or a policy cannot be used.
        SignalError: a policy asks for what prompt lookup does not propose.
    """
    from gpu_backend.serve_config import make_serve_config
    from gpu_backend.serve_setup import models_needed

    options, sampling = given.config(), given.sampling
    filled, said = with_defaults(options)
    config = make_serve_config(sampling, **filled, defaults=left_out(options, sampling))
    needed = models_needed(config)
    if said:
        typer.echo(f"defaults  {said}")
    return config, locate_models(*needed)
