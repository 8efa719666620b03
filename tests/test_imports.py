"""The house's import rules, read from the source itself (docs/architecture.md explains them)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparkinfer

PACKAGE = Path(sparkinfer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# An area may import itself and the areas on lines above its own, nothing beside or below.
LEVELS = (
    ("errors",),
    ("machine", "registry"),
    ("options",),
    ("quant", "tokenizer"),
    ("chat",),
    ("gguf",),
    ("backend",),
    ("kernels",),
    ("state", "sampling"),
    ("models",),
    ("decoding",),
    ("dflash",),
    ("engine",),
    ("server", "bench", "training", "pull"),
    ("evaluation",),
    ("cli",),
    ("__main__", ""),  # "" is the package's own __init__: public names only
)
# Modules that belong to an area without living in its folder.
HELPERS = {
    "vocabulary": "tokenizer",
    "pretokenizers": "tokenizer",
    "template_process": "chat",
    "template_worker": "chat",
    "pull_hub": "pull",
}
LEVEL_OF = {area: level for level, areas in enumerate(LEVELS) for area in areas}
HEAVY = {"torch", "triton"}
MAY_BE_HEAVY = ("backend/cuda.py", "kernels/triton_*.py", "*/triton_*.py", "training/*.py")
ENVIRONMENT = {"environ", "getenv", "environb", "putenv", "unsetenv"}
LONGEST, LONGEST_KERNEL = 500, 800


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def area_of(module: str) -> str:
    name = [*module.split("."), ""][1]
    return HELPERS.get(name, name)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker sees: an annotation is no dependency."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            continue
        yield child
        yield from runtime_nodes(child)


def imports_of(path: Path, source: str) -> Iterator[str]:
    """Full names of the modules that a file imports, relative imports resolved."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name == "sparkinfer":  # from sparkinfer import machine
                yield from (f"sparkinfer.{alias.name}" for alias in node.names)
            else:
                yield name


def own_imports(path: Path) -> set[str]:
    names = imports_of(path, path.read_text())
    return {name for name in names if name.split(".")[0] == "sparkinfer"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_module_has_a_level(path: Path) -> None:
    assert area_of(module_of(path)) in LEVEL_OF


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_down(path: Path) -> None:
    here = area_of(module_of(path))
    wrong = [
        name
        for name in own_imports(path)
        if (there := area_of(name)) != here and LEVEL_OF[there] >= LEVEL_OF[here]
    ]
    assert not wrong, f"{relative(path)} ({here}) may not import {wrong}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_torch_and_triton_only_where_they_are_allowed(path: Path) -> None:
    used = {name.split(".")[0] for name in imports_of(path, path.read_text())} & HEAVY
    allowed = any(Path(relative(path)).match(pattern) for pattern in MAY_BE_HEAVY)
    assert not used or allowed, f"{relative(path)} imports {used}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_options_reads_the_environment(path: Path) -> None:
    tree = ast.parse(path.read_text())
    reads = {
        getattr(node, "attr", None) or getattr(node, "name", None)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.alias)
    }
    assert relative(path) == "options.py" or not reads & ENVIRONMENT


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_short(path: Path) -> None:
    longest = LONGEST_KERNEL if relative(path).startswith("kernels/") else LONGEST
    assert len(path.read_text().splitlines()) <= longest


def test_the_walk_sees_what_it_must() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "from .errors import SparkError\n"
        "from . import cli\n"
        "if TYPE_CHECKING:\n    import sparkinfer.engine\n"
        "def f():\n    import torch.nn\n"
        "    from sparkinfer import bench\n"
    )
    found = set(imports_of(PACKAGE / "registry.py", source))
    assert found == {
        "typing",
        "sparkinfer.errors",
        "sparkinfer.cli",
        "torch.nn",
        "sparkinfer.bench",
    }


def test_modules_of_tests_and_benchmarks_have_names_of_their_own() -> None:
    """Tests import both by name from one path."""
    tests = Path(__file__).parent
    found = [*tests.rglob("*.py"), *(tests.parent / "benchmarks").glob("*.py")]
    modules = [path for path in found if not path.is_relative_to(tests / "data")]
    names = [path.stem for path in modules if path.stem not in ("__init__", "conftest")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
