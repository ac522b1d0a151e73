"""Models of a hub: its own weights, in the cache that transformers and other tools share."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from echo_policies.errors import InputError, MissingExtraError
from gpu_backend.sources.errors import (
    Report,
    UnreachableError,
    disk_errors,
    require_space,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_REPOSITORY: Final = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>[\w./-]+\.gguf))?")
_INDEX: Final = "model.safetensors.index.json"
_SIDE_FILES: Final = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)"
    r"\.json|merges\.txt|tokenizer\.model|chat_template\.jinja|model\.safetensors\.index\.json"
)
# Some repositories hold a second copy of the weights, named consolidated.
_WEIGHTS: Final = re.compile(r"(?!consolidated).*\.safetensors")


def split_name(name: str) -> tuple[str, str | None] | None:
    """Repository and GGUF file of ``OWNER/NAME[/FILE.gguf]``; None where it is no such name."""
    match = _REPOSITORY.fullmatch(name)
    return None if match is None else (match["repo"], match["file"])


def make_api() -> HfApi:
    """Client of the hub that HF_ENDPOINT names.

    Raises:
        MissingExtraError: the extra ``[models]`` is not installed.
    """
    if not is_installed():
        raise MissingExtraError("Fetching a model from a hub", "models")
    from huggingface_hub import HfApi

    return HfApi()


def is_installed() -> bool:
    """Whether the hub's library is there."""
    return importlib.util.find_spec("huggingface_hub") is not None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids asking the hub."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def is_reachable(repo: str) -> bool:
    """Whether the hub may be asked and answers for a repository within a few seconds."""
    if not is_installed() or is_offline():
        return False
    try:
        with _hub_errors(repo):
            make_api().model_info(repo, timeout=3)
    except InputError:
        return False
    return True


def cached(name: str) -> Path | None:
    """A whole model in the hub's cache: a snapshot folder or a GGUF file; None without one."""
    if not is_installed():
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    parts = split_name(name)
    if parts is None:
        return None
    repo, file = parts
    found = try_to_load_from_cache(
        repo, file or "config.json", cache_dir=constants.HF_HUB_CACHE, revision="main"
    )
    if not isinstance(found, str):
        return None
    if file is not None:
        return Path(found)
    folder = Path(found).parent
    return folder if _is_whole(folder) else None


def cached_names() -> list[str]:
    """Repositories in the hub's cache that can be loaded."""
    if not is_installed():
        return []
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        info = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    names = sorted(repo.repo_id for repo in info.repos if repo.repo_type == "model")
    return [name for name in names if cached(name)]


def fetch(name: str, report: Report) -> Path:
    """Fetch the safetensors weights of a repository, or the GGUF file named, into its cache.

    Files that are there are not fetched again.

    Raises:
        UnreachableError: the hub cannot be reached, or HF_HUB_OFFLINE forbids it.
        InputError: the hub does not give the repository or file, or the disk is full.
    """
    parts = split_name(name)
    if parts is None:
        raise InputError(
            f"A name on the hub must be OWNER/NAME or OWNER/NAME/FILE.gguf; got {name!r}."
        )
    repo, file = parts
    api = make_api()
    if is_offline():
        raise UnreachableError("HF_HUB_OFFLINE forbids asking the hub")
    with disk_errors(_cache_folder()), _hub_errors(repo):
        info = api.model_info(repo, files_metadata=True, timeout=10)
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
        wanted = _wanted(repo, sizes, file)
        return _download(api, name, {f: sizes[f] for f in wanted}, report)


def _download(api: HfApi, name: str, sizes: dict[str, int], report: Report) -> Path:
    from huggingface_hub import try_to_load_from_cache

    repo, file = split_name(name) or ("", None)
    cache = _cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    there = {f for f in sizes if isinstance(try_to_load_from_cache(repo, f, cache_dir=cache), str)}
    require_space(cache, sum(size for f, size in sizes.items() if f not in there))
    total, done = sum(sizes.values()), 0
    paths = []
    for wanted, size in sizes.items():
        bar = _bar_class(lambda n, done=done: report(repo, min(done + n, total), total))
        path = api.hf_hub_download(repo, wanted, cache_dir=cache, tqdm_class=bar)
        paths.append(Path(path))
        done += size
        report(repo, done, total)
    if file is not None:
        return paths[0]
    folder = next(path.parent for path in paths if path.name == "config.json")
    if not all((folder / f).exists() for f in sizes):
        raise InputError(f"{repo} changed while it was fetched: give the same command again.")
    return folder


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _wanted(repo: str, sizes: dict[str, int], file: str | None) -> list[str]:
    """Files to fetch of a repository, small ones first."""
    if file is not None:
        if file not in sizes:
            listed = ", ".join(f for f in sizes if f.endswith(".gguf")) or "none"
            raise InputError(f"{repo} holds no file {file}; its GGUF files: {listed}.")
        return [file]
    weights = [f for f in sizes if _WEIGHTS.fullmatch(f) and "/" not in f]
    if "model.safetensors" in weights:
        weights = ["model.safetensors"]
    if not weights or "config.json" not in sizes:
        ggufs = [f for f in sizes if f.endswith(".gguf")]
        hint = f" Name one of its GGUF files, such as {repo}/{ggufs[0]}." if ggufs else ""
        raise InputError(f"{repo} holds no config.json with .safetensors weights.{hint}")
    return [f for f in sizes if _SIDE_FILES.fullmatch(f)] + sorted(weights)


def _is_whole(folder: Path) -> bool:
    index = folder / _INDEX
    if not index.exists():
        return (folder / "model.safetensors").exists()
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / shard).exists() for shard in shards)


def _bar_class(report_bytes: Any) -> Any:
    """A tqdm class that draws nothing and reports its count; the hub makes its own objects of it.

    The hub may keep two bars for one file, received and written; the larger count is reported.
    """
    from tqdm import tqdm

    most = 0

    class _Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            self.n += n or 0
            if self.n > most:
                most = int(self.n)
                report_bytes(most)

    return _Bar


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn an answer of the hub, or none, into one sentence."""
    from huggingface_hub import errors

    # The base error of the HTTP library, whose name changes between versions of the hub's.
    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    transfer_error: type[Exception] = getattr(errors, "XetDownloadError", http_error)
    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{repo} is gated: accept its terms on the hub and log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"The hub gives no repository {repo}: it does not exist, or it is private and needs "
            "`hf auth login`."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UnreachableError("the hub cannot be reached") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no status")
        if isinstance(status, int) and status >= 500:  # noqa: PLR2004 - the server's own fault
            raise UnreachableError(f"the hub answered with status {status}") from error
        raise InputError(f"The hub refused {repo} with status {status}.") from error
    except http_error as error:
        raise UnreachableError("the hub cannot be reached") from error
    except transfer_error as error:
        raise InputError(
            f"The transfer of {repo} broke off: give the same command again."
        ) from error
    except errors.HFValidationError as error:
        raise InputError(f"{repo!r} is no name of a repository: {error}") from error
