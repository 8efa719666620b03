"""What is evaluated, as text on the command line, and as exact content: revisions, wheels, option sets."""

import hashlib
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparkinfer.errors import MissingFileError, OptionError, SparkError
from sparkinfer.options import OPTIONS, child_environment, resolve

Kind = Literal["git", "wheel", "options"]
OPTIONS_PREFIX = "options:"
_EVALUATORS = ("cache_dir", "model_dir", "progress", "debug", "draft")  # set for both sides alike
_TIMEOUT = 120
_SHOWN = 5  # files named in a message


class ConflictError(SparkError):
    """The candidate cannot be merged onto the base."""

    exit_code = 73


@dataclass(frozen=True, slots=True)
class Source:
    """One side before it is built. `tree` is a git tree, or the digest of an installed package's files."""

    kind: Kind
    name: str
    sha: str | None = None
    merged_onto: str | None = None
    tree: str | None = None
    wheel: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sources:
    """Both sides, and what has to be said about them."""

    base: Source
    candidate: Source
    repository: Path | None = None
    notes: tuple[str, ...] = ()


def kind_of(text: str) -> Kind:
    """Return what a side's text names: `options:...`, a file that ends in .whl, or else a git revision."""
    if text.startswith(OPTIONS_PREFIX):
        return "options"
    return "wheel" if text.endswith(".whl") else "git"


def resolve_sources(
    base: str,
    candidate: str,
    *,
    repository: Path,
    common: Mapping[str, str],
    allow_dirty: bool = False,
) -> Sources:
    """Return both sides with their exact content. `common` options hold for both.

    Raises: OptionError for unlike kinds, unknown revisions, dirty trees; ConflictError; MissingFileError.
    """
    kinds = kind_of(base), kind_of(candidate)
    if kinds[0] != kinds[1]:
        raise OptionError(
            f"base is a {kinds[0]} and candidate a {kinds[1]}; give two revisions, two wheels or two option sets"
        )
    _check_options(common)
    if kinds[0] == "options":
        return _option_sets(base, candidate, common, allow_dirty)
    if kinds[0] == "wheel":
        sides = [_wheel(text, common) for text in (base, candidate)]
        return Sources(sides[0], sides[1])
    return _revisions(Git(repository), base, candidate, common, allow_dirty)


def parse_options(text: str) -> dict[str, str]:
    """Return the options of `name=value,name=value`. Raises: OptionError for one that is not accepted."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise OptionError(f"{part!r} is not an option; expected NAME=VALUE, like spec=off")
        found[name.strip().replace("-", "_")] = value.strip()
    _check_options(found)
    return found


def _check_options(given: Mapping[str, str]) -> None:
    known = [option.name for option in OPTIONS if option.name not in _EVALUATORS]
    for name in given:
        if name not in known:
            raise OptionError(f"{name!r} is no option of a side; known: {', '.join(known)}")
    resolve(given, environ={})  # names what a value may be


# Option sets


def _option_sets(
    base: str, candidate: str, common: Mapping[str, str], allow_dirty: bool
) -> Sources:
    package = Path(__file__).parents[1]
    sha, notes = _installed_revision(package, allow_dirty)
    digest = package_digest(package)
    sides = [
        Source("options", text, sha=sha, tree=digest, options={**common, **_own(text)})
        for text in (base, candidate)
    ]
    return Sources(sides[0], sides[1], notes=notes)


def _own(text: str) -> dict[str, str]:
    return parse_options(text.removeprefix(OPTIONS_PREFIX))


def _installed_revision(package: Path, allow_dirty: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return the commit of a package that runs from a checkout, None for an installed one."""
    try:
        git = Git(package)
    except (OptionError, MissingFileError):
        return None, ()
    if git.ignores(package):  # an environment inside some repository
        return None, ()
    changed = git.changed(package)
    if changed and not allow_dirty:
        raise OptionError(
            f"this installation runs from a working tree with uncommitted changes ({_named(changed)});"
            " commit them, or --allow-dirty measures the files as they are and says so"
        )
    note = f"the package's files differ from its commit ({_named(changed)}); they were measured as they are"
    return git.commit("HEAD"), (note,) if changed else ()


def package_digest(package: Path) -> str:
    """Return the SHA-256 over names and contents of a package's files, byte code left out."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(package).as_posix()} {content}\n".encode())
    return total.hexdigest()


# Wheels


def _wheel(text: str, common: Mapping[str, str]) -> Source:
    path = Path(text).expanduser()
    if not path.is_file():
        raise MissingFileError(f"no wheel at {path}")
    return Source("wheel", path.name, wheel=path.resolve(), options=dict(common))


# Git


def _revisions(
    git: "Git", base: str, candidate: str, common: Mapping[str, str], allow_dirty: bool
) -> Sources:
    notes = []
    if changed := git.changed():
        if not allow_dirty:
            raise OptionError(
                f"the working tree has uncommitted changes ({_named(changed)}), which neither side would have;"
                " commit them, or --allow-dirty evaluates the commits as they are and says so"
            )
        notes.append(f"uncommitted changes were not evaluated: {_named(changed)}")
    onto, tip = git.commit(base), git.commit(candidate)
    tree = git.merged_tree(onto, tip)
    if tree == git.tree(onto):
        notes.append("merging the candidate onto the base changes no file: both sides are the same")
    first = Source("git", base, sha=onto, tree=git.tree(onto), options=dict(common))
    second = Source("git", candidate, tip, onto, tree, options=dict(common))
    return Sources(first, second, git.root, tuple(notes))


class Git:
    """Read-only questions to a repository; nothing here changes its working tree, index or refs."""

    def __init__(self, folder: Path) -> None:
        """Raises: OptionError where `folder` is in no repository, MissingFileError without git."""
        self.root = folder
        found = self._run("rev-parse", "--show-toplevel")
        if found.returncode:
            raise OptionError(f"{folder} is in no git repository; --repo names another folder")
        self.root = Path(found.stdout.decode().strip())

    def commit(self, revision: str) -> str:
        """Return the full name of a commit. Raises: OptionError for an unknown revision."""
        found = self._run(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )
        if found.returncode:
            raise OptionError(f"{revision!r} is no revision of {self.root}")
        return found.stdout.decode().strip()

    def tree(self, commit: str) -> str:
        return self._checked("rev-parse", f"{commit}^{{tree}}").decode().strip()

    def changed(self, below: Path | None = None) -> list[str]:
        """Return files with uncommitted changes, untracked ones included."""
        output = self._checked("status", "--porcelain", "-z", "--", str(below or self.root))
        return [entry[3:] for entry in output.decode(errors="replace").split("\0") if entry[3:]]

    def ignores(self, path: Path) -> bool:
        return self._run("check-ignore", "--quiet", str(path)).returncode == 0

    def merged_tree(self, base: str, candidate: str) -> str:
        """Return the tree of the candidate merged onto the base, without touching any branch.

        Raises: ConflictError with the files that conflict, OptionError for unrelated histories.
        """
        done = self._run("merge-tree", "--write-tree", "--name-only", "-z", base, candidate)
        fields = done.stdout.decode(errors="replace").split("\0")
        if done.returncode == 0:
            return fields[0]
        if done.returncode == 1:
            files = list(dict.fromkeys(fields[1 : fields.index("", 1)]))
            raise ConflictError(
                f"{candidate[:12]} cannot be merged onto {base[:12]}: {_named(files)};"
                " rebase the candidate and evaluate it again"
            )
        reason = done.stderr.decode(errors="replace").strip()
        raise OptionError(f"cannot merge {candidate[:12]} onto {base[:12]}: {reason}")

    def export(self, tree: str, folder: Path) -> None:
        """Write a tree's files into a folder, nothing of the working tree among them.

        An index of its own instead of `git archive`, which leaves out what the tree says to leave out.
        """
        with tempfile.TemporaryDirectory(prefix="sparkinfer-eval-") as name:
            index = {"GIT_INDEX_FILE": str(Path(name) / "index")}
            self._checked("read-tree", tree, extra=index)
            self._checked("checkout-index", "--all", f"--prefix={folder}/", extra=index)

    def _checked(self, *arguments: str, extra: Mapping[str, str] | None = None) -> bytes:
        done = self._run(*arguments, extra=extra)
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip()
            raise OptionError(f"git {arguments[0]} failed in {self.root}: {reason}")
        return done.stdout

    def _run(
        self, *arguments: str, extra: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[bytes]":
        command = ["git", "-C", str(self.root), *arguments]
        # A hook or an editor has set these for another repository.
        environment = {k: v for k, v in child_environment().items() if not k.startswith("GIT_")}
        # Asking for the status writes no index.
        environment |= {"GIT_OPTIONAL_LOCKS": "0", **(extra or {})}
        try:
            return subprocess.run(
                command, capture_output=True, check=False, timeout=_TIMEOUT, env=environment
            )
        except FileNotFoundError:
            raise MissingFileError(
                "git is not installed; it is needed to evaluate revisions"
            ) from None


def _named(files: list[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(files[:_SHOWN]) + more
