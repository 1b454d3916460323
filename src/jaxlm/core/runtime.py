"""Multi-process utilities: jax options, broadcasts and agreement between processes, and work that only process 0 does."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxlm.core.errors import ConfigError, PeerError

T = TypeVar("T")


def configure_jax(options: Mapping[str, Any]) -> None:
    """Sets jax configuration options. Call it before jax is used."""
    for name, value in options.items():
        if name == "jax_compilation_cache_dir":
            raise ConfigError("trainer.jax_config.jax_compilation_cache_dir: set trainer.compilation_cache_dir instead")
        try:
            jax.config.update(name, value)
        except (AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"trainer.jax_config.{name}: {value!r} given, which jax {jax.__version__} does not accept: {error}"
            ) from error


def is_main_process() -> bool:
    """Whether this is process 0, which prints, logs and makes time-based decisions."""
    return jax.process_index() == 0


def broadcast_from_main(values: np.ndarray) -> np.ndarray:
    """Broadcasts a small array from process 0 to every process."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def all_processes(holds: bool) -> bool:
    """Whether `holds` is true on every process. Every process must call this."""
    if jax.process_count() == 1:
        return holds
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(holds))))


def same_on_all_processes(text: str) -> bool:
    """Whether all processes pass the same text. Every process must call this."""
    if jax.process_count() == 1:
        return True
    from jax.experimental import multihost_utils

    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    return bool(np.all(multihost_utils.process_allgather(digest) == digest))


def differences_between_processes(facts: Mapping[str, str]) -> list[str]:
    """One line for each fact that is not the same on all processes, with its values. Every process must call this."""
    if same_on_all_processes(json.dumps(facts, sort_keys=True)):
        return []
    of_process = [json.loads(text) for text in _texts_of_all_processes(json.dumps(facts))]
    lines = []
    for name in sorted(set().union(*of_process)):
        owners: dict[str, list[int]] = {}
        for process, known in enumerate(of_process):
            owners.setdefault(known.get(name, "missing"), []).append(process)
        if len(owners) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {_processes(owners[value])}" for value in owners))
    return lines


def _texts_of_all_processes(text: str) -> list[str]:
    from jax.experimental import multihost_utils

    raw = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray(len(raw), np.int32)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(raw)] = raw
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _processes(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"process {shown}" if len(numbers) == 1 else f"processes {shown}"


def main_only(act: Callable[[], T]) -> T | None:
    """Calls `act` on process 0 while the other processes wait. Returns its result on process 0 and None on the others.

    Raises:
        BaseException: on process 0, whatever `act` raises.
        ConfigError, PeerError: on the other processes, with the same message, so that they do not wait forever.
    """
    if jax.process_count() == 1:
        return act()
    result, status = None, np.zeros(_STATUS_BYTES, np.uint8)
    if is_main_process():
        try:
            result = act()
        except BaseException as failure:
            broadcast_from_main(_encode_failure(failure))
            raise
    status = broadcast_from_main(status)
    if status[0] != _OK:
        raise _decode_failure(status)
    return result


def from_main(make: Callable[[], Any]) -> Any:
    """What `make` returns on process 0, on every process. It must be plain JSON, which is exact for floats.

    Raises:
        BaseException: on all processes, as `main_only` does.
    """
    made = main_only(make)
    if jax.process_count() == 1:
        return made
    content = json.dumps(made).encode() if is_main_process() else b""
    size = int(broadcast_from_main(np.array(len(content), np.int32)))
    width = 1 << (size - 1).bit_length()  # few different widths, because jax compiles a program for each
    shared = broadcast_from_main(np.frombuffer(content.ljust(width), np.uint8))
    return json.loads(shared.tobytes())


def main_first(make: Callable[[], T]) -> T:
    """Calls `make` on process 0 and then on the others, so that they find the files that process 0 writes.

    Raises:
        BaseException: on the process where `make` fails, whatever it raises.
        ConfigError, PeerError: on all other processes, so that they do not wait forever.
    """
    result = main_only(make)
    if jax.process_count() > 1:
        try:
            result = result if is_main_process() else make()
        except BaseException:
            all_processes(False)
            raise
        if not all_processes(True):
            raise PeerError("another process failed; see its output for the cause")
    return cast(T, result)


# The status that process 0 broadcasts: one byte for the kind, then the error message.
_STATUS_BYTES = 4096
_OK, _CONFIG_ERROR, _OTHER_ERROR = range(3)


def _encode_failure(failure: BaseException) -> np.ndarray:
    kind = _CONFIG_ERROR if isinstance(failure, ConfigError) else _OTHER_ERROR
    text = str(failure) if kind == _CONFIG_ERROR else f"{type(failure).__name__}: {failure}"
    raw = bytes([kind]) + text.encode()[: _STATUS_BYTES - 1]
    return np.frombuffer(raw.ljust(_STATUS_BYTES, b"\0"), np.uint8)


def _decode_failure(status: np.ndarray) -> Exception:
    text = "process 0: " + status[1:].tobytes().rstrip(b"\0").decode(errors="ignore")
    return ConfigError(text) if status[0] == _CONFIG_ERROR else PeerError(text)
