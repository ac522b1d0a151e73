"""Models and tokenizers from a local directory or a GGUF file; `sources` brings them there."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from echo_policies.errors import InputError, MissingExtraError
from gpu_backend.config import DtypeName
from gpu_backend.gguf_header import read_general
from gpu_backend.half_products import needs_widening, widen_linear_layers
from gpu_backend.model_files import (
    check_architecture,
    check_weights,
    reading_errors,
    require_model,
)
from gpu_backend.prompt_lookup import MAX_NGRAM
from traces.schema import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Converters fill a vocabulary up to the width of the logits with such names.
_PADDING_TOKEN = re.compile(r"\[PAD\d+\]")
# A folder of the hub's cache is named by the revision that it holds.
_REVISION = re.compile(r"[0-9a-f]{40}")


def describe_model(path: Path, dtype: DtypeName) -> ModelInfo:
    """Name, digest and form of a model's weights, without loading them.

    Raises:
        InputError: the path does not exist or holds no model.
    """
    require_model(path)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        digest = _sha256(files[0]) if len(files) == 1 else ""
        return ModelInfo(name=path.name, digest=digest, dtype=dtype, weights=_safetensors(path))
    entries = read_general(path)
    return ModelInfo(
        name=str(entries.get("general.name", path.stem)),
        digest=_sha256(path),
        dtype=dtype,
        weights=f"GGUF {_file_type(entries)}, dequantised",
    )


def describe_lookup(model: ModelInfo | None = None) -> ModelInfo:
    """Prompt lookup in the place of a draft model, or before it."""
    contexts = f"contexts of 1 to {MAX_NGRAM} tokens"
    if model is None:
        return ModelInfo(name="prompt lookup", weights=contexts)
    update = {"name": f"prompt lookup + {model.name}", "weights": f"{contexts}; {model.weights}"}
    return model.model_copy(update=update)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Tokenizer of a model directory or GGUF file.

    Raises:
        InputError: the path does not exist or holds no tokenizer that can be read.
    """
    require_model(path)
    _require_transformers()
    from transformers import AutoTokenizer

    check_architecture(path)
    source, options = _source(path)
    with reading_errors(path, "tokenizer"):
        loaded = AutoTokenizer.from_pretrained(source, **options)
    return cast("PreTrainedTokenizerBase", loaded)


def load_model(path: Path, dtype: DtypeName, device: torch.device | None = None) -> PreTrainedModel:
    """Causal language model in evaluation mode; GGUF weights are dequantised.

    Args:
        path: of the model.
        dtype: of weights and arithmetic.
        device: where it goes; the CPU by default.

    Raises:
        InputError: the path does not exist or holds no model that can be read.
        MissingExtraError: the extra ``[models]`` is not installed.
    """
    require_model(path)
    _require_transformers()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    check_architecture(path)
    source, options = _source(path)
    if "gguf_file" in options:
        from transformers import GgufConfig

        # Packed weights would be unpacked again by every matrix product.
        options["quantization_config"] = GgufConfig(dequantize=True)
    kind: torch.dtype = getattr(torch, dtype)
    with reading_errors(path, "model", kind.itemsize):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=kind, output_loading_info=True, **options
        )
    model, loading = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    check_weights(path, loading)
    model.train(False)
    torch.nn.Module.to(model, device)
    if needs_widening(model.dtype, model.device):
        widen_linear_layers(model)
    return model


def real_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Token ids up to the last real one: padding entries at the end are not counted."""
    vocab = tokenizer.get_vocab()
    return 1 + max(i for text, i in vocab.items() if not _PADDING_TOKEN.fullmatch(text))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over every real token and its id."""
    vocab = tokenizer.get_vocab()
    size = real_vocab_size(tokenizer)
    digest = hashlib.sha256()
    for text, i in sorted(vocab.items(), key=lambda item: item[1]):
        if i < size:
            digest.update(f"{i}\t{text}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def require_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a pair in which one token id means two texts.

    Raises:
        InputError: naming the first token id that differs.
    """
    texts = [{i: text for text, i in tok.get_vocab().items()} for tok in (target, draft)]
    sizes = [real_vocab_size(tok) for tok in (target, draft)]
    for i in range(max(sizes)):
        ours, theirs = (
            text.get(i) if i < n else None for text, n in zip(texts, sizes, strict=True)
        )
        if ours != theirs:
            raise InputError(
                "draft: target and draft must share one vocabulary; token "
                f"{i} is {ours!r} in the target and {theirs!r} in the draft. "
                "Use a draft of the same model family."
            )


def context_limit(model: PreTrainedModel) -> int | None:
    """Positions that a model was made for, where its configuration says so."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("Loading a model", "models")


def _source(path: Path) -> tuple[str, dict[str, Any]]:
    """First argument and options of ``from_pretrained``."""
    offline: dict[str, Any] = {"local_files_only": True}
    if path.is_dir():
        return str(path), offline
    return str(path.parent), {**offline, "gguf_file": path.name}


def _safetensors(folder: Path) -> str:
    """Form of a directory's weights, with the hub's revision where the folder tells it."""
    is_snapshot = folder.parent.name == "snapshots" and _REVISION.fullmatch(folder.name)
    return f"safetensors, hub revision {folder.name}" if is_snapshot else "safetensors"


def _file_type(entries: dict[str, object]) -> str:
    """Quantisation of a GGUF file in words, such as ``Q4_K_M``."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("Reading a GGUF file", "models")
    from gguf import LlamaFileType

    number = entries.get("general.file_type")
    if not isinstance(number, int) or number not in list(LlamaFileType):
        return "of unknown type"
    return str(LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
