"""Compiled programs on disk, where the next start finds them."""

import builtins
import contextlib
import glob
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

from jaxlm.core.runtime import is_main_process


def enable_compilation_cache(folder: str | None) -> None:
    """Has jax keep compiled programs, and what GPUs found by autotuning, so that the next start finds them.

    A broken folder only warns. A program in it that cannot be read is deleted with a warning, for jax would neither replace
    it nor cease to stumble over it.
    """
    if folder is None:
        return
    log = warnings.showwarning
    if not isinstance(log, _CacheWarnings):
        log = warnings.showwarning = _CacheWarnings(log)
    log.folder = Path(folder)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "all")
    jax.config.update("jax_raise_persistent_cache_errors", False)


class _CacheWarnings:
    """Says jax's warnings about its compilation cache in words for people, and deletes what cannot be used."""

    _FAILED = re.compile(
        r"Error (?P<doing>reading|writing) persistent compilation cache entry for '(?P<name>[^']+)':"
        r" (?P<error>\w+)(?P<why>.*)"
    )

    def __init__(self, otherwise: Callable[..., None]):
        self._otherwise = otherwise
        self.folder = Path()

    def __call__(self, message, category, filename, lineno, file=None, line=None) -> None:
        """See `warnings.showwarning`."""
        failed = self._FAILED.match(str(message))
        if failed is None:
            self._otherwise(message, category, filename, lineno, file, line)
        elif is_main_process():  # the one that writes them
            participle = "read" if failed["doing"] == "reading" else "kept"
            of_the_disk = issubclass(getattr(builtins, failed["error"], Exception), OSError)
            ending = "compiled without it; check or change the folder"
            if participle == "read" and not of_the_disk and self._delete(failed["name"]):
                ending = "deleted, and compiled anew"
            print(
                f"warning: trainer.compilation_cache_dir: {failed['name']} cannot be {participle} in {self.folder}"
                f" ({failed['error']}{failed['why'][:200]}): {ending}",
                file=sys.stderr,
                flush=True,
            )

    def _delete(self, name: str) -> bool:
        """Deletes all programs of a name, for jax does not tell which of them it was; whether there were any."""
        found = list(self.folder.glob(f"{glob.escape(name)}-*"))
        for path in found:
            with contextlib.suppress(OSError):
                path.unlink()
        return bool(found)
