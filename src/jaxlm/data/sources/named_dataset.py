"""A dataset given by `id`, `name` and `split`: on the Hugging Face Hub, or saved in a local folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import DataSource
from jaxlm.data.sources.files import LocalFile
from jaxlm.data.sources.hugging_face import HubDataset, is_saved_dataset, saved_files, saved_split, saved_splits


@dataclass(frozen=True)
class NamedDataset:
    """One split of a dataset.

    Attributes:
        id: id on the Hub, or a folder.
        name: configuration of the dataset.
        split: the split.
        stream: see `HubDataset.stream`.
        key: config path of the section with the id (`data`), for messages.
        split_key: config path of the split (`data.validation_split`), for messages.
    """

    id: str
    name: str | None
    split: str
    stream: bool
    key: str
    split_key: str

    def sources(self, mirror: Path) -> Sequence[DataSource]:
        """The sources to read. Asks the Hub unless the dataset is local or mirrored.

        Raises:
            ConfigError: the dataset or split does not exist, or the Hub does not respond.
        """
        folder = Path(self.id).expanduser()
        splits = saved_splits(folder)
        if splits or is_saved_dataset(folder):
            return self._saved(folder, splits)
        options = {"name": self.name, "split": self.split}
        given = {name: value for name, value in options.items() if value is not None}
        url = f"hf:{self.id}?{'&'.join(f'{name}={value}' for name, value in given.items())}"
        dataset = HubDataset(url, f"{self.key}.id", self.id, tuple(given.items()), self.stream)
        available = dataset.check(mirror)
        if available and self.split not in available:
            raise self._unknown_split(available)
        return [dataset]

    def _saved(self, folder: Path, splits: Sequence[str]) -> Sequence[DataSource]:
        if self.name is not None:
            raise ConfigError(
                f"{self.key}.name: has no effect on {folder}: a saved dataset has a single configuration. Remove it"
            )
        available = splits or [saved_split(folder) or "train"]
        if self.split not in available:
            raise self._unknown_split(available)
        place = folder / self.split if splits else folder
        return [LocalFile(path.name, path) for path in saved_files(place, f"{self.key}.id")]

    def _unknown_split(self, available: Sequence[str]) -> ConfigError:
        advice = ", or null for no validation data" if self.split_key.endswith("validation_split") else ""
        return ConfigError(
            f"{self.split_key}: '{self.split}' given, but {self.id} has no such split. Choose one of:"
            f" {', '.join(available)}{advice}"
        )
