"""`sparkinfer doctor`: what this machine offers, what the engine uses of it, what is wrong."""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparkinfer import machine
from sparkinfer.cli.console import screen
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.gguf.reader import GGUFFile

EXIT_PROBLEM = 1
_PACKAGES = ("sparkinfer", "numpy", "numba", "llvmlite", "tokenizers", "jinja2", "huggingface-hub")
_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vnni",
    "avx512bf16",
    "neon",
    "dotprod",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `problem` says what to do about it, "" where all is well."""

    section: str
    name: str
    value: str
    problem: str = ""


@verb(ProcessFlags("threads", "isa", "cache_dir", "draft"))
def command(
    *,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Also say whether this model fits.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    options: Options,
) -> int:
    """Check the machine and the set-up; exit 1 when something needs attention."""
    findings = [*_software(), *_cpu(options), *_memory(), *_folders(options), *_gpu()]
    if model is not None:
        findings += _model(model, options)
    if as_json:
        import json

        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return EXIT_PROBLEM if any(finding.problem for finding in findings) else 0


def _software() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    yield Finding("software", "python", f"{platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        try:
            yield Finding("software", package, version(package))
        except PackageNotFoundError:
            yield Finding("software", package, "missing", "run: pip install sparkinfer")


def _cpu(options: Options) -> Iterator[Finding]:
    from sparkinfer.backend.isa import choose_isa, cpu_features

    present = cpu_features()
    isa = choose_isa(options.text("isa"))
    yield Finding("cpu", "model", machine.cpu_model())
    yield Finding("cpu", "features", " ".join(f for f in _FEATURES if f in present) or "none known")
    yield Finding("cpu", "instruction set", f"{isa.name} ({isa.reason})")
    allowed, quota = machine.allowed_cpus(), machine.cpu_quota()
    cores = (
        f"{machine.allowed_cores()} physical, {len(allowed)} of {os.cpu_count()} logical allowed"
    )
    yield Finding("cpu", "cores", cores)
    yield Finding("cpu", "quota", "none" if quota is None else f"{quota:g} cores (control group)")
    yield _threads(options)
    yield _load()


def _threads(options: Options) -> Finding:
    setting = options.setting("threads")
    best = machine.default_threads()
    too_many = isinstance(setting.value, int) and setting.value > best
    problem = f"more than the {best} cores there are: decoding slows down" if too_many else ""
    return Finding("cpu", "threads", f"{setting.value} ({setting.origin})", problem)


def _load() -> Finding:
    busy = os.getloadavg()[0]
    crowded = busy > 0.5 * len(machine.allowed_cpus())
    note = " (other work is running: measurements taken now are low)" if crowded else ""
    return Finding("cpu", "load, one minute", f"{busy:.2f}{note}")


def _memory() -> Iterator[Finding]:
    limit = machine.memory_limit()
    yield Finding("memory", "total", _gib(machine.memory_total()))
    yield Finding("memory", "available", _gib(machine.available_memory()))
    yield Finding("memory", "limit", "none" if limit is None else f"{_gib(limit)} (control group)")


def _folders(options: Options) -> Iterator[Finding]:
    for name, label in (("cache_dir", "cache"), ("model_dir", "models")):
        path = options.path(name)
        reason = _why_unwritable(path)
        flag = options.setting(name).option.flag[0]
        problem = f"{reason}; {flag} names another" if reason else ""
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        yield Finding("folders", label, f"{path} ({_gib(free)} free)", problem)
    names = sorted(p.name for p in options.path("model_dir").glob("*.gguf"))
    yield Finding("folders", "pulled models", ", ".join(names) or "none")


def _why_unwritable(path: Path) -> str:
    """Return why no file can be written there, "" where one can; makes a missing folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"probe")
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return ""


def _gpu() -> Iterator[Finding]:
    from importlib.metadata import version

    from sparkinfer.backend.choose import why_no_gpu

    yield Finding("gpu", "NVIDIA GPU", why_no_gpu() or "usable")
    tool = shutil.which("nvidia-smi")
    fields = "--query-gpu=name,memory.total,driver_version"
    if tool is None:
        yield Finding("gpu", "device", "none found (no nvidia-smi)")
    else:
        call = [tool, fields, "--format=csv,noheader"]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=10, check=False)
            lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
        except subprocess.TimeoutExpired:
            lines = []
        for line in lines or ["nvidia-smi finds no device"]:
            yield Finding("gpu", "device", line)
    for package in ("torch", "triton"):
        found = version(package) if find_spec(package) else "not installed (extra 'cuda')"
        yield Finding("gpu", package, found)


def _model(model: str, options: Options) -> Iterator[Finding]:
    from sparkinfer.cli.console import progress
    from sparkinfer.gguf.reader import open_gguf
    from sparkinfer.pull import locate

    with progress(options) as report:
        path = locate(model, options.path("model_dir"), report)
    with open_gguf(path) as file:
        needed = sum(info.n_bytes for info in file.tensors.values())
        architecture = file.architecture
        cache = _cache(file)
        draft = _draft(file, options.optional_path("draft"))
    available, where = _room()
    short = f"{_gib(needed)} of weights and {_gib(available)} {where}: pull a smaller quant"
    yield Finding("model", "file", f"{path} ({architecture})")
    yield Finding("model", "weights", _gib(needed), short if needed > available else "")
    if cache:
        yield Finding("model", "cache", cache)
    yield draft


def _draft(file: "GGUFFile", given: Path | None) -> Finding:
    """Say which draft speculation would take, and whether it fits the model."""
    from sparkinfer.dflash.shipped import shipped_draft

    path = given or shipped_draft(file)
    if path is None:
        return Finding("model", "draft", "none: tokens come one at a time; -md takes one")
    name = str(path) if given else f"{path.name}, which comes with this package"
    return Finding("model", "draft", name, _why_unfit(file, path))


def _why_unfit(file: "GGUFFile", path: Path) -> str:
    from sparkinfer.dflash.draft import check_draft
    from sparkinfer.errors import SparkError
    from sparkinfer.models.config import read_config

    try:
        check_draft(path, read_config(file))
    except SparkError as error:
        return str(error)
    return ""


def _cache(file: "GGUFFile") -> str:
    """Return what keys and values of a sequence take, "" for a model that cannot be run here."""
    from sparkinfer.errors import SparkError
    from sparkinfer.models.config import read_config
    from sparkinfer.models.memory import cache_shape, usual_context
    from sparkinfer.state.kv_cache import BLOCK

    try:
        config = read_config(file)
    except SparkError:
        return ""
    context = usual_context(config)
    size = _gib(cache_shape(config, "f16").n_bytes(context))
    text = f"{size} for a context of {context} (float16)"
    if config.head_size % BLOCK:
        return text
    return f"{text}, {_gib(cache_shape(config, 'q8_0').n_bytes(context))} with --kv-cache q8_0"


def _room() -> tuple[int, str]:
    """Return the bytes that are free where models run by default, and where that is."""
    from sparkinfer.backend.choose import why_no_gpu

    if why_no_gpu():
        return machine.available_memory(), "available"
    from sparkinfer.backend.cuda import free_memory

    return free_memory(), "free on the GPU (without --device cpu)"


def _gib(n_bytes: int) -> str:
    if n_bytes < 1 << 30:
        return f"{n_bytes / (1 << 20):.0f} MiB"
    return f"{n_bytes / (1 << 30):.1f} GiB"


def _print(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    section = ""
    for finding in findings:
        title = finding.section if finding.section != section else ""
        section = finding.section
        table.add_row(Text(title, style="bold"), finding.name, Text(finding.value))
        if finding.problem:
            table.add_row("", "", Text(f"! {finding.problem}", style="yellow"))
    screen().print(table)
    count = sum(bool(finding.problem) for finding in findings)
    print("all well" if count == 0 else f"{count} to look at")
