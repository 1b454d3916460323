"""Torch checkpoint files as a tensor source, memory-mapped."""

import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.safetensors_file import TensorInfo

TORCH_SUFFIXES = (".bin", ".pt", ".pth")


class TorchFile:
    """A file written by `torch.save`: a state dict, or a dict with one under `state_dict` or `model`.

    It is loaded with `weights_only`, so it cannot execute code.

    Raises:
        ConfigError: torch is not installed, or the file does not contain only tensors.
    """

    def __init__(self, path: Path):
        try:
            import torch  # pyright: ignore[reportMissingImports] - the extra `torch`
        except ImportError as error:
            raise ConfigError(
                f"{path} is a torch file, but torch is not installed. Run pip install 'jaxlm[torch]', or convert the weights"
                " to safetensors, which does not need torch"
            ) from error
        import pickle

        if not zipfile.is_zipfile(path):
            raise ConfigError(
                f"{path}: not a zip file. It is damaged, or in the format of torch before version 1.6. Convert that with"
                f' these lines of Python: weights = torch.load("{path.name}", weights_only=True); torch.save(weights,'
                f' "{path.name}")'
            )
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ConfigError(
                f"{path}: cannot be loaded with weights_only: {error}. Save `module.state_dict()` with torch.save"
            ) from error
        for key in ("state_dict", "model"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise ConfigError(f"{path}: contains no state dict (name -> tensor). Save `module.state_dict()`")
        self._content: dict[str, Any] = content
        self.tensors = {name: TensorInfo(tuple(t.shape), _numpy_dtype(t)) for name, t in content.items()}

    def view(self, name: str) -> np.ndarray:
        tensor = self._content[name].detach()
        dtype = self.tensors[name].dtype
        if dtype == jnp.bfloat16:  # numpy has no bfloat16, so torch cannot convert it
            import torch  # pyright: ignore[reportMissingImports]

            return tensor.view(torch.int16).numpy().view(dtype)
        return tensor.numpy()


def _numpy_dtype(tensor: Any) -> np.dtype:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))  # ml_dtypes registers the name bfloat16 with numpy
