"""The commands ``run_gpu models`` and ``run_gpu models get``, and names of models in others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpu_backend.exits import user_errors

if TYPE_CHECKING:
    from gpu_backend.sources.locate import LocatedModel

_GOES_ON: Final = "Give the same command again: the fetch goes on where it was."

MODEL_HELP: Final = (
    "a model directory, a .gguf file, or a name such as qwen2.5-coder-1.5b or OWNER/NAME; "
    "hub:NAME, mirror:NAME and cache:NAME ask for that source alone."
)

app = typer.Typer(help="Models by name: what can be loaded here, and fetching it.")


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the models that can be loaded by name, and where each would come from."""
    if context.invoked_subcommand is not None:
        return
    from gpu_backend.sources.listing import print_models

    with user_errors(""):
        print_models()


@app.command()
def get(
    names: Annotated[list[str], typer.Argument(help=f"Model to fetch: {MODEL_HELP}")],
) -> None:
    """Fetch models now and print where they lie. A fetch that was stopped goes on where it was."""
    for model in locate_models(*names):
        typer.echo(str(model.path))


def locate_models(*texts: str) -> list[LocatedModel]:
    """Find or fetch models, with progress; say where each one that was named comes from.

    Errors end the program with one sentence.
    """
    from gpu_backend.sources.catalogue import load_catalogue
    from gpu_backend.sources.locate import locate, understand
    from gpu_backend.sources.progress import FetchBars

    with user_errors(_GOES_ON), FetchBars() as bars:
        entries = load_catalogue()
        # All are understood before the first is fetched: a slip in the second costs no download.
        requests = [understand(text, entries) for text in texts]
        found = [locate(request, bars.update) for request in requests]
    for model in found:
        if model.name is not None:
            note = f" ({model.note})" if model.note else ""
            print(f"{model.name} from the {model.origin}{note}: {model.path}", file=sys.stderr)
    return found
