"""What both sides read: model files by digest, prompts as text and as the base's tokens."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.evaluation import codec
from sparkinfer.evaluation.correctness import Question
from sparkinfer.evaluation.guards import GUARD_TOKENS, context_text, guard_tasks
from sparkinfer.evaluation.process import Run
from sparkinfer.evaluation.record import Guard, InputFile, Scope
from sparkinfer.evaluation.tasks import Task, cell_tasks

Report = Callable[[str, int, int], None]
TARGET = "target"  # the name by which a guard means the scope's own target
_BLOCK = 1 << 24
_CONTEXT_ID = "texts/context"
_TEMPLATE = 256  # tokens that a chat template may add to a prompt
HELD_OUT = "held out"  # cell of the questions that are only checked, never timed
CHECKED_TOKENS = (
    128  # of each checked answer, at least: differences are known that came after a hundred
)
_QUESTIONS = 12  # prompts that are checked, at least


@dataclass(frozen=True, slots=True)
class Files:
    """The model and draft files on this machine; `guards` by the name that the scope's guards use."""

    model: Path
    draft: Path | None = None
    guards: Mapping[str, Path] = field(default_factory=dict)

    def of_guard(self, guard: Guard) -> Path:
        """Return the guard's model. Raises: OptionError where nobody said which file that is."""
        if guard.model == TARGET:
            return self.model
        if guard.model not in self.guards:
            raise OptionError(f"the scope's guard {guard.model!r} has no file; name it")
        return self.guards[guard.model]

    def bytes(self) -> int:
        """Return the size of the largest model and the draft together."""
        largest = max(_size(path) for path in (self.model, *self.guards.values()))
        return largest + (_size(self.draft) if self.draft else 0)

    def inputs(self, scope: Scope, seed: int, report: Report) -> dict[str, InputFile]:
        """Return every file by its role, with its SHA-256. Raises: MissingFileError."""
        found = {"model": _input(self.model, report)}
        if self.draft is not None:
            found["draft"] = _input(self.draft, report)
        for name, path in self.guards.items():
            found[name] = _input(path, report)
        found["prompts"] = _texts(f"prompts of scope {scope.name}", scope.prompts)
        if texts := held_out(scope, seed):
            found["held-out prompts"] = _texts(f"prompts for seed {seed}", texts)
        return found


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that one process answers: those of one model."""

    model: Path
    tasks: tuple[Task, ...]
    context: int
    primary: bool  # the target: its process has the primary cells


@dataclass(frozen=True, slots=True)
class Prompts:
    """The base's tokens of every prompt: by cell, and of each model's context text."""

    cells: Mapping[str, tuple[tuple[int, ...], ...]]
    contexts: Mapping[Path, tuple[int, ...]]
    held_out: tuple[tuple[int, ...], ...] = ()

    def questions(self) -> list[Question]:
        """Return every prompt whose answer is checked: those that are timed, and the held-out ones."""
        return [
            Question(cell, number, prompt)
            for cell, prompts in (*self.cells.items(), (HELD_OUT, self.held_out))
            for number, prompt in enumerate(prompts)
        ]

    def groups(self, scope: Scope, files: Files, *, guards: bool) -> list[Group]:
        """Return what each process of a slot has to do, the target's first."""
        tasks: dict[Path, list[Task]] = {files.model: cell_tasks(scope, self.cells)}
        for guard in scope.guards if guards else ():
            path = files.of_guard(guard)
            tasks.setdefault(path, []).extend(guard_tasks(guard, self.contexts[path]))
        return [group_of(scope, files, path, mine) for path, mine in tasks.items()]


def group_of(scope: Scope, files: Files, path: Path, tasks: Sequence[Task] = ()) -> Group:
    """Return the group of a model. Every process of a model gets the same context, whatever it is to do."""
    primary = path == files.model
    tokens = checked_tokens(scope)
    longest = longest_contexts(scope, files)[path] + max(GUARD_TOKENS, tokens)
    if primary:  # a token has at least one byte
        texts = [*(text for texts in scope.prompts.values() for text in texts), *_every_held_out()]
        longest = max(longest, max(len(text.encode()) for text in texts) + _TEMPLATE + tokens)
    return Group(path, tuple(tasks), -(-longest // 256) * 256, primary)


def checked_tokens(scope: Scope) -> int:
    """Return how many tokens of an answer are checked."""
    return max(scope.tokens, CHECKED_TOKENS)


def held_out(scope: Scope, seed: int) -> tuple[str, ...]:
    """Return prompts that nobody knows before the seed is drawn, as many as the scope's own are too few."""
    missing = _QUESTIONS - sum(map(len, scope.prompts.values())) - len(scope.contexts)
    own = {text for texts in scope.prompts.values() for text in texts}
    texts = [text for text in _every_held_out() if text not in own]
    return tuple(random.Random(f"held out:{seed}").sample(texts, max(0, missing)))


def _every_held_out() -> list[str]:
    from sparkinfer.bench.prompts import builtin_prompts

    return [prompt.text for prompt in builtin_prompts()]


def open_questions(scope: Scope, seed: int) -> list[Question]:
    """Return the questions before their tokens are known, in the order of `Prompts.questions`."""
    contexts = [
        Question(f"ctx {context}", 0, text=_CONTEXT_ID, length=context)
        for context in scope.contexts
    ]
    own = {domain: len(texts) for domain, texts in scope.prompts.items()}
    more = {HELD_OUT: len(held_out(scope, seed))}
    first, last = (
        [
            Question(cell, number, text=cell, place=number)
            for cell, count in counts.items()
            for number in range(count)
        ]
        for counts in (own, more)
    )
    return [*first, *contexts, *last]


def longest_contexts(scope: Scope, files: Files) -> dict[Path, int]:
    """Return model -> the longest context that is measured with it, 0 for none."""
    found = {files.model: max(scope.contexts, default=0)}
    for guard in scope.guards:
        path = files.of_guard(guard)
        found[path] = max(found.get(path, 0), *guard.contexts)
    return found


def encode_orders(scope: Scope, seed: int, longest: int, *, primary: bool) -> list[dict[str, Any]]:
    """Return the orders for the tokens of the scope's prompts and of a text of at least `longest` tokens."""
    orders: list[dict[str, Any]] = []
    every = {**scope.prompts, HELD_OUT: held_out(scope, seed)} if primary else {}
    for cell, texts in every.items():
        orders.append({"kind": "encode", "id": cell, "texts": list(texts), "chat": True})
    text = context_text(seed, longest)  # a word has at least one token
    orders.append({"kind": "encode", "id": _CONTEXT_ID, "texts": [text], "chat": False})
    return orders


def encoded(run: Run, name: str) -> list[list[int]]:
    """Return the tokens of the texts that were asked for under this name."""
    ids: list[list[int]] = run.results[name]["ids"]
    return ids


def make_prompts(scope: Scope, files: Files, runs: Mapping[Path, Run]) -> Prompts:
    """Return the tokens of all prompts as the base's processes gave them, one per model.

    Raises: OptionError where a text is too short for a context.
    """
    contexts: dict[Path, tuple[int, ...]] = {}
    for path, length in longest_contexts(scope, files).items():
        ids = encoded(runs[path], _CONTEXT_ID)[0]
        if len(ids) < length:
            raise OptionError(f"{len(ids)} tokens of text for a context of {length}")
        contexts[path] = tuple(ids[:length])
    target = runs[files.model]
    cells = {
        domain: tuple(tuple(ids) for ids in encoded(target, domain)) for domain in scope.prompts
    }
    for context in scope.contexts:
        cells[f"ctx {context}"] = (contexts[files.model][:context],)
    return Prompts(cells, contexts, tuple(map(tuple, encoded(target, HELD_OUT))))


def all_ids(scope: Scope, run: Run) -> list[list[int]]:
    """Return the tokens of every text in one order, to compare sides."""
    names = [*scope.prompts, HELD_OUT, _CONTEXT_ID]
    return [ids for name in names for ids in encoded(run, name)]


def _texts(name: str, texts: object) -> InputFile:
    content = codec.canonical(texts)
    return InputFile(name, hashlib.sha256(content).hexdigest(), len(content))


def _input(path: Path, report: Report) -> InputFile:
    size, done, total = _size(path), 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                total.update(block)
                done += len(block)
                report(f"hashing {path.name}", done, size)
    except IsADirectoryError:
        return _folder(path)
    return InputFile(path.name, total.hexdigest(), size)


def _folder(path: Path) -> InputFile:
    """A draft may be a folder: the digest is over its files' names and digests."""
    files = sorted(item for item in path.rglob("*") if item.is_file())
    total = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(path).as_posix()} {content}\n".encode())
    return InputFile(path.name, total.hexdigest(), _size(path))


def _size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder. Raises: MissingFileError."""
    try:
        if path.is_dir():
            return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
        return path.stat().st_size
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}") from error
