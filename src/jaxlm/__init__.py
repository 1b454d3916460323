"""jaxlm: one YAML trains a language model in JAX, sharded, resumable bit for bit."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.core.errors import end_at_interrupt

if TYPE_CHECKING:
    from jaxlm.plan.run_config import RunConfig
    from jaxlm.session.inference_model import InferenceModel

    train: Callable[..., Any]  # `jaxlm.train.train`

__version__ = "0.1.0"

# `jaxlm train` and `python -m jaxlm.train` import this package before the command's module, which takes seconds. Ctrl-C ends
# the imports without a traceback. Other programs that import jaxlm keep their handling of Ctrl-C.
_is_module = sys.argv[:1] == ["-m"] and any(word.partition(".")[0] == "jaxlm" for word in sys.orig_argv[2:])
if _is_module or os.path.basename(sys.argv[0] if sys.argv else "") == "jaxlm":
    end_at_interrupt()


def load(
    name: "str | Path",
    *,
    weights: str = "trained",
    adapter: str | None = None,
    keys: Mapping[str, Any] | None = None,
    devices: Sequence[Any] | None = None,
) -> "InferenceModel":
    """Loads a model onto this process's devices, for use in Python.

    Args:
        name: a checkpoint, a run's checkpoint folder (the newest is used), a Hugging Face folder, or a Hub `name` or
            `name@revision`.
        weights: `trained`, or `ema` for the average of `trainer.model_averaging`.
        adapter: a PEFT folder with adapters to merge into the model.
        keys: dotted key -> value, such as `{"trainer.mp": "f32"}`, which override the saved configuration. The keys of the
            mesh say how the model lies on the devices: `{"trainer.model_axis_size": 2, "trainer.tensor_parallel_axes":
            ["heads", "mlp"]}`.
        devices: the devices to load it onto, such as `jax.devices()[:2]`; None means all.

    Raises:
        ConfigError: there is no such model, or a key does not apply to it.
    """
    from jaxlm.session import inference_model  # imports jax, which `import jaxlm` does not

    return inference_model.load(name, weights=weights, adapter=adapter, keys=keys, devices=devices)


def read_config(path: "Path | str", keys: Mapping[str, Any] | None = None) -> "RunConfig":
    """Reads the configuration of a run, as `jaxlm train --config_path PATH` does.

    Args:
        path: a YAML file, a URL, or a recipe (`jaxlm:quickstart.yaml`).
        keys: dotted key -> value, such as `{"trainer.num_train_steps": 20}`, which override the file.

    Raises:
        ConfigError: there is no such file, or it is not a configuration.
    """
    from jaxlm.plan import load_config

    return load_config.read_config(path, keys)


def __getattr__(name: str) -> Any:
    if name == "train":  # a module that can be called like its function `train`: importing it makes it an attribute
        return importlib.import_module("jaxlm.train")
    raise AttributeError(f"module 'jaxlm' has no attribute '{name}'")
