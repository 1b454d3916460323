"""Eight simulated devices for the whole suite; tests of one device build their own mesh or process."""

import os

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.xla_flags import flags_for

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = flags_for(8, os.environ.get("XLA_FLAGS", ""))


# A worker takes all tests of a file, and all files of a group, so that what they share is made once.
GROUPS = {
    **dict.fromkeys(
        (f"tests/end_to_end/test_{name}.py" for name in ("command", "evaluate", "checkpoints", "signals")),
        "runs on one device",
    ),
    **dict.fromkeys((f"tests/engine/test_{name}.py" for name in ("step", "collectives", "guards")), "steps"),
}


@pytest.fixture(scope="session")
def gcs():
    """A server of buckets; the variables that lead there, for processes that are started."""
    from tests.gcs import gcs_server

    with gcs_server() as environment:
        yield environment


def pytest_addoption(parser):
    parser.addoption("--examples", type=int, help="so many examples of every property, instead of what each test says")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole files to each worker, and whole groups of files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return GROUPS.get(file, file)

    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """The longest first: whole runs of the command, which wait for each other least when they start early."""
    if (examples := config.getoption("--examples")) is not None:
        for test in filter(is_hypothesis_test, (getattr(item, "obj", None) for item in items)):
            function = getattr(test, "__func__", test)
            own = function._hypothesis_internal_use_settings
            # There is no public way to change the settings of a test that has some.
            function._hypothesis_internal_use_settings = settings(own, max_examples=examples, deadline=None)
    items.sort(key=lambda item: not item.nodeid.startswith("tests/end_to_end/"))
