"""Where tensors come from: a folder as Hugging Face writes it, or files of torch. Read in place, not loaded."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.safetensors_file import TensorInfo

TORCH_SUFFIXES = (".bin", ".pt", ".pth")


class TorchFile:
    """A file that `torch.save` has written: a state dict, or one under the key `state_dict` or `model`.

    Only tensors and plain containers are read (`weights_only`): a file cannot run code.
    """

    def __init__(self, path: Path):
        """Opens the file.

        Raises:
            ConfigError: torch is not installed, or the file holds something else than tensors.
        """
        try:
            import torch  # pyright: ignore[reportMissingImports] - the extra `torch`
        except ImportError as error:
            raise ConfigError(
                f"{path} is a file of torch, which is not installed: pip install 'jaxlm[torch]', or convert the weights"
                " to safetensors, which needs no torch"
            ) from error
        import pickle

        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ConfigError(
                f"{path}: cannot be read as weights alone: {error}. Save `module.state_dict()` with torch.save"
            ) from error
        for key in ("state_dict", "model"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise ConfigError(f"{path}: holds no state dict (name -> tensor). Save `module.state_dict()`")
        self._content: dict[str, Any] = content
        self.tensors = {name: TensorInfo(tuple(t.shape), _numpy_dtype(t)) for name, t in content.items()}

    def view(self, name: str) -> np.ndarray:
        tensor = self._content[name].detach()
        dtype = self.tensors[name].dtype
        if dtype == jnp.bfloat16:  # numpy has none of its own, so torch does not hand it over
            import torch  # pyright: ignore[reportMissingImports]

            return tensor.view(torch.int16).numpy().view(dtype)
        return tensor.numpy()


def _numpy_dtype(tensor: Any) -> np.dtype:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))  # ml_dtypes has told numpy the name bfloat16
