"""What the pages promise about files, keys, errors, names and commands is so."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import hf_zero
from hf_zero.cli import trace
from hf_zero.cli.main import _parser
from hf_zero.config.zero_config import ZeroConfig
from tests.guide.api import page

_ROOT = Path(__file__).resolve().parents[2]
_GUIDE = _ROOT / "hf_zero" / "guide"
_USERS = [_ROOT / "README.md", *sorted(_GUIDE.glob("*.md")), _ROOT / "recipes" / "README.md"]
_OTHERS = ["hf_zero/README.md", "hf_zero/bench/README.md", "tests/README.md", "tests/tried.md"]
_PAGES = [*_USERS, *(_ROOT / name for name in _OTHERS)]
_PAGES += [_ROOT / ".github" / "CONTRIBUTING.md"]


def _name(page: Path) -> str:
    return str(page.relative_to(_ROOT))


def test_errors_in_the_table_are_errors_of_the_package() -> None:
    sources = " ".join(path.read_text() for path in (_ROOT / "hf_zero").rglob("*.py"))
    sources = re.sub(r'"\s+f?"', "", sources)
    sources = re.sub(r"\{[^{}]*\}", "", sources)
    rows = re.findall(r"^\| (`.*?) \|", (_GUIDE / "errors.md").read_text(), re.M)
    phrases = [phrase for row in rows for phrase in row.split("`")]
    pieces = [piece.strip(" ,'") for phrase in phrases for piece in re.split(r"\.\.\.|\d+|'", phrase)]
    looked_for = [piece for piece in pieces if len(piece) > 8]
    assert len(looked_for) > 8
    assert not [piece for piece in looked_for if piece not in sources]


def test_no_error_is_longer_than_three_lines() -> None:
    errors = {name for name in hf_zero.__all__ if name.endswith("Error")}
    texts = []
    for path in (_ROOT / "hf_zero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in errors and node.args:
                texts.append(_as_shown(node.args[0]))
    assert len(texts) > 300
    assert not [text for text in texts if len(text) > 3 * 110]


def _as_shown(node: ast.expr) -> str:
    """The text of a message, with a short word for each of its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_as_shown, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "a value"


def test_every_key_of_the_configuration_is_explained() -> None:
    table = (_GUIDE / "configuration.md").read_text()
    assert not [field.name for field in fields(ZeroConfig) if f"`{field.name}`" not in table]


def test_the_way_in_stays_short() -> None:
    text = (_ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert len(text.splitlines()) <= 150


def test_every_public_name_is_on_its_page() -> None:
    assert (_GUIDE / "api.md").read_text() == page(), "run python -m tests.guide.api"


def test_the_index_names_every_page() -> None:
    index = (_GUIDE / "README.md").read_text()
    assert not [path.name for path in _GUIDE.glob("*.md") if path.name != "README.md" and f"({path.name}" not in index]


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert heading in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}, target


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_tests_and_recipes_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:tests|recipes)/[\w/*.]+)`", page.read_text()):
        assert list(_ROOT.glob(name)), name


@pytest.mark.parametrize("page", _USERS, ids=_name)
def test_configurations_on_a_page_are_valid(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S):
        ZeroConfig.load(yaml.safe_load(block))


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_commands_on_a_page_have_such_options(page: Path) -> None:
    commands = next(each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction)).choices
    for line in re.findall(r"^(?:\w+=\S+ )*hf-zero (.*?)(?:   #.*)?$", page.read_text(), re.M):
        words = shlex.split(line, comments=True)
        command = commands[words.pop(0)]
        while (inner := _inner(command)) and words and words[0] in inner:
            command = inner[words.pop(0)]
        if command.prog.endswith("launch"):
            continue  # accelerate's options, and after the script its own
        if command.prog.endswith("trace"):
            command = trace.parser("--" in words)
            words = words[: words.index("--")] if "--" in words else words  # what follows is for launch
        known = {option for action in command._actions for option in action.option_strings}
        options = [word for word in words if word.startswith("--")]
        assert not [option for option in options if option not in known], line


def _inner(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((dict(each.choices) for each in parser._actions if isinstance(each, argparse._SubParsersAction)), {})
