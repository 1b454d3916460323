"""The folder of the model that training begins with: exports change in it only what training has changed.

A run reads it once, as it starts, and each of its checkpoints has its config.json and a description of the rest, because the
folder may be gone when they are exported.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import from_main
from jaxlm.core.safe_io import read_json_object
from jaxlm.engine.checkpoint.store import Checkpoint
from jaxlm.interop.hf.family import family_of_config, with_mtp_of
from jaxlm.interop.hf.folder import ReadOptions, open_folder
from jaxlm.interop.hf.form import edited_json
from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.hf.source_folder import NO_SOURCE, SourceFolder, location_of_source
from jaxlm.interop.hf.text_part import replaced_keys
from jaxlm.interop.pretrained import hf_name
from jaxlm.plan.load_config import read_saved
from jaxlm.plan.plan import Plan, plan_phases
from jaxlm.session.init_from import InitFrom

SOURCE = "source.json"
"""The file of a checkpoint's `run/` folder that has its config.json."""
SOURCE_FOLDER = "source_folder.json"
"""The file of a checkpoint's `run/` folder that describes the rest."""


def source_of_run(plan: Plan, init_from: InitFrom) -> SourceFolder:
    """Reads the source of a run that starts. All processes must call this."""

    def read() -> SourceFolder:
        if init_from.state is not None and init_from.is_own:
            return saved_source(init_from.state.checkpoint)
        if (other := init_from.weights or init_from.state) is not None:
            return _as_exported(other.checkpoint)
        name = hf_name(plan.config.initialize_from_hf, plan.data[0].tokenizer)
        return NO_SOURCE if name is None else _in_folder(name, plan)

    def described() -> list[Any]:
        return [(source := read()).config, source.to_json()]

    return SourceFolder.from_json(*from_main(described))


def source_files(source: SourceFolder) -> dict[str, str]:
    """The files of a checkpoint's `run/` folder that describe it."""
    return {SOURCE: json.dumps(source.config), SOURCE_FOLDER: json.dumps(source.to_json())}


def saved_source(checkpoint: Checkpoint) -> SourceFolder:
    """Reads the source of the run that has saved a checkpoint."""
    with checkpoint.local("run") as run:
        if (file := run / SOURCE).is_file():
            described = run / SOURCE_FOLDER  # earlier versions did not save it
            return SourceFolder.from_json(
                read_json_object(file), read_json_object(described) if described.is_file() else {}
            )
        with contextlib.suppress(ConfigError):  # of an earlier version, which did not save it; its folder may be gone
            config = read_saved(run / "config.yaml")
            tokenizer = plan_phases(config)[1][0].tokenizer
            if (name := hf_name(config.initialize_from_hf, tokenizer)) is not None:
                is_beside = name == hf_name(True, tokenizer)
                return SourceFolder(_config_json(run / "tokenizer" if is_beside else Path(name).expanduser()))
    return NO_SOURCE


def _as_exported(checkpoint: Checkpoint) -> SourceFolder:
    """Returns what an export of another run's checkpoint would have; nothing for a model that transformers does not know."""
    source = saved_source(checkpoint)
    with checkpoint.local("run") as run, contextlib.suppress(ConfigError):
        phases, _ = plan_phases(read_saved(run / "config.yaml"))
        model = phases[checkpoint.cursor().phase].model
        if source.kept:
            try:
                source.check_fits(model, source.vocab_size or 1)
            except ConfigError:
                source = source.text_alone(model)
        return source.with_config(edited_json(family_of_config(model), model, source.config, untied=source.untied))
    return NO_SOURCE


def _in_folder(name: str, plan: Plan) -> SourceFolder:
    config = plan.config
    content = _config_json(folder := local_folder(name, "initialize_from_hf", weights=False))
    content = replaced_keys(content, {}, config.hf_skip_keys)
    if not content or config.hf_weight_names:
        return SourceFolder(content)
    try:
        opened = open_folder(folder, ReadOptions(skip_keys=config.hf_skip_keys))
    except ConfigError:  # the weights are in another form, or what is wrong is said when they are read
        return SourceFolder(content)
    folder = local_folder(name, "initialize_from_hf", weights=True)
    return SourceFolder.read(folder, location_of_source(name, folder), content, with_mtp_of(plan.model, opened.config))


def _config_json(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json_object(file) if file.is_file() else {}
