"""A dataset that is named by `id`, `name` and `split`: of the Hugging Face hub, or a folder on this machine."""

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
        id: the hub's name for it, or a folder.
        name: of its configuration.
        split: which of its splits.
        stream: see `HubDataset.stream`.
        key: of the section that names it (`data`), for messages.
        split_key: of the split (`data.validation_split`), for messages.
    """

    id: str
    name: str | None
    split: str
    stream: bool
    key: str
    split_key: str

    def sources(self, mirror: Path) -> Sequence[DataSource]:
        """What is to be read; the hub is asked about what is not here.

        Raises:
            ConfigError: there is no such dataset or split, or the hub does not answer; says what to do.
        """
        folder = Path(self.id).expanduser()
        splits = saved_splits(folder)
        if splits or is_saved_dataset(folder):
            return self._saved(folder, splits)
        options = {"name": self.name, "split": self.split}
        given = {name: value for name, value in options.items() if value is not None}
        url = f"hf:{self.id}?{'&'.join(f'{name}={value}' for name, value in given.items())}"
        dataset = HubDataset(url, f"{self.key}.id", self.id, tuple(given.items()), self.stream)
        there = dataset.check(mirror)
        if there and self.split not in there:
            raise self._no_split(there)
        return [dataset]

    def _saved(self, folder: Path, splits: Sequence[str]) -> Sequence[DataSource]:
        if self.name is not None:
            raise ConfigError(f"{self.key}.name: has no effect on {folder}, a dataset that is saved without it")
        there = splits or [saved_split(folder) or "train"]
        if self.split not in there:
            raise self._no_split(there)
        place = folder / self.split if splits else folder
        return [LocalFile(path.name, path) for path in saved_files(place, f"{self.key}.id")]

    def _no_split(self, there: Sequence[str]) -> ConfigError:
        advice = "; null evaluates on none" if self.split_key.endswith("validation_split") else ""
        return ConfigError(
            f"{self.split_key}: '{self.split}' given, and {self.id} has no such split. It has: {', '.join(there)}{advice}"
        )
