"""The config.json of the model that training begins with: exports change in it only what training has changed.

A run reads it once, as it starts, and each of its checkpoints has a copy, because the folder may be gone when it is exported.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import from_main
from jaxlm.core.safe_io import read_json_object
from jaxlm.engine.checkpoint.store import Checkpoint
from jaxlm.interop.hf.family import edited_json, family_of_config
from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.pretrained import hf_name
from jaxlm.plan.load_config import read_saved
from jaxlm.plan.plan import Plan, plan_phases
from jaxlm.session.init_from import InitFrom

SOURCE = "source.json"
"""The file of a checkpoint's `run/` folder that has it."""


def source_of_run(plan: Plan, init_from: InitFrom) -> Mapping[str, Any]:
    """Reads the source of a run that starts; empty for random weights. All processes must call this."""

    def read() -> Mapping[str, Any]:
        if init_from.state is not None and init_from.is_own:
            return saved_source(init_from.state.checkpoint)
        if (other := init_from.weights or init_from.state) is not None:
            return _as_exported(other.checkpoint)
        name = hf_name(plan.config.initialize_from_hf, plan.data[0].tokenizer)
        return {} if name is None else _in_folder(local_folder(name, "initialize_from_hf", weights=False))

    return from_main(read)


def saved_source(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Reads the source of the run that has saved a checkpoint."""
    with checkpoint.local("run") as run:
        if (file := run / SOURCE).is_file():
            return read_json_object(file)
        with contextlib.suppress(ConfigError):  # of an earlier version, which did not save it; its folder may be gone
            config = read_saved(run / "config.yaml")
            tokenizer = plan_phases(config)[1][0].tokenizer
            if (name := hf_name(config.initialize_from_hf, tokenizer)) is not None:
                is_beside = name == hf_name(True, tokenizer)
                return _in_folder(run / "tokenizer" if is_beside else Path(name).expanduser())
    return {}


def _as_exported(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Returns what an export of another run's checkpoint would have; empty for a model that transformers does not know."""
    source = saved_source(checkpoint)
    with checkpoint.local("run") as run, contextlib.suppress(ConfigError):
        phases, _ = plan_phases(read_saved(run / "config.yaml"))
        model = phases[checkpoint.cursor().phase].model
        return edited_json(family_of_config(model), model, source)
    return {}


def _in_folder(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    return read_json_object(file) if file.is_file() else {}
