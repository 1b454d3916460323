"""Datasets of Hugging Face: folders that `Dataset.save_to_disk` has written, and those of the hub by their id.

hf:openai/gsm8k?name=main&split=train&revision=...

Of the hub's, a copy is kept as such a folder, in <cache_dir>/mirror/<hash of the URL>/. It is read from then on, without
asking the hub again; name a revision, or delete the copy, for another state.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Show, Source
from jaxlm.data.durable import locked, needing_space, prepared, replacing_folder

SCHEME = "hf:"
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


def check_no_splits(folder: Path, key: str) -> None:
    """Raises `ConfigError` for a folder of several splits (a saved `DatasetDict`): one must be named."""
    if (folder / _SPLITS).is_file():
        splits = sorted(path.name for path in folder.iterdir() if is_saved_dataset(path))
        raise ConfigError(
            f"{key}: {folder} holds a dataset of several splits. Name one: {folder}/{' or /'.join(splits)}"
        )


@dataclass(frozen=True)
class HubDataset(Source):
    """A dataset of the hub.

    Attributes:
        url: as it is configured.
        key: where, for messages.
        id: the hub's name for it.
        options: `name` (of the configuration), `split`, `revision`.
    """

    url: str
    key: str
    id: str
    options: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """See `Source.name`."""
        return self.url

    @property
    def num_bytes(self) -> int | None:
        """See `Source.num_bytes`."""
        return None

    @property
    def has_records(self) -> bool:
        """See `Source.has_records`."""
        return True

    def check(self, mirror: Path) -> None:
        """Asks the hub about it, unless a copy is here.

        Raises:
            ConfigError: `datasets` is not installed, or the hub has no such dataset or does not answer.
        """
        if not self.is_here(mirror):
            self._call("load_dataset_builder", **{k: v for k, v in self.options if k != "split"})

    def is_here(self, mirror: Path) -> bool:
        """See `Source.is_here`."""
        return is_saved_dataset(self._place(mirror))

    def files(self, mirror: Path, show: Show) -> list[tuple[str, Path]]:
        """See `Source.files`."""
        place = self._place(mirror)
        if not self.is_here(mirror):
            with locked(prepared(mirror), show):
                if not self.is_here(mirror):  # another process may have been faster
                    self._copy(place, show)
        return [(f"{self.url}/{path.name}", path) for path in saved_files(place, self.key)]

    def _place(self, mirror: Path) -> Path:
        return mirror / hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def _copy(self, place: Path, show: Show) -> None:
        show(f"mirror: {self.url}: loading through the library datasets ...")
        dataset = self._call("load_dataset", **dict(self.options))
        with needing_space(place), replacing_folder(place) as unfinished:
            dataset.save_to_disk(str(unfinished))
        show(f"mirror: {self.url}: {dataset.num_rows:,} rows, kept in {place}")

    def _call(self, function: str, **options: str) -> Any:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
            from datasets.exceptions import DatasetsError  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"{self.key}: '{self.url}' needs the library datasets, which is not installed: pip install"
                " 'jaxlm[hf]' (or datasets)"
            ) from error
        # No such dataset, name or split; no network; a dataset that is a script; one that breaks while it is read.
        failures = (OSError, ValueError, RuntimeError, DatasetsError)
        try:
            return getattr(datasets, function)(self.id, **options)
        except failures as error:
            raise ConfigError(f"{self.key}: '{self.url}' cannot be loaded: {type(error).__name__}: {error}") from error


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
