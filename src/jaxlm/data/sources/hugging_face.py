"""Hugging Face datasets: folders written by `Dataset.save_to_disk`, and datasets on the Hub.

hf:openai/gsm8k?name=main&split=train&revision=...     or data: {id: openai/gsm8k, name: main, split: train}

A dataset from the Hub is saved once to <cache_dir>/mirror/<hash of the URL>/ and read from there, without asking the Hub
again. To get another version, set a revision or delete the copy.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from jaxlm.core.errors import ConfigError
from jaxlm.core.install import install_command
from jaxlm.core.safe_io import atomic_folder, listed_file, read_json_object
from jaxlm.data.base import Log
from jaxlm.data.sources.mirror import MirroredSource, copy_folder_name

if TYPE_CHECKING:
    import pyarrow as pa

SCHEME = "hf:"
_ROWS = 1000  # rows per batch when streaming
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_OPTIONS = ("name", "split", "revision")


def is_saved_dataset(folder: Path) -> bool:
    """Tells whether the folder was written by `Dataset.save_to_disk`."""
    return (folder / _STATE).is_file() and (folder / _INFO).is_file()


def saved_files(folder: Path, key: str) -> list[Path]:
    """The files of a saved dataset, in order.

    Raises:
        ConfigError: the list of files cannot be read, or files are missing.
    """
    try:
        paths = [listed_file(folder, entry["filename"]) for entry in read_json_object(folder / _STATE)["_data_files"]]
    except (ConfigError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{key}: {folder / _STATE} does not list the dataset's files. Save the dataset again"
        ) from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{key}: the dataset in {folder} is incomplete: {', '.join(missing)} missing. Save the dataset again"
        )
    return paths


def write_rows(tables: Iterable["pa.Table"], folder: Path) -> int:
    """Writes a saved dataset with a single file to `folder`. Returns the number of rows."""
    import pyarrow as pa

    folder.mkdir()
    name, num_rows, writer = "data-00000-of-00001.arrow", 0, None
    with contextlib.ExitStack() as stack:
        for table in tables:
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_stream(str(folder / name), table.schema))
            writer.write_table(table)
            num_rows += table.num_rows
    (folder / _STATE).write_text(json.dumps({"_data_files": [{"filename": name}] if num_rows else []}))
    (folder / _INFO).write_text("{}")
    return num_rows


def saved_splits(folder: Path) -> list[str]:
    """The splits in a folder written by `DatasetDict.save_to_disk`; empty for other folders."""
    if not (folder / _SPLITS).is_file():
        return []
    return sorted(path.name for path in folder.iterdir() if is_saved_dataset(path))


def saved_split(folder: Path) -> str | None:
    """The split that a saved dataset contains; None if it was saved without one."""
    return read_json_object(folder / _STATE).get("_split")


def check_no_splits(folder: Path, key: str) -> None:
    """Raises `ConfigError` if the folder is a saved `DatasetDict`: the URL must name one of its splits."""
    if splits := saved_splits(folder):
        raise ConfigError(
            f"{key}: {folder} contains a dataset with several splits. Choose one: {folder}/{' or /'.join(splits)}"
        )


@dataclass(frozen=True)
class HubDataset(MirroredSource):
    """A dataset on the Hub.

    Attributes:
        key: config path of the URL, for messages.
        options: `name` (configuration), `split`, `revision`.
        stream: whether to stream rows into the mirror, without a copy in the cache of the library `datasets`.
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
        """Looks up the dataset on the Hub unless it is mirrored. Returns its splits; empty if unknown.

        Raises:
            ConfigError: `datasets` is not installed, the dataset does not exist, or the Hub does not respond.
        """
        if self.is_local(mirror):
            return []
        builder = self._call("load_dataset_builder", **{k: v for k, v in self.options if k != "split"})
        return sorted(builder.info.splits or ())

    def is_local(self, mirror: Path) -> bool:
        return is_saved_dataset(self._copy_path(mirror))

    def _copied_files(self, copy: Path) -> list[tuple[str, Path]]:
        return [(f"{self.url}/{path.name}", path) for path in saved_files(copy, self.key)]

    def _copy_path(self, mirror: Path) -> Path:
        return mirror / copy_folder_name(self.url)

    def _make_copy(self, copy: Path, log: Log) -> None:
        action = "streaming" if self.stream else "loading"
        log(f"mirror: {self.url}: {action} with the library datasets ...")
        with atomic_folder(copy) as unfinished:
            if self.stream:
                rows = self._call("load_dataset", **dict(self.options), streaming=True)
                num_rows = write_rows(self._with_load_errors(rows.with_format("arrow").iter(_ROWS)), unfinished)
            else:
                dataset = self._call("load_dataset", **dict(self.options))
                dataset.save_to_disk(str(unfinished))
                num_rows = dataset.num_rows
        log(f"mirror: {self.url}: {num_rows:,} rows written to {copy}")

    def _with_load_errors(self, tables: Iterator[Any]) -> Iterator[Any]:
        with self._load_errors():
            yield from tables

    def _call(self, function: str, **options: Any) -> Any:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"{self.key}: '{self.url}' needs the library datasets, which is not installed. Run:"
                f" {install_command('hf')}"
            ) from error
        with self._load_errors():
            return getattr(datasets, function)(self.id, **options)

    @contextlib.contextmanager
    def _load_errors(self) -> Iterator[None]:
        """Converts errors of the library `datasets` to `ConfigError`."""
        from datasets.exceptions import DatasetsError  # pyright: ignore[reportMissingImports]

        # Unknown dataset, name or split; no network; a dataset script; an error while reading.
        failures = (OSError, ValueError, RuntimeError, DatasetsError)
        try:
            yield
        except failures as error:
            raise ConfigError(
                f"{self.key}: '{self.url}' cannot be loaded: {type(error).__name__}: {error}\nWithout network access:"
                f" run datasets.load_dataset('{self.id}').save_to_disk('FOLDER') on a machine with network access, copy"
                f" FOLDER to this machine, and set {self.key} to its path"
            ) from error


def parse_hub_url(url: str, key: str) -> HubDataset:
    """Parses a URL that starts with `hf:`."""
    name, _, query = url.removeprefix(SCHEME).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [option for option in options if option not in _OPTIONS]
    if not name or unknown or (query and not options):
        raise ConfigError(
            f"{key}: '{url}' given; expected 'hf:ID', optionally followed by '?' and any of {', '.join(_OPTIONS)}, such as"
            " 'hf:openai/gsm8k?name=main&split=train'"
        )
    return HubDataset(url, key, name, tuple(({"split": "train"} | options).items()))
