"""What a side's text stands for: revisions merged onto the base, wheels, option sets; and what is refused."""

import subprocess
from pathlib import Path

import pytest

from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.evaluation.source import (
    ConflictError,
    Git,
    kind_of,
    package_digest,
    parse_options,
    resolve_sources,
)


def git(repository: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repository), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(repository: Path, **files: str) -> str:
    for name, text in files.items():
        (repository / f"{name}.txt").write_text(text)
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "change")
    return git(repository, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """main: a, b. topic: from the first commit, changes b. clash: from the first commit, changes a as main does not."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, a="one\n", b="one\n")
    git(folder, "branch", "topic")
    git(folder, "branch", "clash")
    commit(folder, a="two\n")
    git(folder, "checkout", "-q", "topic")
    commit(folder, b="two\n")
    git(folder, "checkout", "-q", "clash")
    commit(folder, a="three\n")
    git(folder, "checkout", "-q", "main")
    return folder


def test_the_candidate_is_merged_onto_the_base_and_nothing_is_touched(repository: Path) -> None:
    before = git(repository, "status", "--porcelain"), git(repository, "for-each-ref")
    found = resolve_sources("main", "topic", repository=repository, common={"threads": "2"})
    assert found.base.sha == git(repository, "rev-parse", "main") == found.candidate.merged_onto
    assert found.candidate.sha == git(repository, "rev-parse", "topic")
    assert found.candidate.tree not in (
        found.base.tree,
        git(repository, "rev-parse", "topic^{tree}"),
    )
    assert dict(found.base.options) == dict(found.candidate.options) == {"threads": "2"}
    assert found.notes == ()
    assert (git(repository, "status", "--porcelain"), git(repository, "for-each-ref")) == before
    out = repository.parent / "out"
    out.mkdir()
    assert found.candidate.tree is not None
    Git(repository).export(found.candidate.tree, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "a.txt": "two\n",
        "b.txt": "two\n",
    }


def test_a_conflict_is_its_own_outcome_and_names_the_file(repository: Path) -> None:
    with pytest.raises(ConflictError, match=r"cannot be merged onto .*: a\.txt;") as caught:
        resolve_sources("main", "clash", repository=repository, common={})
    assert caught.value.exit_code == 73


def test_no_change_is_said(repository: Path) -> None:
    found = resolve_sources("main", "main~1", repository=repository, common={})
    assert "both sides are the same" in found.notes[0]
    assert found.base.tree == found.candidate.tree


@pytest.mark.parametrize("file", ["a.txt", "new.txt"])
def test_a_dirty_tree_is_refused_or_said(repository: Path, file: str) -> None:
    (repository / file).write_text("something else\n")
    with pytest.raises(OptionError, match=f"uncommitted changes .{file}"):
        resolve_sources("main", "topic", repository=repository, common={})
    found = resolve_sources("main", "topic", repository=repository, common={}, allow_dirty=True)
    assert file in found.notes[0]
    out = repository.parent / "out"
    out.mkdir()
    assert found.base.tree is not None
    Git(repository).export(found.base.tree, out)
    assert sorted(path.name for path in out.iterdir()) == ["a.txt", "b.txt"]
    assert (out / "a.txt").read_text() == "two\n"


def test_what_is_ignored_does_not_make_a_tree_dirty(repository: Path) -> None:
    (repository / ".git" / "info" / "exclude").write_text("*.log\n")
    (repository / "run.log").write_text("x")
    assert Git(repository).changed() == []


def test_everything_of_a_tree_is_exported(repository: Path) -> None:
    """`git archive` would leave out what the tree marks so: a build could hide files that way."""
    (repository / ".gitattributes").write_text("b.txt export-ignore\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "-q", "-m", "hide")
    out = repository.parent / "out"
    out.mkdir()
    Git(repository).export(git(repository, "rev-parse", "HEAD^{tree}"), out)
    assert (out / "b.txt").exists()


@pytest.mark.parametrize(
    ("base", "candidate", "words"),
    [
        ("main", "nonsense", "'nonsense' is no revision"),
        ("main", "--all", "'--all' is no revision"),
        ("main", "options:spec=off", "base is a git and candidate a options"),
        ("options:", "options:speed=1", "'speed' is no option of a side"),
        ("options:", "options:cache_dir=x", "'cache_dir' is no option of a side"),
        ("options:", "options:threads", "is not an option; expected NAME=VALUE"),
        ("options:", "options:threads=many", "expected a whole number"),
        ("options:kv_cache=f16", "options:kv_cache=q4_0", r"expected auto \| f32 \| f16 \| q8_0"),
    ],
)
def test_wrong_sides_are_named(repository: Path, base: str, candidate: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        resolve_sources(base, candidate, repository=repository, common={}, allow_dirty=True)


def test_formats_of_the_cache_are_sides() -> None:
    sides = ("options:kv_cache=f16", "options:kv_cache=q8_0")
    found = resolve_sources(*sides, repository=None, common={}, allow_dirty=True)
    assert found.base.options == {"kv_cache": "f16"}
    assert found.candidate.options == {"kv_cache": "q8_0"}


def test_a_folder_outside_any_repository(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is in no git repository"):
        resolve_sources("main", "topic", repository=tmp_path, common={})


def test_wheels_and_option_sets(tmp_path: Path) -> None:
    for name in ("one.whl", "two.whl"):
        (tmp_path / name).write_bytes(name.encode())
    texts = [str(tmp_path / name) for name in ("one.whl", "two.whl")]
    found = resolve_sources(*texts, repository=tmp_path, common={})
    assert (found.base.kind, found.base.name, found.candidate.name) == (
        "wheel",
        "one.whl",
        "two.whl",
    )
    with pytest.raises(MissingFileError, match="no wheel at"):
        resolve_sources(texts[0], str(tmp_path / "no.whl"), repository=tmp_path, common={})
    sets = resolve_sources(
        "options:spec=off",
        "options:dflash-rows=off, threads=1",
        repository=tmp_path,
        common={"threads": "2"},
        allow_dirty=True,
    )
    assert dict(sets.base.options) == {"threads": "2", "spec": "off"}
    assert dict(sets.candidate.options) == {"threads": "1", "dflash_rows": "off"}
    assert sets.base.tree == sets.candidate.tree and len(sets.base.tree or "") == 64
    assert parse_options("") == {}
    assert [kind_of(text) for text in ("main", "x.whl", "options:")] == ["git", "wheel", "options"]


def test_a_packages_digest_is_over_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = package_digest(tmp_path)
    (tmp_path / "a.cpython-311.pyc").write_bytes(b"compiled")
    assert package_digest(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert package_digest(tmp_path) != first
