"""What the docs refer to exists: tests that are named as proof, and the targets of links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _names() -> set[str]:
    """Test functions and test files."""
    files = list((ROOT / "tests").glob("test_*.py"))
    functions = (re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE) for file in files)
    return {name for found in functions for name in found} | {file.stem for file in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"\btest_\w+", page.read_text()))
    assert named - _names() == set()


def test_every_row_on_triton_has_a_test_or_says_that_it_is_tritons_alone() -> None:
    page = (ROOT / "docs" / "lifecycle.md").read_text()
    _, section = page.split("## What is known of Triton")
    rows = [line for line in section.splitlines() if line.startswith("| ") and "| shown by |" not in line]
    assert len(rows) > 50
    assert [
        row
        for row in rows
        if "`test_" not in row and "Triton's alone" not in row and "measured, above" not in row
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files of this repository, and the references at the end of a page."""
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE)
    used = re.findall(r"\[([a-z_]+#\d+)\](?![:(])", text)
    assert set(used) == set(defined)
