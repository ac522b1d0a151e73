"""From ``NAME[:field=value,...]`` to a policy: presets, installed entry points, files.

Entry points are listed by name and loaded one at a time, when asked for; a failure to import
one is reported with its cause and never swallowed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from echo_policies.api import Gate, Policy, Scheduler
from echo_policies.errors import InputError, PolicyLoadError, UnknownNameError
from echo_policies.gates.open import OpenGate
from echo_policies.presets import PRESETS, WRAPPERS
from echo_policies.schedulers.elastic import Elastic

_WRAPPED = re.compile(r"(?P<inner>.+)\+(?P<wrapper>[A-Za-z_]\w*)(?::(?P<fields>.*))?")

ENTRY_POINT_GROUP = "echo_policies"
"""Group under which a package offers policies: a Policy, Gate or Scheduler class, or a factory."""


def available() -> list[str]:
    """Names of presets and installed policies."""
    return sorted({*PRESETS, *(point.name for point in _installed())})


def parse(spec: str) -> Policy:
    """Build the policy that a specification names.

    Args:
        spec: ``echo``, ``echo:w_topk=1,failing_layer=keep``, ``my_file.py:MyPolicy:alpha=0.3``;
            each may be wrapped, as in ``echo:w_topk=1+fallback``.

    Raises:
        UnknownNameError: no such policy or parameter; the nearest name is offered.
        PolicyLoadError: a file or class that cannot be used.
        InputError: a parameter's value breaks its rule.
    """
    wrapped = _WRAPPED.fullmatch(spec)
    if wrapped is not None:
        return _wrap(parse(wrapped["inner"]), wrapped["wrapper"], wrapped["fields"] or "", spec)
    head, fields = _split_spec(spec)
    made = _make(head)
    policy = made if isinstance(made, Policy) else _as_policy(made, head)
    policy = with_parameters(policy, dict(_parse_field(spec, field) for field in fields))
    return policy.model_copy(update={"name": _label(spec, head)})


def parse_list(specs: Iterable[str]) -> list[Policy]:
    """Build policies from repeated options, each of which may be a comma list.

    A piece with ``=`` and no ``:`` continues the policy before it.
    """
    pieces: list[str] = []
    for spec in specs:
        for piece in filter(None, (part.strip() for part in _split_commas(spec))):
            if "=" in piece and ":" not in piece and pieces:
                pieces[-1] += f",{piece}"
            else:
                pieces.append(piece)
    policies = [parse(piece) for piece in dict.fromkeys(pieces)]
    if not policies:
        raise InputError(f"At least one policy must be named; choose from {available()}.")
    return policies


def with_parameters(policy: Policy, values: dict[str, Any]) -> Policy:
    """Return the policy with some hyperparameters changed, wherever they live.

    Raises:
        UnknownNameError: neither the policy, its gate nor its scheduler has such a field.
        InputError: a value breaks its field's rule.
    """
    parts: dict[str, BaseModel] = {"policy": policy, "scheduler": policy.scheduler}
    if policy.scheduler.uses_gate:
        parts["gate"] = policy.gate
    hidden = {"name", "gate", "scheduler"}
    owners = {
        field: owner
        for owner, part in parts.items()
        for field in type(part).model_fields
        if not (owner == "policy" and field in hidden)
    }
    changes: dict[str, dict[str, Any]] = {}
    for field, value in values.items():
        if field not in owners:
            raise UnknownNameError(f"parameter of {policy.name!r}", field, owners)
        owner = owners[field]
        changes.setdefault(owner, {})[field] = _typed(parts[owner], field, value)
    for owner, update in changes.items():
        changed = _revalidate(parts[owner], update)
        if isinstance(changed, Policy):
            policy = changed
        else:
            policy = policy.model_copy(update={owner: changed})
    return policy


def _wrap(policy: Policy, wrapper: str, fields: str, spec: str) -> Policy:
    """Put a policy's scheduler into another one."""
    if wrapper not in WRAPPERS:
        raise UnknownNameError("policy wrapper", wrapper, WRAPPERS)
    around = policy.model_copy(update={"scheduler": WRAPPERS[wrapper](policy.scheduler)})
    pieces = [piece for piece in _split_commas(fields) if piece]
    around = with_parameters(around, dict(_parse_field(spec, piece) for piece in pieces))
    name = f"{policy.name}+{wrapper}" + (f":{fields}" if fields else "")
    return around.model_copy(update={"name": name})


def _revalidate(part: BaseModel, update: dict[str, Any]) -> BaseModel:
    # Not model_dump: nested gates and schedulers must stay the objects that they are.
    current = {name: getattr(part, name) for name in type(part).model_fields}
    try:
        return type(part).model_validate({**current, **update})
    except ValidationError as error:
        raise InputError(_reword(part, error)) from None


def _reword(part: BaseModel, error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(piece) for piece in first["loc"][:1]) or type(part).__name__
    message = first["msg"].removeprefix("Value error, ")
    known = type(part).model_fields.get(where)
    about = f" ({known.description})" if known and known.description else ""
    return f"{where}{about}: {message}; got {first['input']!r}."


def _split_spec(spec: str) -> tuple[str, list[str]]:
    """Split into the name (or FILE:CLASS) and its ``field=value`` pieces."""
    head, _, tail = spec.partition(":")
    if head.endswith(".py") and tail:
        name, _, tail = tail.partition(":")
        head = f"{head}:{name}"
    return head, [piece for piece in _split_commas(tail) if piece]


def _split_commas(text: str) -> list[str]:
    """Split at commas outside brackets, so that ``taus=[[1,0.5],[4,0.2]]`` stays together."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _parse_field(spec: str, piece: str) -> tuple[str, str]:
    field, equals, text = piece.partition("=")
    if not equals:
        raise InputError(
            f"A policy is written NAME:field=value,field=value; got {piece!r} in {spec!r}."
        )
    return field.strip(), text.strip()


def _typed(part: BaseModel, field: str, value: Any) -> Any:
    """Read a value that was given as text; a field of text keeps it as it is."""
    if not isinstance(value, str) or type(part).model_fields[field].annotation is str:
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _label(spec: str, head: str) -> str:
    """The name shown in tables: the specification, without a file's folder."""
    if ".py:" not in head:
        return spec
    return spec.partition(".py:")[2]


def _make(head: str) -> Any:
    if ".py:" in head:
        path, _, name = head.rpartition(":")
        return _instantiate(_class_of(_load_file(Path(path)), name, path), head)
    if head.endswith(".py"):
        raise InputError(f"A policy file needs its class: write {head}:MyPolicy.")
    if head in PRESETS:
        return PRESETS[head]()
    points = [point for point in _installed() if point.name == head]
    if not points:
        raise UnknownNameError("policy", head, available())
    if len(points) > 1:
        origins = " and ".join(point.value for point in points)
        raise PolicyLoadError(f"Two packages offer policy {head!r}: {origins}. Uninstall one.")
    return _instantiate(_load_entry_point(points[0]), head)


def _installed() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP))


def _load_entry_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise PolicyLoadError(
            f"Policy {point.name!r} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}."
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PolicyLoadError(f"{path} does not exist; a policy file is written PATH.py:CLASS.")
    spec = importlib.util.spec_from_file_location(f"_policy_file_{path.stem}", path.resolve())
    assert spec is not None, "a .py file always has a spec"
    assert spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic resolves annotations through it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = getattr(error, "lineno", None) or _line_in(error, path)
        raise PolicyLoadError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}"
            + (f" (line {line})." if line else ".")
        ) from error
    return module


def _line_in(error: Exception, path: Path) -> int | None:
    """Last line of the policy file in the error's traceback."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path.resolve()):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return lines[-1] if lines else None


def _class_of(module: ModuleType, name: str, path: str) -> Any:
    if not hasattr(module, name):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        raise UnknownNameError(f"class in {path}", name, classes)
    return getattr(module, name)


def _instantiate(factory: Callable[[], Any], head: str) -> Any:
    if isinstance(factory, Policy | Gate | Scheduler):
        return factory
    try:
        made = factory()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(piece) for piece in first["loc"])
        raise PolicyLoadError(
            f"{head} must be built from defaults, but {field}: {first['msg']}. "
            "Give every field a default."
        ) from None
    except TypeError as error:
        raise PolicyLoadError(f"{head} cannot be built without arguments: {error}.") from None
    if not isinstance(made, Policy | Gate | Scheduler):
        raise PolicyLoadError(
            f"{head} must be a Policy, Gate or Scheduler; got {type(made).__name__}."
        )
    return made


def _as_policy(part: Gate | Scheduler, head: str) -> Policy:
    """Pair a lone gate with the elastic scheduler, a lone scheduler with the open gate."""
    if isinstance(part, Gate):
        return Policy(name=head, gate=part, scheduler=Elastic())
    return Policy(name=head, gate=OpenGate(), scheduler=part)
