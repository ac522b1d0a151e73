"""The table of models that can be loaded by name."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpu_backend.sources import hub, mirror
from gpu_backend.sources.bundled import bundled_heads, head_target
from gpu_backend.sources.catalogue import ModelEntry, load_catalogue
from gpu_backend.sources.errors import size_text


def print_models() -> None:
    """List the catalogue and what else lies in the hub's cache, with where each would come from."""
    entries = load_catalogue()
    folder = mirror.models_folder()
    reachable = hub.is_reachable(entries[0].name)
    table = Table(title="models", title_justify="left", pad_edge=False)
    for name in ("name", "short", "comes from", "weights of the mirror", "licence", "architecture"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(
            entry.name,
            entry.aliases[0] if entry.aliases else "",
            _origin(entry, folder, reachable),
            f"GGUF {entry.quantisation}, {size_text(entry.size_bytes)}",
            entry.licence,
            entry.architecture,
        )
    for name, folder in bundled_heads().items():
        target = head_target(folder)
        table.add_row(name, "", "bundled", "", "Apache-2.0", f"EAGLE-3 head of {target}")
    listed = {entry.name for entry in entries}
    for name in hub.cached_names():
        if name not in listed:
            table.add_row(name, "", "cache (hub's)", "", "", "")
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    state = "reachable" if reachable else "not reachable"
    said = (
        f"The hub is {state}; any of its models can be given as OWNER/NAME or "
        "OWNER/NAME/FILE.gguf, and any model directory or .gguf file by its path. "
        f"What the mirror gives lies in {folder} (ECHO_MODELS moves it)."
    )
    console.print(said, soft_wrap=True, markup=False, highlight=False)


def _origin(entry: ModelEntry, folder: Path, reachable: bool) -> str:
    if mirror.cached(entry, folder):
        return "cache"
    if hub.cached(entry.name):
        return "cache (hub's)"
    if reachable:
        return "hub"
    done = mirror.bytes_done(entry, folder)
    return f"mirror, {100 * done // entry.size_bytes} % fetched" if done else "mirror"
