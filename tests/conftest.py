"""Simulates eight devices for the whole suite; tests with one device build their own mesh or process."""

import contextlib
import gc
import itertools
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

from tests.xla_flags import flags_for

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The test processes share the cores: torch's threads would wait for each other, also for the smallest product.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = flags_for(8, os.environ.get("XLA_FLAGS", ""))
# pytest rewrites the asserts of all tests, which takes each worker nine seconds. Until the tests are collected it keeps the
# result, and Python compiled modules, even in containers whose environment forbids that.
WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False
# A shell starts background jobs with SIGINT ignored. Tests that press Ctrl-C in a child process would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A run of the suite says the same each time, however busy the machine is: no deadlines, and the same examples.
# `--examples` searches with other ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

FIELDS = "tests/test_fields.py"
RUNS_OF_WINGS = re.compile(r"tests/(systems|compat)/(\w+/)*test_\w+_run\.py")
MAPS, COUNT = Path("/proc/self/maps"), itertools.count()
PROGRAMS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlm" / "tests"
MAX_PROGRAMS_BYTES = 4 << 30
# One worker runs all tests of a file, and all files of a group, so shared fixtures are built once.
ONE_DEVICE = ("command", "evaluate", "checkpoints", "signals", "resume", "closed_output", "going_back")
ONE_DEVICE += ("storage_faults", "notices", "refused", "entry")
GROUPS = {
    **dict.fromkeys(
        (f"tests/end_to_end/test_{name}.py" for name in ONE_DEVICE),
        "runs on one device",
    ),
    **dict.fromkeys((f"tests/engine/test_{name}.py" for name in ("step", "collectives", "guards")), "steps"),
}


@pytest.fixture(autouse=True)
def seeded():
    """Random weights do not depend on which tests ran before. (A test that imports torch itself seeds it.)"""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def programs_folder() -> Path:
    """A folder of compiled programs that all test processes share, and the next run of the tests if the machine keeps it."""
    with contextlib.suppress(OSError):
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        if sum(file.stat().st_size for file in PROGRAMS.iterdir()) > MAX_PROGRAMS_BYTES:
            shutil.rmtree(PROGRAMS, ignore_errors=True)
    return PROGRAMS


@pytest.fixture(autouse=True)
def kept_programs(programs_folder):
    """Keeps the programs that a test compiles, also after one that has set another folder. Child processes are not told."""
    if (jax := sys.modules.get("jax")) and jax.config.jax_compilation_cache_dir != str(programs_folder):
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", str(programs_folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def few_programs():
    """Frees compiled programs before there are too many: each maps several pieces of memory, and at the 65,530th (the default
    of vm.max_map_count) LLVM crashes the process. With jaxlib 0.12, half of the tests get there. Not after
    each test, because reading the list takes milliseconds."""
    yield
    if next(COUNT) % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 25_000:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def gcs_emulator():
    from tests.gcs import gcs_server

    with gcs_server() as emulator:
        yield emulator


@pytest.fixture
def gcs(gcs_emulator):
    """Empties the emulator of Google Cloud Storage; returns the environment variables that point to it."""
    gcs_emulator.empty()
    return gcs_emulator.environment


def pytest_addoption(parser):
    parser.addoption(
        "--examples", type=int, help="number of examples per property test, instead of each test's own number"
    )


def pytest_configure(config):
    """Keeps hypothesis from reading every imported module for constants to try: examples would depend on the modules that
    other tests have imported, and reading them takes seconds. `--examples` tries them."""
    if config.getoption("--examples") is None and hasattr(providers, "_get_local_constants"):  # there is no setting
        none_of_ours = providers._local_constants
        providers._get_local_constants = lambda: none_of_ours


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Assigns whole files, and whole groups of files, to each worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file == FIELDS and "[" in nodeid:
                return nodeid.rpartition("-")[0]  # one base, which all its fields are compared with
            return GROUPS.get(file, file)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Lets every second worker import the tests in reverse order. In a new clone, each then finds half of them rewritten."""
    report = yield
    if isinstance(collector, pytest.Directory) and int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2:
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config, items):
    """Puts the longest files first: whole runs of the command, the fields, and benchmarks and documents. Folders of many
    short files are last. Workers then idle less at the end."""
    if (examples := config.getoption("--examples")) is not None:
        for test in filter(is_hypothesis_test, (getattr(item, "obj", None) for item in items)):
            function = getattr(test, "__func__", test)
            profile = function._hypothesis_internal_use_settings
            # There is no public way to change a test's existing settings.
            function._hypothesis_internal_use_settings = settings(profile, max_examples=examples, derandomize=False)
    first = ("tests/end_to_end/", FIELDS, "tests/test_")
    last = ("tests/data/", "tests/core/", "tests/reading/")
    place = {start: n - len(first) for n, start in enumerate(first)} | {start: n + 1 for n, start in enumerate(last)}

    def position(item: pytest.Item) -> tuple[int, list[str]]:
        file = item.nodeid.partition("::")[0]
        if RUNS_OF_WINGS.fullmatch(file):
            return place["tests/end_to_end/"], file.split("/")
        return next((n for start, n in place.items() if file.startswith(start)), 0), file.split("/")

    items.sort(key=position)


def pytest_collection_finish():
    """Keeps the garbage collector from scanning every imported module and collected test again and again."""
    sys.dont_write_bytecode = WRITES_NO_BYTECODE
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
