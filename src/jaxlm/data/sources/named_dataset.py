"""A dataset given by `id`, `name` and `split`: on the Hugging Face Hub, or saved in a local folder."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import DataSource
from jaxlm.data.sources.files import LocalFile
from jaxlm.data.sources.hugging_face import HubDataset, is_saved_dataset, saved_files, saved_split, saved_splits


def dataset_sources(
    dataset_id: str, name: str | None, split: str, stream: bool, mirror: Path, *, key: str, named: str, advice: str
) -> Sequence[DataSource]:
    """The sources of one split of a dataset. Asks the Hub unless the dataset is local or mirrored.

    Args:
        dataset_id: id on the Hub, or a folder.
        key: config path of the section with the id (`data`), for messages.
        named: config path and value of the split (`data.split: 'train'`), for messages.
        advice: what else to do about a split that does not exist.

    Raises:
        ConfigError: the dataset or split does not exist, or the Hub does not respond.
    """
    folder = Path(os.path.expanduser(dataset_id))
    splits = saved_splits(folder)
    if splits or is_saved_dataset(folder):
        if name is not None:
            raise ConfigError(
                f"{key}.name: has no effect on {folder}: a saved dataset has a single configuration. Remove it"
            )
        _check_split(dataset_id, split, splits or [saved_split(folder) or "train"], named, advice)
        saved = saved_files(folder / split if splits else folder, f"{key}.id")
        return [LocalFile(path.name, path) for path in saved]
    options = (("split", split),) if name is None else (("name", name), ("split", split))
    url = f"hf:{dataset_id}?{'&'.join(f'{option}={value}' for option, value in options)}"
    dataset = HubDataset(url, f"{key}.id", dataset_id, options, stream)
    if available := dataset.check(mirror):
        _check_split(dataset_id, split, available, named, advice)
    return [dataset]


def _check_split(dataset_id: str, split: str, available: Sequence[str], named: str, advice: str) -> None:
    if split not in available:
        raise ConfigError(f"{named}, but {dataset_id} has no such split. Choose one of: {', '.join(available)}{advice}")
