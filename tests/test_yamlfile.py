"""Strict YAML: each refusal names file, line, key, value and rule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from pdlaunch import yamlfile
from pdlaunch.errors import RecipeError


@dataclass(frozen=True)
class Inner:
    size: int = yamlfile.key(minimum=1, maximum=9)
    word: str = yamlfile.key("a", pattern="[a-z]+")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    kind: Literal["one", "two"] = "one"
    many: tuple[Inner, ...] = ()
    share: float = 0.5
    on: bool = False
    maybe: int | None = None
    free: dict[str, Any] = yamlfile.key({})


GOOD = "name: x\ninner: {size: 3}\n"


def read(tmp_path: Path, text: str, *settings: str) -> Outer:
    path = tmp_path / "a file.yaml"
    path.write_text(text, encoding="utf-8")
    return yamlfile.bind(Outer, yamlfile.override(yamlfile.read(path), settings))


def refused(tmp_path: Path, text: str, *settings: str) -> str:
    with pytest.raises(RecipeError) as e:
        read(tmp_path, text, *settings)
    return str(e.value).replace(str(tmp_path), "DIR")


def test_values_lists_and_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD + "many: [{size: 1}, {size: 2, word: b}]\nshare: 1\non: true\nmaybe: null\nfree: {a: [1, {b: 2}]}\n")
    assert found == Outer("x", Inner(3), many=(Inner(1), Inner(2, "b")), share=1.0, on=True, free={"a": [1, {"b": 2}]})
    assert isinstance(found.share, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "kinds: two\n", "DIR/a file.yaml:3 kinds: unknown key 'kinds' (value 'two')"),
        (GOOD + "kinds: two\n", "next: did you mean 'kind'?"),
        ("name: x\ninner:\n  size: 3\n  sise: 4\n", "DIR/a file.yaml:4 inner.sise: unknown key 'sise' (value 4)"),
        (
            GOOD + "name: y\n",
            "DIR/a file.yaml:3 name: the key 'name' is there twice\n  rule: each key once\n"
            "  next: remove one of them; the first is on line 1",
        ),
        ("inner: {size: 1}\n", "the key 'name' is missing"),
        ("name: x\ninner: {}\n", "DIR/a file.yaml:2 inner: the key 'size' is missing"),
        ("name: 5\ninner: {size: 1}\n", "expected a text, found 5"),
        ("name: 5\ninner: {size: 1}\n", 'next: write it in quotes: "5"'),
        ("name: x\ninner: {size: '3'}\n", "DIR/a file.yaml:2 inner.size: expected a whole number, found '3'"),
        ("name: x\ninner: {size: true}\n", "expected a whole number, found True"),
        ("name: x\ninner: {size: 3.5}\n", "expected a whole number, found 3.5"),
        ("name: x\ninner: {size: 0}\n", "inner.size: 0 is too small\n  rule: at least 1"),
        ("name: x\ninner: {size: 10}\n", "10 is too large\n  rule: at most 9"),
        ("name: x\ninner: {size: 1, word: A1}\n", "inner.word: 'A1' is not a legal value\n  rule: must match [a-z]+"),
        (GOOD + "kind: tow\n", "DIR/a file.yaml:3 kind: 'tow' is not a legal value\n  rule: one of one, two\n  next: did you mean 'two'?"),
        (GOOD + "many: {size: 1}\n", "expected a list"),
        (GOOD + "many:\n  - {size: 1}\n  - {size: 99}\n", "DIR/a file.yaml:5 many[1].size: 99 is too large"),
        ("name: x\ninner: 3\n", "expected keys and values, found 3"),
        ("name: x\ninner: [\n", "not YAML"),
        ("", "expected keys and values, found nothing"),
        ("- a\n", "expected keys and values, found list"),
        ("? [a, b]\n: c\n", "a key must be a plain text"),
        ("name: !!python/object/apply:os.system [ls]\ninner: {size: 1}\n", "plain mappings and lists, no tags"),
        ("name: x\ninner: &a {size: *a}\n", "a file.yaml:2: an alias of a list or mapping"),
        ("name: x\nmany: &a [&b [&c []]]\nfree: {x: *b}\n", "an alias of a list or mapping"),
        ("name: 2026-13-01\ninner: {size: 1}\n", "DIR/a file.yaml:1 name: '2026-13-01' cannot be read: month must be in 1..12"),
        (f"name: x\ninner: {{size: 1{'0' * 5000}}}\n", "cannot be read"),
        (f"name: x\ninner: {{size: 1}}\nshare: 1{'0' * 400}\n", "is too large\n  rule: at most 9007199254740992"),
        ('name: "a\\0b"\ninner: {size: 1}\n', "the character '\\x00' in 'a\\x00b'"),
        ("name: " + "[" * 5000 + "\n", "not YAML"),
        ("free: " + "{a: " * 400 + "1" + "}" * 400 + "\n", ""),
        ("name: !!python/name:os.system x\ninner: {size: 1}\n", "not YAML"),
    ],
)
def test_refusals(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        yamlfile.read(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(RecipeError, match="cannot be read"):
        yamlfile.read(tmp_path / "b.yaml")


def test_overrides_are_typed_recorded_and_named(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD + "many: [{size: 1}]\n", "inner.size=4", "many.0.word=z", "free={a: 1}", "maybe=7")
    assert (found.inner.size, found.many[0].word, found.free, found.maybe) == (4, "z", {"a": 1}, 7)
    assert "--set inner.size=0: 0 is too small" in refused(tmp_path, GOOD, "inner.size=0")
    assert "--set inner.sise=1: unknown key 'sise'" in refused(tmp_path, GOOD, "inner.sise=1")
    assert "no equals sign" in refused(tmp_path, GOOD, "inner.size")
    assert "many is a list of 0" in refused(tmp_path, GOOD + "many: []\n", "many.0.size=1")
    assert "name is 'x' and has no keys" in refused(tmp_path, GOOD, "name.a=1")
    assert "the value is not YAML" in refused(tmp_path, GOOD, "name={a")
    assert "--set free=&a {a: *a}: an alias of a list or mapping" in refused(tmp_path, GOOD, "free=&a {a: *a}")
    assert "--set name=2026-13-01: '2026-13-01' cannot be read" in refused(tmp_path, GOOD, "name=2026-13-01")


def test_an_override_does_not_change_the_document_it_was_laid_over(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(GOOD, encoding="utf-8")
    document = yamlfile.read(path)
    changed = yamlfile.override(document, ["inner.size=4"])
    assert document.data["inner"]["size"] == 3
    assert changed.overrides == {"inner.size": "4"}
    assert document.overrides == {}


@pytest.mark.parametrize("text", ["1:00:00", "010", "0x10", ".nan", ".inf", "-.inf", "0b11"])
def test_numbers_that_yaml_reads_as_another_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"a: 1\nb: {text}\n")
    with pytest.raises(RecipeError, match="would be read as") as caught:
        yamlfile.read(path)
    assert f"{path}:2 b" in str(caught.value)
    with pytest.raises(RecipeError, match="would be read as"):
        yamlfile.override(yamlfile.Document(path, {"b": 1}, {}), [f"b={text}"])


@pytest.mark.parametrize("text", ["0", "-3", "1_000", "1.5", "1e3", "1.5e-3", ".5", "'010'", "v1.2.3", "1.6.1"])
def test_plain_numbers_and_texts_pass(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"b: {text}\n")
    assert "b" in yamlfile.read(path).data
