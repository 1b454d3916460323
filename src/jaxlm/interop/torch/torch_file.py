"""Torch checkpoint files as a tensor source, memory-mapped."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note_file
from jaxlm.core.install import install_command
from jaxlm.core.safe_io import open_regular
from jaxlm.interop.hf.safetensors_file import TensorInfo

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_ZIP = b"PK\x03\x04"
# numpy has none of these, so torch cannot convert them.
_VIEWED = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_DTYPES = ("float64", "float32", "float16", *_VIEWED, "int64", "int32", "int16", "int8", "uint8", "bool")


class TorchFile:
    """A file written by `torch.save`: a state dict, or a dict with one under `state_dict` or `model`.

    It is loaded with `weights_only`, so it cannot execute code.

    Raises:
        ConfigError: torch is not installed, or the file does not contain only tensors, dense and of a known dtype.
    """

    def __init__(self, path: Path):
        try:
            import torch  # pyright: ignore[reportMissingImports] - the extra `torch`
        except ImportError as error:
            raise ConfigError(
                f"{path} is a torch file, but torch is not installed. Run: {install_command('torch')}. Or convert the weights"
                " to safetensors, which does not need torch"
            ) from error
        with open_regular(path) as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
        note_file(path)
        if not is_zip:
            raise ConfigError(
                f"{path}: not a zip file. It is damaged, or in the format of torch before version 1.6. Convert that with"
                f" these lines of Python: weights = torch.load({path.name!r}, weights_only=True);"
                f" torch.save(weights, {path.name!r})"
            )
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged pickle has torch do anything
            raise ConfigError(
                f"{path}: cannot be loaded with weights_only: {type(error).__name__}: {error}. It is damaged, or has more"
                " than tensors. Save `module.state_dict()` with torch.save"
            ) from error
        for key in ("state_dict", "model"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
        ):
            raise ConfigError(f"{path}: contains no state dict (name -> tensor). Save `module.state_dict()`")
        self._path = path
        self._content: dict[str, Any] = content
        self.tensors = {name: TensorInfo(tuple(t.shape), _numpy_dtype(path, name, t)) for name, t in content.items()}

    def view(self, name: str, region: tuple[slice, ...] = ()) -> np.ndarray:
        tensor = self._content[name].detach()
        dtype = self.tensors[name].dtype
        if dtype.name in _VIEWED:
            import torch  # pyright: ignore[reportMissingImports]

            return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)[(*region, ...)]
        return tensor.numpy()[(*region, ...)]

    def where(self, name: str) -> str:
        return f"{self._path}: '{name}'"


def _numpy_dtype(path: Path, name: str, tensor: Any) -> np.dtype:
    dtype, layout = (str(of).removeprefix("torch.") for of in (tensor.dtype, tensor.layout))
    if dtype not in _DTYPES or layout != "strided":
        problem = f"the dtype {dtype}" if layout == "strided" else f"the layout {layout}"
        raise ConfigError(
            f"{path}: '{name}' has {problem}. Known: dense tensors of {', '.join(_DTYPES)}. Convert it with torch and"
            " save the file again"
        )
    return np.dtype(dtype)  # jax has registered the names of bfloat16 and float8 with numpy
