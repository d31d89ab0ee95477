"""Minari datasets go to a directory of each test, and Minari's hints at metadata are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

IGNORED = (
    "ignore:`(author|author_email|algorithm_name|description|code_permalink|eval_env)` is",
    "ignore:env_spec is None",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for each in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(each))


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Minari keeps its datasets in this test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path
