"""Datasets of Hugging Face: folders that `Dataset.save_to_disk` has written, and those of the hub by their id.

hf:openai/gsm8k?name=main&split=train&revision=...     or data: {id: openai/gsm8k, name: main, split: train}

Of the hub's, a copy is kept as such a folder, in <cache_dir>/mirror/<hash of the URL>/. It is read from then on, without
asking the hub again; name a revision, or delete the copy, for another state.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from jaxlm.core.atomic_io import atomic_folder
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_dir import disk_full_errors
from jaxlm.data.sources.mirror import MirroredSource, folder_of

if TYPE_CHECKING:
    import pyarrow as pa

SCHEME = "hf:"
_ROWS = 1000  # that are streamed at once
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_OPTIONS = ("name", "split", "revision")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` has written this folder."""
    return (folder / _STATE).is_file() and (folder / _INFO).is_file()


def saved_files(folder: Path, key: str) -> list[Path]:
    """The files of a saved dataset, in its order.

    Raises:
        ConfigError: it cannot be read, or files are missing.
    """
    try:
        paths = [folder / entry["filename"] for entry in json.loads((folder / _STATE).read_text())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{key}: {folder / _STATE} does not name the dataset's files. Save the dataset anew"
        ) from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"{key}: the dataset in {folder} is not whole: {', '.join(missing)} is missing")
    return paths


def write_rows(tables: Iterable["pa.Table"], folder: Path) -> int:
    """Makes `folder` a saved dataset of one file. Returns the number of rows."""
    import pyarrow as pa

    folder.mkdir()
    name, num_rows, writer = "data-00000-of-00001.arrow", 0, None
    with contextlib.ExitStack() as closing:
        for table in tables:
            if writer is None:
                writer = closing.enter_context(pa.ipc.new_stream(str(folder / name), table.schema))
            writer.write_table(table)
            num_rows += table.num_rows
    (folder / _STATE).write_text(json.dumps({"_data_files": [{"filename": name}] if num_rows else []}))
    (folder / _INFO).write_text("{}")
    return num_rows


def saved_splits(folder: Path) -> list[str]:
    """Of a folder that `DatasetDict.save_to_disk` has written; none of any other."""
    if not (folder / _SPLITS).is_file():
        return []
    return sorted(path.name for path in folder.iterdir() if is_saved_dataset(path))


def saved_split(folder: Path) -> str | None:
    """Which split a saved dataset is, where it says so."""
    return json.loads((folder / _STATE).read_text()).get("_split")


def check_no_splits(folder: Path, key: str) -> None:
    """Raises `ConfigError` for a folder of several splits (a saved `DatasetDict`): one must be named."""
    if splits := saved_splits(folder):
        raise ConfigError(
            f"{key}: {folder} holds a dataset of several splits. Name one: {folder}/{' or /'.join(splits)}"
        )


@dataclass(frozen=True)
class HubDataset(MirroredSource):
    """A dataset of the hub.

    Attributes:
        url: as it is configured.
        key: where, for messages.
        id: the hub's name for it.
        options: `name` (of the configuration), `split`, `revision`.
        stream: whether its rows are read one after another, and kept here alone.
    """

    url: str
    key: str
    id: str
    options: tuple[tuple[str, str], ...]
    stream: bool = False

    @property
    def name(self) -> str:
        return self.url

    def check(self, mirror: Path) -> list[str]:
        """Asks the hub about it, unless a copy is here. Returns its splits, none where nobody says.

        Raises:
            ConfigError: `datasets` is not installed, or the hub has no such dataset or does not answer.
        """
        if self.is_here(mirror):
            return []
        builder = self._call("load_dataset_builder", **{k: v for k, v in self.options if k != "split"})
        return sorted(builder.info.splits or ())

    def is_here(self, mirror: Path) -> bool:
        return is_saved_dataset(self._place(mirror))

    def _parts(self, place: Path) -> list[tuple[str, Path]]:
        return [(f"{self.url}/{path.name}", path) for path in saved_files(place, self.key)]

    def _place(self, mirror: Path) -> Path:
        return mirror / folder_of(self.url)

    def _make(self, place: Path, log: Log) -> None:
        how = "streaming" if self.stream else "loading"
        log(f"mirror: {self.url}: {how} through the library datasets ...")
        with disk_full_errors(place), atomic_folder(place) as unfinished:
            if self.stream:
                rows = self._call("load_dataset", **dict(self.options), streaming=True)
                num_rows = write_rows(self._answered(rows.with_format("arrow").iter(_ROWS)), unfinished)
            else:
                dataset = self._call("load_dataset", **dict(self.options))
                dataset.save_to_disk(str(unfinished))
                num_rows = dataset.num_rows
        log(f"mirror: {self.url}: {num_rows:,} rows, kept in {place}")

    def _answered(self, tables: Iterator[Any]) -> Iterator[Any]:
        """The same, with what fails on the way said as `_call` says it."""
        with self._failing():
            yield from tables

    def _call(self, function: str, **options: Any) -> Any:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"{self.key}: '{self.url}' needs the library datasets, which is not installed: pip install"
                " 'jaxlm[hf]' (or datasets)"
            ) from error
        with self._failing():
            return getattr(datasets, function)(self.id, **options)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        from datasets.exceptions import DatasetsError  # pyright: ignore[reportMissingImports]

        # No such dataset, name or split; no network; a dataset that is a script; one that breaks while it is read.
        failures = (OSError, ValueError, RuntimeError, DatasetsError)
        try:
            yield
        except failures as error:
            raise ConfigError(
                f"{self.key}: '{self.url}' cannot be loaded: {type(error).__name__}: {error}\nWithout a network: save it"
                f" where there is one, datasets.load_dataset('{self.id}').save_to_disk('FOLDER'), copy that here, and name"
                f" FOLDER in {self.key} instead"
            ) from error


def hub_dataset(url: str, key: str) -> HubDataset:
    """What a URL that begins with `hf:` means.

    Raises:
        ConfigError: no id, or an option that there is not.
    """
    name, _, query = url.removeprefix(SCHEME).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [option for option in options if option not in _OPTIONS]
    if not name or unknown or (query and not options):
        raise ConfigError(
            f"{key}: '{url}' given; 'hf:ID' expected, and after a '?' any of {', '.join(_OPTIONS)}, as in"
            " 'hf:openai/gsm8k?name=main&split=train'"
        )
    return HubDataset(url, key, name, tuple(({"split": "train"} | options).items()))
