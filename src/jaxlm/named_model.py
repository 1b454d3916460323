"""A model as a person names it: a checkpoint of ours, or a folder as Hugging Face writes it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlm.adapters import with_adapters, without_adapters
from jaxlm.config import decode_run
from jaxlm.core.cli import override
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first
from jaxlm.core.yaml_source import Source
from jaxlm.data.tokenizer import Tokenizer, load_tokenizer
from jaxlm.engine.remote import is_url
from jaxlm.interop.folder import load_model, open_folder
from jaxlm.interop.hub import local_folder, may_be_repository
from jaxlm.interop.sources import open_tensors
from jaxlm.models.base import LanguageModel
from jaxlm.plan import Plan, make_plan
from jaxlm.trained import AS_TRAINED, check_effective, open_trained

_CHECKPOINT = "--checkpoint"


@dataclass(frozen=True)
class NamedModel:
    """A model that can be used, not trained further.

    Attributes:
        place: where it was found.
        plan: for the devices that are there.
        stop_ids: tokens that end what it writes.
        load: the model in its parameters' dtype; call it inside `plan.layout.use()`.
    """

    place: Path | str
    tokenizer: Tokenizer
    plan: Plan
    stop_ids: tuple[int, ...]
    load: Callable[[], LanguageModel]

    def for_use(self) -> LanguageModel:
        """The model in its compute dtype, adapters folded in. Call it inside `plan.layout.use()`."""
        return jax.jit(lambda model: self.plan.precision.to_compute(without_adapters(model)))(self.load())


def open_model(name: str, keys: Mapping[str, Any], adapter: str | None = None, weights: str = AS_TRAINED) -> NamedModel:
    """What a path, a URL of a checkpoint, or the hub's `name` or `name@revision` means.

    Args:
        keys: dotted key -> value, over the configuration that was saved, or that the folder's config.json makes.
        weights: of a checkpoint: see `Trained.load_model`.
        adapter: a PEFT folder whose adapters are put beside the layers.

    Raises:
        ConfigError: it is nothing of these, or cannot be opened as asked.
    """
    opened = _imported(name, keys, weights) if _is_hugging_face(name) else _checkpoint(name, keys, weights)
    if adapter is None:
        return opened
    plan = opened.plan

    def load() -> LanguageModel:
        return with_adapters(opened.load(), Path(adapter), plan.config.model, plan.layout)

    return NamedModel(opened.place, opened.tokenizer, plan, opened.stop_ids, load)


def _is_hugging_face(name: str) -> bool:
    if is_url(name):
        return False
    path = Path(name)
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / "run").is_dir()
    # `checkpoints/mine`, where there are checkpoints, is more likely one of them misspelt than somebody's repository.
    below = "/" in name and "@" not in name and path.parent.exists()
    return not path.exists() and may_be_repository(name) and not below


def _checkpoint(name: str, keys: Mapping[str, Any], weights: str) -> NamedModel:
    try:
        trained = open_trained(name, keys)
    except ConfigError as error:
        if Path(name).exists() or not may_be_repository(name):
            raise
        raise ConfigError(f"{error} If a repository of the hub is meant: {name}@main") from error
    eos = trained.tokenizer.eos_id
    stop_ids = () if eos is None else (eos,)
    return NamedModel(
        trained.found.place, trained.tokenizer, trained.plan, stop_ids, lambda: trained.load_model(weights)
    )


def _imported(name: str, keys: Mapping[str, Any], weights: str) -> NamedModel:
    if weights != AS_TRAINED:
        raise ConfigError(
            f"--weights: '{weights}' given, but {name} is of Hugging Face and has no averages. Leave it out"
        )
    folder = main_first(lambda: local_folder(name, _CHECKPOINT, weights=True))
    opened = open_folder(folder)
    dtype = next(iter(open_tensors(folder).tensors.values())).dtype.name
    usual = {
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "data": {"tokenizer": str(folder)},
        "trainer": {"mp": f"p={dtype},c={dtype}", "train_batch_size": -1, "per_device_parallelism": 1},
    }
    check_effective(keys)
    config = decode_run(override(Source(usual), dict(keys)), None)
    tokenizer = load_tokenizer(str(folder))
    # All rows of the embedding, tokens or not: the same model as at Hugging Face, to the last logit.
    plan = make_plan(config, "imported", opened.vocab_size)

    def load() -> LanguageModel:
        return load_model(folder, plan.recipe.abstract_first_model, config.model, plan.layout)

    return NamedModel(folder, tokenizer, plan, _stop_ids(folder, tokenizer), load)


def _stop_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Of generation_config.json, which may name several, and the tokenizer's."""
    file = folder / "generation_config.json"
    try:
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    several = found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(i for i in (*several, tokenizer.eos_id) if isinstance(i, int)))
