"""A checkpoint as a person names it: the run's plan and tokenizer, and its model on the devices that are there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.config import decode_run
from jaxlm.core.cli import override
from jaxlm.core.errors import ConfigError
from jaxlm.core.yaml_source import load_yaml
from jaxlm.data.config import DataConfig
from jaxlm.data.tokenizer import Tokenizer, load_tokenizer
from jaxlm.engine.checkpoint import read_cursor
from jaxlm.engine.integrity import DamagedError, verify
from jaxlm.engine.naming import find_checkpoints
from jaxlm.engine.remote import is_url
from jaxlm.engine.restore import Found, restore
from jaxlm.engine.save_policy import CheckpointerConfig
from jaxlm.engine.staging import staged
from jaxlm.models.base import LanguageModel
from jaxlm.plan import Plan, make_plan


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds beside its arrays.

    Attributes:
        found: the checkpoint, whose files have been checked.
        tokenizer: of the run.
        plan: of the run, for the devices that are there.
    """

    found: Found
    tokenizer: Tokenizer
    plan: Plan

    @property
    def data(self) -> DataConfig:
        """Of the phase that the checkpoint stands in."""
        return self.plan.data[self.found.cursor.phase]

    def load_model(self) -> LanguageModel:
        """The model in its parameters' dtype. Call it inside `plan.layout.use()`."""
        abstract = self.plan.recipe.abstract_state(self.plan.phases[self.found.cursor.phase]).model
        return restore(self.found, abstract, self.plan.layout, prefix="model")


def open_trained(path: Path | str, options: Mapping[str, Any] | None = None) -> Trained:
    """The checkpoint that a path names, or the newest in a run's folder.

    Args:
        options: dotted key -> value, over the configuration that was saved (`trainer.model_axis_size`, ...).

    Raises:
        ConfigError: there is none, its files are not what was saved, or the devices cannot hold it as configured.
    """
    found = find_checkpoint(path)
    tokenizer = load_tokenizer(str(found.path / "run" / "tokenizer"))
    source = override(load_yaml(found.path / "run" / "config.yaml"), dict(options or {}))
    return Trained(found, tokenizer, make_plan(decode_run(source, None), "trained", tokenizer.vocab_size))


def find_checkpoint(place: Path | str) -> Found:
    """The checkpoint that a path or URL names: itself, or the newest in a run's folder. Its files are checked.

    Raises:
        ConfigError: there is none, or its files are not what was saved.
    """
    if isinstance(place, str) and is_url(place):
        candidates, path = staged(place, Path(CheckpointerConfig.staging_dir)), Path(place)
    else:
        path = Path(place)
        candidates = [path] if (path / "run" / "cursor.json").is_file() else find_checkpoints(path)
    if not candidates:
        near = sorted(str(p.parent) for p in path.parent.glob("*/step-*")) if path.parent.is_dir() else []
        there = f" There are: {', '.join(dict.fromkeys(near))}" if near else ""
        raise ConfigError(f"--checkpoint {place}: no checkpoint there (step-N, or a folder of them).{there}")
    newest = candidates[-1]
    try:
        verify(newest)
    except DamagedError as damage:
        raise ConfigError(f"--checkpoint {newest}: damaged: {damage}. Name another one") from damage
    return Found(newest, read_cursor(newest))
