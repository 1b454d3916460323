"""The environment of a run: the main script's git repository and code, the installed packages, and what computes."""

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax

from jaxlm.core.devices import processor
from jaxlm.core.errors import counted
from jaxlm.core.redaction import redacted_arguments
from jaxlm.core.safe_io import read_bytes, read_text

MAX_CODE_FILES, MAX_CODE_BYTES = 2_000, 32 * 2**20
"""Limits of what is code. No single file may take more than a sixteenth of the bytes: larger ones are data."""
_NOT_CODE = ("__pycache__", "node_modules", "site-packages")
_MAX_VISITED = 20_000  # directory entries to look at in a search for Python files
_TIMEOUT_S = 10
_COMPUTING = ("jaxlm", "jax", "jaxlib", "haliax", "equinox", "optax", "orbax-checkpoint", "flax", "numpy")


def program_folder() -> Path:
    """The main script's folder; the current folder if the script was installed with Python's packages, as `jaxlm` is."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    return Path.cwd() if folder.is_relative_to(Path(sys.prefix).resolve()) else folder


@functools.cache
def repository() -> Path | None:
    """The root of the git repository that contains the program; None without a repository or without git."""
    root = _git(program_folder(), "rev-parse", "--show-toplevel")
    return Path(root) if root else None


def commit() -> str | None:
    """The checked-out commit, followed by `+ changes` if tracked files differ from it; None without a repository."""
    root = repository()
    name = root and _git(root, "rev-parse", "HEAD")
    if not root or not name:
        return None
    return f"{name} + changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else name


def changes() -> str:
    """Uncommitted changes of tracked files, as a patch; empty without changes or without a repository."""
    root = repository()
    patch = root and _git(root, "diff", "HEAD")
    return f"{patch}\n" if patch else ""


def code_files(folder: Path) -> tuple[list[Path], int]:
    """The code in a folder, and the number of files that are left out because they exceed the limits.

    Code is what git tracks, or the Python files if it tracks nothing there. Folders are never walked in a repository: a
    virtual environment has more files than there is time to look at.
    """
    tracked = (_git(folder, "ls-files", "-z") or "").split("\0")
    files = [folder / name for name in tracked if name] or list(_python_files(folder))
    chosen, num_bytes, num_left_out = [], 0, 0
    for path in filter(Path.is_file, files):
        size = path.stat().st_size
        fits = len(chosen) < MAX_CODE_FILES and size <= min(MAX_CODE_BYTES // 16, MAX_CODE_BYTES - num_bytes)
        if fits:
            chosen.append(path)
            num_bytes += size
        else:
            num_left_out += 1
    return chosen, num_left_out


def _python_files(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, without hidden folders, virtual environments and installed packages."""
    visited = itertools.count()
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_CODE)
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        for name in sorted(files):
            if next(visited) >= _MAX_VISITED:
                return
            if name.endswith(".py"):
                yield Path(parent, name)


@functools.cache
def packages() -> tuple[str, ...]:
    """Every installed distribution as `name==version`, sorted."""
    names = {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    return tuple(sorted(names, key=str.lower))


def described() -> dict[str, str]:
    """Lists what a reader of the results asks for: the command, the commit, and the versions of what computes."""
    facts = {"command": _command(), "commit": commit() or "no git repository"}
    versions = {name: _version(name) for name in _COMPUTING}
    return facts | versions | {"Python": platform.python_version(), "system": platform.platform()}


def _command() -> str:
    """The command line of this process: `jaxlm train ...`, `python -m jaxlm.train ...`, or the user's own program."""
    program = Path(sys.argv[0])
    words = [program.name]
    if program.is_relative_to(_PACKAGE):
        parts = program.relative_to(_PACKAGE.parent).with_suffix("").parts
        words = ["python", "-m", ".".join(part for part in parts if part != "__main__")]
    return shlex.join([*words, *redacted_arguments(sys.argv[1:])])


JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_NUMERICS = ("jax", "jaxlib", "haliax", "equinox", "optax", "libtpu")
_PACKAGE = Path(__file__).parents[2]
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables whose value is a list of flags."""
# Other variables that choose algorithms, precision or the order of sums in jax and the libraries that compute,
_CHOOSING = re.compile(
    r"(JAX_|XLA_|TF_XLA_|CUBLAS|CUDNN|TF_CUDNN|NVIDIA_TF32|NCCL_(ALGO|PROTO)|DNNL_|ONEDNN_|TF_ENABLE_ONEDNN|OPENBLAS_)\w*"
)
# and those among them that say where a process runs and what it writes.
_OF_THE_PROCESS = re.compile(
    r"\w*(LOG|VERBOSE|TRACEBACK|DUMP|PROFIL|CACHE|PATH|_DIR|_FILE|VISIBLE_DEVICES|PLATFORM|PROXY|XLA_PYTHON_CLIENT)\w*"
    r"|JAX_(COORDINATOR|PROCESS|NUM|LOCAL_DEVICE|PARTITION|SLICE|ENABLE_PREEMPTION|ENABLE_RECOVER)\w*"
)
_NO_NUMBERS = re.compile(r"--xla_(dump_\w+|force_host_platform_device_count|gpu_dump_\w+)(=|$)")


def computing(modules: Iterable[str]) -> dict[str, str]:
    """Lists what computes the numbers of a run, as name -> text. Args: modules: imported modules of the user's own."""
    devices = jax.devices()
    options = (f"{name}={getattr(jax.config, name)}" for name in JAX_OPTIONS)
    return {
        "jaxlm": f"{_version('jaxlm')}, source {source_of_jaxlm()}",
        "commit of jaxlm": _checkout_of(_PACKAGE),
        **{f"module {name}": source_of(name) for name in sorted(set(modules))},
        "Python": platform.python_version(),
        **{name: _version(name) for name in _NUMERICS},
        "backend": jax.default_backend(),
        "devices": f"{len(devices)} x {devices[0].device_kind} in {counted(jax.process_count(), 'process')}",
        "processor": processor() if jax.default_backend() == "cpu" else "",
        **flags(os.environ),
        "variables": " ".join(f"{name}={value}" for name, value in variables(os.environ).items()),
        "jax options": ", ".join(options),
    }


def flags(environment: Mapping[str, str]) -> dict[str, str]:
    """The flags in environment variables that may change numbers, as name of the variable -> flags."""
    return {name: _flags(environment.get(name, "")) for name in FLAGS}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The other environment variables that may change numbers."""
    chosen = (name for name in sorted(environment) if name not in FLAGS and _CHOOSING.fullmatch(name))
    return {name: environment[name] for name in chosen if not _OF_THE_PROCESS.fullmatch(name)}


def source_of_jaxlm() -> str:
    """The first digits of a hash of jaxlm's source."""
    return _hash_of(sorted(_PACKAGE.rglob("*.py")))


def source_of(module: str) -> str:
    """The first digits of a hash of a module's file, or of all files of the package that contains it."""
    top = sys.modules[module.partition(".")[0]]
    file = getattr(top, "__file__", None)
    if file is None:  # a folder without __init__.py
        return _hash_of([Path(inner)] if (inner := getattr(sys.modules[module], "__file__", None)) else [])
    package = Path(file).name == "__init__.py"
    return _hash_of(sorted(Path(file).parent.rglob("*.py")) if package else [Path(file)])


def _hash_of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(read_bytes(path) for path in files)).hexdigest()[:8]


def _checkout_of(folder: Path) -> str:
    """The commit that a folder is checked out from, and whether its files were changed since."""
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "not a checkout"
    modified = _git(folder, "status", "--porcelain", "--", ".")
    return f"{_git(folder, 'rev-parse', '--short=12', 'HEAD')}{' + changes' if modified else ''}"


def _flags(text: str) -> str:
    """The flags that may change numbers, in a fixed order. XLA also takes the path of a file that contains them."""
    if text and not text.lstrip().startswith("-"):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # then XLA says so
            text = read_text(Path(text))
    return " ".join(sorted(flag for flag in text.split() if not _NO_NUMBERS.match(flag)))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "not installed"


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
