"""Checks that the core needs no wing: deletes one from a copy of the tree, and runs what the core has to pass without it.

    python benchmarks/without.py rl [--only static,tests] [--jobs 2] [--folder FOLDER]
    python benchmarks/without.py all --only static

A wing is a folder of `src/jaxlm/systems` or `src/jaxlm/compat`; `all` deletes every one. From a copy of the tracked files,
each as it is in the working tree, it deletes the wing and what exists only with it:

* its tests, `tests/systems/NAME` or `tests/compat/NAME`
* a folder of `compat` that imports it, and `src/jaxlm/NAME.py` of a deleted folder of `compat` (`stackwise.py`)

Then it runs, in the copy:

static     `ruff check`, `lint-imports`, an import of each module, a reading of each recipe, and the quickstart as a dry run
tests      the default tests, except those of wings (`tests/systems`, `tests/compat`), and except those of the documentation,
           which is one for the whole house: the guide and its fields (`tests/test_guide.py`, `tests/test_fields.py`,
           `tests/fields`), and the commands and links of all pages (`tests/test_snippets.py`)

Prints a line per check, and the last lines of one that fails. Exits with 1 if any fails. A wing takes half a minute, and
the tests seven more on two cores. `--folder` keeps the copy.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from commits import ROOT

SOURCE = Path("src/jaxlm")
PARTS = ("static", "tests")
NOT_THE_CORES = ("systems", "compat", "test_guide.py", "test_fields.py", "fields", "test_snippets.py")
LAST_LINES = 40  # of a check that fails
# Packages of other people may be missing: some are optional.
IMPORTS = """
import importlib, pathlib
import jaxlm.core
root = pathlib.Path("src").resolve()
count = 0
for file in sorted(root.rglob("*.py")):
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] == "jaxlm":
            raise
    else:
        assert module.__file__ == str(file), f"{module.__file__} imported, {file} expected"
        count += 1
print(f"imported {count} modules")
"""
RECIPES = """
from jaxlm.plan.load_config import read_config
from jaxlm.reading.recipes import all_recipes
for recipe in all_recipes().values():
    read_config(recipe, {"use_hf_model_config": False})  # not the model that a user names
print(f"read {len(all_recipes())} recipes")
"""


def main() -> None:
    """Deletes the wing from a copy, and runs the checks there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wing", choices=(*(folder.name for folder in wings()), "all"))
    parser.add_argument("--only", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--jobs", type=int, default=2, help="test processes (default 2)")
    parser.add_argument("--folder", type=Path, help="a new folder for the copy, which is kept")
    options = parser.parse_args()
    parts = options.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only: {options.only} given. Known: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        copy = options.folder.resolve() if options.folder else Path(folder) / "tree"
        copy_tracked(copy)
        for path in deleted(options.wing):
            print(f"deleted {path}")
            shutil.rmtree(copy / path) if (copy / path).is_dir() else (copy / path).unlink()
        for link in (link for link in (copy / "config").rglob("*.yaml") if not link.exists()):
            link.unlink()  # to a recipe of the wing
        checks = {name: command for part in parts for name, command in commands(part, options.jobs).items()}
        results = [passes(name, command, copy) for name, command in checks.items()]
    if not all(results):
        sys.exit(1)


def wings() -> list[Path]:
    """The folders of all wings, below the repository."""
    found = sorted([*ROOT.glob(f"{SOURCE}/systems/*/__init__.py"), *ROOT.glob(f"{SOURCE}/compat/*/__init__.py")])
    return [file.parent.relative_to(ROOT) for file in found]


def deleted(wing: str) -> Iterator[Path]:
    """What goes with a wing: files and folders below the repository."""
    if wing == "all":
        folders = [SOURCE / "systems", SOURCE / "compat"]
    else:
        (own,) = (folder for folder in wings() if folder.name == wing)
        folders = [own, *(one for one in wings() if one.parts[-2] == "compat" and one != own and imports(one, own))]
    yield from folders
    for folder in folders:
        if (ROOT / (tests := Path("tests") / folder.relative_to(SOURCE))).exists():
            yield tests
    api = {SOURCE / f"{folder.name}.py" for folder in wings() if any(map(folder.is_relative_to, folders))}
    yield from sorted(path for path in api if (ROOT / path).exists())


def module_name(path: Path) -> str:
    """The name by which a file or a folder below the repository is imported."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(folder: Path, wing: Path) -> bool:
    """Whether a module of a folder imports one of the wing."""
    pattern = re.compile(rf"^\s*(?:from|import) {re.escape(module_name(wing))}\b", re.MULTILINE)
    return any(pattern.search(file.read_text(encoding="utf-8")) for file in (ROOT / folder).rglob("*.py"))


def copy_tracked(copy: Path) -> None:
    """Copies what git tracks, except files that the working tree has deleted."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)


def commands(part: str, jobs: int) -> dict[str, Sequence[str]]:
    """The checks of a part: a name and the command that runs in the copy."""
    python = sys.executable
    if part == "tests":
        ignored = [f"--ignore=tests/{name}" for name in NOT_THE_CORES]
        return {"tests": (python, "-m", "pytest", "-q", "-n", str(jobs), *ignored, "tests")}
    return {
        "ruff": (program("ruff"), "check", "--output-format", "concise", "."),
        "lint-imports": (program("lint-imports"),),
        "imports": (python, "-c", IMPORTS),
        "recipes": (python, "-c", RECIPES),
        "quickstart": (python, *["-m", "jaxlm.train", "--config_path", "config/quickstart.yaml", "--dry_run", "true"]),
    }


def program(name: str) -> str:
    """A program of this Python's environment."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def passes(name: str, command: Sequence[str], copy: Path) -> bool:
    """Runs a check and prints its result."""
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    result = "FAILS" if done.returncode else "passes"
    lines = done.stdout.rstrip().splitlines()
    print(f"{name:14}{result:8}{time.monotonic() - began:5.0f} s   {lines[-1] if lines else ''}", flush=True)
    if done.returncode:
        print("\n".join(f"    {line}" for line in lines[-LAST_LINES:]), flush=True)
    return not done.returncode


if __name__ == "__main__":
    main()
