from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.commands import Workplace, make_corpus


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A corpus, and caches of tokens and compiled programs that all runs share."""
    folder = tmp_path_factory.mktemp("shared")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="session")
def workplace(shared, tmp_path_factory) -> Callable[..., Workplace]:
    """Makes a fresh folder to run commands in, on so many simulated devices."""

    def make(devices: int = 1) -> Workplace:
        return Workplace(tmp_path_factory.mktemp("work"), shared / "cache", shared / "corpus", devices)

    return make
