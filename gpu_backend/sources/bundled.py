"""EAGLE-3 heads that ship with the project, by the name of their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

HEADS: Final = Path(__file__).parents[1] / "data" / "heads"


def bundled_heads() -> dict[str, Path]:
    """Folder of every bundled head by its name."""
    return {folder.name: folder for folder in sorted(HEADS.glob("*")) if folder.is_dir()}


def head_target(folder: Path) -> str:
    """Name of the target that a bundled head was trained for."""
    content = json.loads((folder / "config.json").read_text())
    return str(content["metadata"]["target"])
