"""What the files of a model say before its weights are read, and why reading them can fail."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from echo_policies.errors import InputError, MissingExtraError
from gpu_backend.exits import is_out_of_memory
from gpu_backend.gguf_header import read_general

# What transformers would otherwise take from the defaults of the architecture.
_NEEDED_KEYS: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def require_model(path: Path) -> None:
    """Refuse a path that cannot hold a model.

    Raises:
        InputError: it does not exist, is a directory without config.json, or no .gguf file.
    """
    if not path.exists():
        raise InputError(
            f"model: {path} does not exist. Give a local model directory, a .gguf file, or a name "
            "that `run_gpu models` lists."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"model: the directory {path} holds no config.json.")
    if path.is_file() and path.suffix != ".gguf":
        raise InputError(
            f"model: {path} must be a directory or a .gguf file; got the suffix {path.suffix!r}."
        )


def check_architecture(path: Path) -> None:
    """Refuse a model that transformers does not know, or whose shape it would have to guess.

    Raises:
        InputError: naming the architecture, or the missing key of config.json.
    """
    if path.is_file():
        _check_gguf(path)
    else:
        _check_config(path / "config.json")


def num_parameters(path: Path) -> int:
    """Parameters in the weights files of a model."""
    if path.is_file():
        from gguf import GGUFReader

        return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    return sum(_safetensors_parameters(file) for file in sorted(path.glob("*.safetensors")))


@contextmanager
def reading_errors(path: Path, what: str, bytes_per_parameter: int | None = None) -> Iterator[None]:
    """Turn what transformers raises on an unreadable model into one sentence.

    Args:
        path: the model.
        what: the part that is read, such as ``model``.
        bytes_per_parameter: of the arithmetic asked for, to say how much memory is needed.

    Raises:
        InputError: always in place of the original.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except MemoryError as error:
        raise _no_memory(path, bytes_per_parameter) from error
    except SafetensorError as error:
        raise InputError(
            f"{path}: the weights cannot be read: {_first_line(error)}. A .safetensors file is cut "
            "short or damaged; fetch it again."
        ) from error
    except StrictDataclassError as error:
        last = str(error).strip().splitlines()[-1].strip()
        raise InputError(f"{path}: config.json cannot be used: {last}") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise _no_memory(path, bytes_per_parameter) from error
        raise InputError(f"{path}: the {what} cannot be read: {_first_line(error)}") from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        # The tokenizers library knows no other kind.
        raise InputError(f"{path}: the {what} cannot be read: {_first_line(error)}") from error


def check_weights(path: Path, loading: dict[str, Any]) -> None:
    """Refuse weights that are not all there: transformers would fill the gaps at random.

    Args:
        path: the model.
        loading: what ``from_pretrained(..., output_loading_info=True)`` tells.

    Raises:
        InputError: naming the first weight that is missing or has another shape.
    """
    faults = sorted(map(str, loading.get("missing_keys", ())))
    faults += [str(entry[0]) for entry in loading.get("mismatched_keys", ())]
    if faults:
        raise InputError(
            f"{path}: the weights file must hold every weight of the architecture; {faults[0]} and "
            f"{len(faults) - 1} more are missing or have another shape. Fetch the model again, or "
            "use another file of it."
        )


def _check_gguf(path: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("Reading a GGUF file", "models")
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    architecture = str(read_general(path).get("general.architecture", ""))
    # transformers spells a few of them its own way, such as qwen2_moe for qwen2moe.
    plain = {name.replace("_", "").replace("-", "") for name in GGUF_SUPPORTED_ARCHITECTURES}
    if architecture.replace("_", "").replace("-", "") not in plain:
        raise InputError(
            f"{path}: transformers must read the GGUF architecture; it does not read "
            f"{architecture!r}. It reads {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}. "
            "Use the model's .safetensors directory."
        )


def _check_config(path: Path) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} must be JSON: {error}.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path} must have the key 'model_type', which names the architecture.")
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{path}: transformers {transformers.__version__} knows no architecture {kind!r}; a "
            "newer one may: pip install -U transformers."
        )
    if "text_config" in config:  # its keys stand in parts, by another name in each architecture
        return
    known = CONFIG_MAPPING[kind]
    for key in _NEEDED_KEYS:
        spelled = known.attribute_map.get(key, key)
        if key not in config and spelled not in config and hasattr(known, spelled):
            raise InputError(f"{path} must have the key {spelled!r}; it lacks it.")


def _no_memory(path: Path, bytes_per_parameter: int | None) -> InputError:
    from rich.filesize import decimal

    needed = ""
    if bytes_per_parameter is not None:
        size = decimal(num_parameters(path) * bytes_per_parameter)
        needed = f"; its weights alone take {size} in this dtype"
    return InputError(
        f"{path} does not fit into this machine's memory{needed}: use --dtype bfloat16, a smaller "
        "model, or a machine with more memory."
    )


def _safetensors_parameters(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(math.prod(t["shape"]) for key, t in header.items() if key != "__metadata__")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
