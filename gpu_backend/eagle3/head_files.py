"""The files of a head: which folder is one, and reading them."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.model_files import reading_errors

_SAFETENSORS: Final = "model.safetensors"
_PICKLED: Final = "pytorch_model.bin"
_KEYS: Final = frozenset({"speculators_model_type", "draft_vocab_size", "d2t", "fc"})
_TENSORS: Final = frozenset({"fc.weight", "d2t", "model.fc.weight", "model.d2t"})


def is_head_folder(path: Path) -> bool:
    """Whether a path is an EAGLE-3 head rather than a language model.

    ``architectures`` does not tell: published heads call themselves a Llama.
    """
    if not (path / "config.json").is_file():
        return False
    try:
        keys = read_config(path)
    except InputError:
        return False
    if _KEYS & keys.keys():
        return True
    file = path / _SAFETENSORS
    if not file.is_file():
        return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            return bool(_TENSORS & set(tensors.keys()))
    except SafetensorError:
        return False  # whoever reads it says so


def read_config(folder: Path) -> dict[str, Any]:
    """Content of ``config.json``.

    Raises:
        InputError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} must be a JSON file: {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object; it holds {type(content).__name__}.")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors of ``model.safetensors`` or ``pytorch_model.bin`` by name; no code is run.

    Raises:
        InputError: there is neither, or it cannot be read.
    """
    if (folder / _SAFETENSORS).is_file():
        from safetensors.torch import load_file

        with reading_errors(folder, "head"):
            return load_file(folder / _SAFETENSORS)
    path = folder / _PICKLED
    if not path.is_file():
        raise InputError(
            f"{folder}: a head must hold {_SAFETENSORS} or {_PICKLED}; it has neither."
        )
    try:
        with reading_errors(folder, "head"):
            content: object = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError) as error:
        first = next(iter(str(error).splitlines()), "it ends early")
        raise InputError(f"{path} must hold tensors only: {first}") from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise InputError(f"{path} must hold tensors by name; it holds something else.")
    return content
