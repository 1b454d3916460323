"""Enables JAX's persistent compilation cache."""

import builtins
import contextlib
import glob
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxlm.core.runtime import is_main_process
from jaxlm.core.stores import is_url


def enable_compilation_cache(folder: str | None) -> None:
    """Makes JAX cache compiled programs and GPU autotuning results in `folder` for the next start; None disables it.

    An unusable folder only causes a warning. A program that cannot be read is deleted with a warning, because JAX would
    neither replace it nor stop failing on it.
    """
    if folder is not None and not is_url(folder):
        folder = str(Path(folder).absolute())  # JAX opens it later, perhaps from another working directory
    if folder != jax.config.values["jax_compilation_cache_dir"]:
        compilation_cache.reset_cache()  # otherwise JAX goes on with the folder of this process's first run
        jax.config.update("jax_compilation_cache_dir", folder)
    if folder is None:
        return
    handler = warnings.showwarning
    if not isinstance(handler, _CacheWarnings):
        handler = warnings.showwarning = _CacheWarnings(handler)
    handler.folder = Path(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # Not "all": XLA's kernel cache drops what TMA kernels need, so a program that reuses one ends with
    # CUDA_ERROR_ILLEGAL_INSTRUCTION on Hopper GPUs (openxla/xla#35951).
    jax.config.update("jax_persistent_cache_enable_xla_caches", "xla_gpu_per_fusion_autotune_cache_dir")
    jax.config.update("jax_raise_persistent_cache_errors", False)


class _CacheWarnings:
    """Rewrites JAX's warnings about its compilation cache for the user, and deletes programs that cannot be read."""

    _FAILED = re.compile(
        r"Error (?P<doing>reading|writing) persistent compilation cache entry for '(?P<name>[^']+)':"
        r" (?P<error>\w+)(?P<why>.*)"
    )

    def __init__(self, otherwise: Callable[..., None]):
        self._otherwise = otherwise
        self.folder = Path()

    def __call__(self, message, category, filename, lineno, file=None, line=None) -> None:
        """Replaces `warnings.showwarning`."""
        failed = self._FAILED.match(str(message))
        if failed is None:
            self._otherwise(message, category, filename, lineno, file, line)
        elif is_main_process():  # only process 0 writes to the cache
            reading = failed["doing"] == "reading"
            is_os_error = issubclass(getattr(builtins, failed["error"], Exception), OSError)
            outcome = "The program is compiled without the cache. Check the folder, or choose another"
            if reading and not is_os_error and self._delete(failed["name"]):
                outcome = "The cached program was deleted and is compiled again"
            print(
                f"warning: trainer.compilation_cache_dir: cannot {'read' if reading else 'write'} {failed['name']} in"
                f" {self.folder} ({failed['error']}{failed['why'][:200]}). {outcome}",
                file=sys.stderr,
                flush=True,
            )

    def _delete(self, name: str) -> bool:
        """Deletes all cached programs of a name, since JAX does not say which one failed. False if one is left, or none."""
        programs = list(self.folder.glob(f"{glob.escape(name)}-*"))
        for path in programs:
            with contextlib.suppress(OSError):
                path.unlink()
        return bool(programs) and not any(path.exists() for path in programs)
