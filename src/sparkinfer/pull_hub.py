"""`hf:user/repo[:quant]`: pick the GGUF file of a hub repository and fetch it with huggingface-hub.

The library keeps its own cache, resumes a broken download and honours HF_HUB_OFFLINE.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import DeviceError, GGUFError, MissingFileError, OptionError
from sparkinfer.pull import sha256_of

Report = Callable[[str, int, int], None]
DEFAULT_QUANT = "Q4_K_M"
_SPEC = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `sha256` is None for one that is not in large-file storage."""

    name: str
    sha256: str | None


def fetch_from_hub(spec: str, report: Report) -> Path:
    """Return the local file of `hf:user/repo[:quant]`, the first shard of a split one.

    A file that is downloaded now is compared with the SHA-256 that the hub gives for it.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise OptionError(f"model {spec!r} is not hf:user/repo or hf:user/repo:QUANT")
    repo, quant = match["repo"], match["quant"]
    shards = choose(_listing(repo), repo, quant)
    first, *_ = [_fetch(repo, file, report) for file in shards]
    return first


def choose(files: list[HubFile], repo: str, quant: str | None) -> list[HubFile]:
    """Return the shards of the one model that `quant` names, in order.

    Without `quant`: Q4_K_M, or the only model there is.
    Raises: MissingFileError that lists the repository's GGUF files.
    """
    models: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        base = file.name.rpartition("/")[2].lower()
        if base.endswith(".gguf") and not base.startswith("mmproj"):
            models.setdefault(_SHARD.sub("", file.name), []).append(file)
    if quant is None and len(models) == 1:
        return next(iter(models.values()))
    found = [name for name in models if _has_quant(name, quant or DEFAULT_QUANT)]
    if len(found) == 1:
        return models[found[0]]
    what = f"{len(found)} files" if found else "no file"
    names = ", ".join(models) or "no GGUF file"
    raise MissingFileError(f"{repo} has {what} for {quant or DEFAULT_QUANT}; it has: {names}")


def _has_quant(name: str, quant: str) -> bool:
    """Return whether a file's name ends in the quant, as `x-UD-Q8_0.gguf` in Q8_0 and UD-Q8_0."""
    stem = name.rpartition("/")[2].lower().removesuffix(".gguf")
    return re.search(rf"(^|[-._]){re.escape(quant.lower())}$", stem) is not None


def _listing(repo: str) -> list[HubFile]:
    from huggingface_hub import HfApi

    try:
        siblings = HfApi().model_info(repo, files_metadata=True).siblings or []
    except Exception as error:
        raise _unreachable(repo, error) from error
    return [HubFile(s.rfilename, s.lfs.sha256 if s.lfs else None) for s in siblings]


def _fetch(repo: str, file: HubFile, report: Report) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(repo, file.name), str)
    try:
        path = Path(hf_hub_download(repo, file.name))
    except Exception as error:
        raise _unreachable(f"{repo}/{file.name}", error) from error
    if not cached and file.sha256 and (found := sha256_of(path, report)) != file.sha256:
        path.resolve().unlink()
        raise GGUFError(f"{file.name} has SHA-256 {found}, expected {file.sha256}; pull it again")
    return path


def _unreachable(what: str, error: Exception) -> DeviceError:
    reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    return DeviceError(
        f"cannot get {what} from the hub: {reason}; a local file needs none: -m FILE"
    )
