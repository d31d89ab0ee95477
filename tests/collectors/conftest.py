"""What holds for all tests of collectors."""

from collections.abc import Iterator
from typing import Any

import pytest
from kinds import SINGLE, Kind, Make


@pytest.fixture
def kind() -> Kind:
    """What a test runs over if it does not say: `@over(...)` does."""
    return SINGLE


@pytest.fixture
def make(kind: Kind) -> Iterator[Make]:
    """Makes collectors of the kind, with the arguments of `Kind.build`, that are shut down after the test."""
    made: list[Any] = []

    def build(*args: Any, **options: Any) -> Any:
        made.append(kind.build(*args, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown(raise_on_error=False)
