"""A trace's header as text: sorted JSON out, a validated header or one sentence in; differences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from echo_policies.errors import TraceError
from traces.schema import SCHEMA_VERSION, TraceHeader


def header_json(header: TraceHeader) -> str:
    """The header as sorted JSON, the form that is stored and digested."""
    return json.dumps(header.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def parse_json(text: str) -> object:
    """The raw header from its JSON.

    Raises:
        TraceError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"the header is not JSON ({error}): record the trace again.") from error


def parse_header(raw: object) -> TraceHeader:
    """The header from its raw JSON value.

    Raises:
        TraceError: a field is missing, unknown or wrong, or the schema is a later one.
    """
    if not isinstance(raw, dict):
        raise TraceError(f"the header must be an object; got {type(raw).__name__}.")
    version = raw.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise TraceError(
            f"the trace has schema version {version} and this package reads up to "
            f"{SCHEMA_VERSION}: upgrade echo-spec."
        )
    try:
        # Lax mode on purpose: JSON and pickles hold lists where the header has tuples.
        return TraceHeader.model_validate(raw)
    except ValidationError as error:
        raise TraceError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in ("header", *first["loc"]))
    others = error.error_count() - 1
    more = f" ({others} more like it)" if others else ""
    given = "" if first["type"] == "missing" else f"; got {first['input']!r:.80}"
    rule = first["msg"][:1].lower() + first["msg"][1:]
    return f"{field}: {rule}{given}{more}. Fix the header or record the trace again."


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A header field with its two values, as they stand in JSON."""

    field: str
    """Dotted, such as ``target.dtype``."""
    one: Any
    other: Any


def differing_fields(one: TraceHeader, other: TraceHeader) -> list[FieldDifference]:
    """Fields in which two headers differ, in the order of the format; requests are left out."""
    fields = [
        _flat("", header.model_dump(mode="json", exclude={"requests"})) for header in (one, other)
    ]
    names = dict.fromkeys([*fields[0], *fields[1]])
    pairs = ((name, fields[0].get(name), fields[1].get(name)) for name in names)
    return [FieldDifference(name, a, b) for name, a, b in pairs if a != b]


def _flat(prefix: str, value: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, entry in value.items():
        flat |= (
            _flat(f"{prefix}{name}.", entry) if isinstance(entry, dict) else {prefix + name: entry}
        )
    return flat
