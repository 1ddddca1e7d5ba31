"""What the README promises about files and errors is so."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hf_zero.config.zero_config import ZeroConfig

_ROOT = Path(__file__).resolve().parent.parent
_README = (_ROOT / "README.md").read_text()
_PAGES = [_ROOT / "README.md", *sorted(_ROOT.glob("*/README.md")), *sorted(_ROOT.glob("hf_zero/*/README.md"))]


def _section(title: str) -> str:
    start = _README.index(f"## {title}\n")
    end = _README.find("\n## ", start)
    return _README[start : end if end > 0 else None]


def test_errors_in_the_table_are_errors_of_the_package() -> None:
    sources = " ".join(path.read_text() for path in (_ROOT / "hf_zero").rglob("*.py"))
    sources = re.sub(r'"\s+f?"', "", sources)
    sources = re.sub(r"\{[^{}]*\}", "", sources)
    phrases = [
        phrase
        for row in re.findall(r"^\| (`.*?) \|", _section("When something goes wrong"), re.M)
        for phrase in row.split("`")
    ]
    pieces = [piece.strip(" ,'") for phrase in phrases for piece in re.split(r"\.\.\.|\d+|'", phrase)]
    looked_for = [piece for piece in pieces if len(piece) > 8]
    assert len(looked_for) > 8
    assert not [piece for piece in looked_for if piece not in sources]


def test_every_key_of_the_configuration_is_explained() -> None:
    table = _section("Configuration")
    assert not [field.name for field in fields(ZeroConfig) if f"`{field.name}`" not in table]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
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
