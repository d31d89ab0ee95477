"""Every Python block of README.md and docs/ runs, in order, in one namespace per file; links lead somewhere."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import torch

from swath.collectors import CollectorConfig

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


def blocks(text: str) -> list[tuple[int, str]]:
    """Line number and source of every Python block."""
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": path.stem}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for line, source in blocks(path.read_text()):
            # Empty lines in front, so that a traceback names the line of the file.
            exec(compile("\n" * line + source, str(path), "exec"), names)


def test_there_is_something_to_run() -> None:
    counts = {path.name: len(blocks(path.read_text())) for path in FILES}
    assert {name for name, count in counts.items() if count == 0} <= {"design.md"}
    assert sum(counts.values()) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    broken = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]
    assert broken == []


def test_the_readme_leads_to_every_page() -> None:
    links = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in FILES[1:]} <= links


def test_every_argument_is_in_the_table() -> None:
    text = (ROOT / "docs" / "collectors.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    assert {field.name for field in dataclasses.fields(CollectorConfig)} <= rows


def test_names_in_the_readme_can_be_imported() -> None:
    for module, names in re.findall(
        r"^\| `(swath[\w.]*)` \| ([^|]*) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    ):
        there = importlib.import_module(module)
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(there, name), f"README names {module}.{name}"
