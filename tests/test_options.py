"""The option table, its three sources and its page."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparkinfer.options as module
from sparkinfer.errors import OptionError, UnsupportedError
from sparkinfer.options import OPTIONS, markdown, resolve
from sparkinfer.registry import Registry

PAGE = Path(__file__).parent.parent / "docs" / "options.md"


def test_names_flags_and_environment_names_are_unique_and_few() -> None:
    flags = [flag for option in OPTIONS for flag in option.flag]
    names = [option.name for option in OPTIONS]
    assert len(set(flags)) == len(flags)
    assert len(set(names)) == len(names) <= 30
    assert all(option.doc.endswith(".") for option in OPTIONS)


def test_a_flag_beats_the_environment_and_that_the_default() -> None:
    both = resolve({"context": "64"}, {"SPARKINFER_CONTEXT": "32", "SPARKINFER_ISA": "portable"})
    assert (both.integer("context"), both.setting("context").origin) == (64, "flag")
    assert (both.text("isa"), both.setting("isa").origin) == ("portable", "env")
    assert (both.text("activations"), both.setting("activations").origin) == ("int8", "default")


def test_no_flag_and_an_empty_variable_count_as_not_given() -> None:
    options = resolve({"context": None}, {"SPARKINFER_CONTEXT": ""})
    assert options.setting("context").origin == "default"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SPARKINFER_THREAD": "2"}, "SPARKINFER_THREAD; nearest is SPARKINFER_THREADS"),
        ({"SPARKINFER_": "2"}, "unknown environment variable SPARKINFER_;"),
        ({"SPARKINFER_THREADS": "two"}, "SPARKINFER_THREADS=two is not accepted; expected a whole"),
        ({"SPARKINFER_THREADS": "0"}, "from 1 to 256"),
        ({"SPARKINFER_THREADS": "²"}, "SPARKINFER_THREADS=²"),
        ({"SPARKINFER_ISA": "avx3"}, "expected auto | vnni512 | avx2 | portable"),
        ({"SPARKINFER_DEBUG": "maybe"}, "expected on | off"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(OptionError) as raised:
        resolve({}, environ)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("text", "fits"),
    [("cuda", True), ("cuda:0", True), ("cuda:12", True), ("cuda:", False), ("cuda:N", False), ("cuda:-1", False),
     ("cuda:²", False), ("cuda:1000", False), ("gpu", False), ("cuda1", False)],
)  # fmt: skip
def test_a_gpu_is_chosen_by_its_number(text: str, fits: bool) -> None:
    if fits:
        assert resolve({}, {"SPARKINFER_DEVICE": text}).text("device") == text
        return
    with pytest.raises(OptionError, match=r"expected auto \| cpu \| cuda \| cuda:N"):
        resolve({}, {"SPARKINFER_DEVICE": text})


def test_a_bad_flag_is_named_by_its_flag() -> None:
    with pytest.raises(OptionError, match="--threads=999 is not accepted"):
        resolve({"threads": "999"}, {})


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_words_for_on(word: str) -> None:
    assert resolve({}, {"SPARKINFER_DEBUG": word}).boolean("debug") is True


@settings(deadline=None)  # a busy machine
@given(st.text(max_size=12))
def test_any_text_is_a_value_or_an_option_error(text: str) -> None:
    for option in OPTIONS:
        try:
            value: Any = resolve({}, {option.env: text}).setting(option.name).value
        except OptionError as error:
            assert option.env in str(error)
        else:
            assert value is None or isinstance(value, option.type)


def test_the_block_of_a_record_is_plain() -> None:
    block = resolve({"threads": "3"}, {}).block()
    assert block["threads"] == {"value": 3, "origin": "flag"}
    assert isinstance(block["cache_dir"]["value"], str)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), "run: make options-doc"


def test_a_registry_imports_on_first_use_and_lists_what_it_knows() -> None:
    registry = Registry("number", {"pi": "math:pi", "none": "no_such_module:x", "math": "math"})
    assert registry.get("pi") == registry.get("math").pi
    assert "pi" in registry and list(registry) == ["pi", "none", "math"] and len(registry) == 3
    for ask in (registry.get, registry.target):
        with pytest.raises(UnsupportedError, match="unknown number 'tau'; known: math, none, pi"):
            ask("tau")


def test_flags_of_the_process_hold_for_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_flags", {})
    monkeypatch.setenv("SPARKINFER_THREADS", "2")
    module.configure({"threads": "5", "isa": "portable", "context": None})
    assert resolve({}).integer("threads") == 5
    later = resolve({"threads": 6, "isa": None})
    assert (later.integer("threads"), later.text("isa")) == (6, "portable")
