"""The configurations that ship with jaxlm. Every option for a configuration's path accepts `jaxlm:quickstart.yaml`."""

import atexit
import contextlib
import functools
import itertools
import re
import shutil
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxlm.core.errors import ConfigError, did_you_mean
from jaxlm.core.safe_io import read_text

PACKAGE = Path(__file__).parents[1]
SCHEME = "jaxlm:"
_WIDTH = 118


def config_file(path: Path | str) -> Path:
    """The file at a configuration's path: a recipe for `jaxlm:NAME`, a copy for a URL, otherwise the path itself."""
    text = str(path)
    if "://" in text:
        return _downloaded(text)
    return recipe(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else Path(path)


@functools.cache
def _downloaded(url: str) -> Path:
    """A copy of the file, in a temporary folder, with the YAML files beside it, which it may include."""
    from jaxlm.core.stores import open_store, storage_errors  # imports jax

    key = "--config_path"
    fs, remote = open_store(url, key)
    parent, _, name = remote.rpartition("/")
    folder = Path(tempfile.mkdtemp(prefix="jaxlm-config-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with storage_errors(lambda reason: ConfigError(f"{key}: '{url}' cannot be read ({reason})"), local=folder):
        fs.get_file(remote, str(folder / name))
        with contextlib.suppress(NotImplementedError, OSError):  # a web server may not list files
            for path in fs.glob(f"{parent}/*.yaml"):
                fs.get_file(path, str(folder / path.rpartition("/")[2]))
    return folder / name


@functools.cache
def all_recipes() -> Mapping[str, Path]:
    """Name, such as `nanochat/cpu_d4.yaml`, -> file of all recipes, those of wings too: first those in no folder."""
    folders = [PACKAGE / "recipes", *PACKAGE.glob("systems/*/recipes")]
    found = {file.relative_to(folder).as_posix(): file for folder in folders for file in folder.rglob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: ("/" in item[0], item[0])))


def recipe(name: str) -> Path:
    """The file of a recipe, by its name with or without `.yaml`."""
    stem, known = name.removesuffix(".yaml"), all_recipes()
    if f"{stem}.yaml" not in known:
        hint = did_you_mean(stem, [name.removesuffix(".yaml") for name in known], SCHEME, ".yaml")
        raise ConfigError(f"{SCHEME}{name}: no such recipe.{hint} Available: {', '.join(known)}")
    return known[f"{stem}.yaml"]


def recipes_command(arguments: Sequence[str]) -> int:
    """`jaxlm recipes` lists the recipes; `jaxlm recipes NAME` copies one into the current folder. Returns the exit code."""
    if {"--help", "-h"} & set(arguments):
        print("usage: jaxlm recipes [NAME ...]\n\nLists the recipes, or copies recipes into the current folder.")
        return 0
    for name in arguments:
        for source in _with_includes(recipe(name)):
            _copy(source)
        print(f"train it with: jaxlm train --config_path {recipe(name).name}")
    if not arguments:
        for name, file in all_recipes().items():
            first = f"  {SCHEME}{name:34} "
            hanging = textwrap.TextWrapper(_WIDTH, first, " " * len(first), break_on_hyphens=False)
            print(hanging.fill(_title(file)))
        print(
            "\nTrain one with `jaxlm train --config_path jaxlm:NAME`; copy one into this folder with `jaxlm recipes NAME`."
        )
    return 0


def _with_includes(file: Path) -> list[Path]:
    names = re.findall(r"!include (\S+)", file.read_text(encoding="utf-8"))
    beside = [name for name in names if not name.startswith(SCHEME)]
    return [file, *(inner for name in beside for inner in _with_includes(file.with_name(name)))]


def _copy(source: Path) -> None:
    copy, content = Path(source.name), source.read_text(encoding="utf-8")
    try:
        with copy.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        if read_text(copy) == content:
            return
        raise ConfigError(f"{copy} already exists in this folder. Rename or delete it first") from None
    except OSError as error:
        raise ConfigError(f"{copy} cannot be written: {error.strerror}. Run the command in another folder") from error
    print(f"wrote {copy}")


def _title(file: Path) -> str:
    """The first sentence of the comment at its top."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), file.read_text(encoding="utf-8").splitlines())
    return re.split(r"(?<=\.)\s", " ".join(line.removeprefix("# ") for line in lines))[0]
