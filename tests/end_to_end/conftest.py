import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import pytest

from tests.end_to_end.commands import Finished, Uninterrupted, Workplace, make_corpus
from tests.end_to_end.fork_server import PLOTS


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A corpus, and the cache of tokens that all runs share. Compiled programs are shared with other test processes too."""
    folder = tmp_path_factory.mktemp("shared")
    make_corpus(folder / "corpus")
    base = tmp_path_factory.getbasetemp()
    programs = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "xla"
    programs.mkdir(exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / "xla").symlink_to(programs)
    return folder


@pytest.fixture(scope="session")
def workplace(shared, tmp_path_factory) -> Callable[..., Workplace]:
    """Creates a folder in which commands run on the given number of simulated devices."""

    def make(devices: int = 1) -> Workplace:
        return Workplace(tmp_path_factory.mktemp("work"), shared / "cache", shared / "corpus", devices)

    return make


@pytest.fixture(scope="session")
def finished(workplace) -> Workplace:
    """A run of 24 steps on one device with an average of the weights. Do not change it; use a copy."""
    place = workplace()
    place.write_averaged()
    place.finish("--config_path", "run.yaml", **{PLOTS: "1"})
    return place


@pytest.fixture
def again(finished, workplace) -> Workplace:
    """A copy of the finished run's folder."""
    place = workplace()
    shutil.copytree(finished.folder, place.folder, dirs_exist_ok=True)
    return place


@pytest.fixture(scope="session")
def uninterrupted(workplace) -> Uninterrupted:
    """An uninterrupted run of 24 steps on one device, without an average."""
    place = workplace()
    place.write()
    place.finish("--config_path", "run.yaml")
    return Uninterrupted(place, place.losses(), place.digest("step-24"))


@pytest.fixture(scope="session")
def two_processes(workplace) -> Uninterrupted:
    """An uninterrupted run of 24 steps of two processes with one device each."""
    place = workplace()
    place.write()
    ends = place.run_all(2, "--config_path", "run.yaml")
    assert [end.code for end in ends] == [0, 0], ends
    return Uninterrupted(place, place.losses(), place.digest("step-24"))


@pytest.fixture
def in_process(monkeypatch, capsys) -> Iterator[Callable[..., Finished]]:
    """Runs a command's `main` in this process, in a workplace's folder, for commands that end before compiling."""
    cache = jax.config.jax_compilation_cache_dir

    def run(main: Callable[[Sequence[str]], int], place: Workplace, *arguments: str) -> Finished:
        monkeypatch.chdir(place.folder)
        try:
            code = main(arguments)
        except SystemExit as end:  # raised by argparse
            code = int(end.code or 0)
        shown = capsys.readouterr()
        return Finished(code, shown.out, shown.err)

    yield run
    jax.config.update("jax_compilation_cache_dir", cache)
