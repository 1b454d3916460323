"""Multi-process utilities: jax options, broadcasts and agreement between processes, and work that only process 0 does."""

import gc
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxlm.core.devices import host_memory
from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.core.exchange import Exchange, alone, exchange

T = TypeVar("T")

# What is larger goes through the devices: process 0 would send it to each of the others.
_LARGE_BYTES = 4 * 2**20


def configure_jax(options: Mapping[str, Any]) -> None:
    """Sets jax configuration options, and lets devices use all of the host's memory. Call it before jax is used."""
    # XLA for GPUs allocates at most 64 GB there, for all of a process's devices, unless this says more.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_memory() >> 30))
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
    """Tells whether this is process 0, which prints, logs and makes time-based decisions."""
    return jax.process_index() == 0


def broadcast_from_main(values: np.ndarray) -> np.ndarray:
    """Broadcasts an array from process 0 to every process, bit for bit. All processes must pass the same shape and dtype."""
    if (others := exchange()) is None:
        return values
    if values.nbytes > _LARGE_BYTES:
        from jax.experimental import multihost_utils

        array = np.frombuffer(values.tobytes(), np.uint8)  # jax would round float64
        raw = np.asarray(multihost_utils.broadcast_one_to_all(array)).tobytes()
    else:
        raw = others.conclude(b"", lambda _: values.tobytes())
    return np.frombuffer(raw, values.dtype).reshape(values.shape).copy()


def all_processes(holds: bool) -> bool:
    """Tells whether `holds` is true on every process. Every process must call this."""
    return not largest_of_processes(int(not holds))


def largest_of_processes(number: int) -> int:
    """The largest of the numbers that the processes pass. Every process must call this."""
    if (others := exchange()) is None:
        return number
    return int(others.conclude(str(number).encode(), lambda numbers: max(numbers, key=int)))


def same_on_all_processes(text: str) -> bool:
    """Tells whether all processes pass the same text. Every process must call this."""
    if (others := exchange()) is None:
        return True
    digest = hashlib.sha256(text.encode()).digest()
    return bool(others.conclude(digest, lambda digests: b"same" if len(set(digests)) == 1 else b""))


def differences_between_processes(
    facts: Mapping[str, str], are_same: Callable[[Sequence[str | None]], bool] = lambda values: len(set(values)) == 1
) -> list[str]:
    """One line for each fact that is not the same on all processes, with its values. Every process must call this. To
    `are_same`, a missing value is None.
    """
    others, text = exchange(), json.dumps(facts, sort_keys=True)
    if others is None or same_on_all_processes(text):
        return []
    return json.loads(others.conclude(text.encode(), lambda said: json.dumps(_differences(said, are_same)).encode()))


def _differences(messages: Sequence[bytes], are_same: Callable[[Sequence[str | None]], bool]) -> list[str]:
    of_process = [json.loads(text) for text in messages]
    lines = []
    for name in sorted(set().union(*of_process)):
        owners: dict[str, list[int]] = {}
        for process, known in enumerate(of_process):
            owners.setdefault(known.get(name, "missing"), []).append(process)
        if not are_same([known.get(name) for known in of_process]):
            values = "; ".join(f"{value or 'none'} on {_processes(numbers)}" for value, numbers in owners.items())
            lines.append(f"{name}: {values}")
    return lines


def _processes(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"process {shown}" if len(numbers) == 1 else f"processes {shown}"


def main_only(act: Callable[[], T]) -> T | None:
    """Calls `act` on process 0 while the other processes wait. Returns its result on process 0 and None on the others.

    Raises:
        BaseException: on process 0, whatever `act` raises.
        ConfigError, PeerError: on the other processes, with the same message, so that they do not wait forever.
    """
    if (others := exchange()) is None:
        return alone(act)
    return _of_main(others, lambda: alone(act), lambda _: b"")[0]


def from_main(make: Callable[[], Any]) -> Any:
    """Returns on every process what `make` returns on process 0. It must be plain JSON, which is exact for floats.

    Raises:
        BaseException: on all processes, as `main_only` does.
    """
    if (others := exchange()) is None:
        return alone(make)
    return json.loads(_of_main(others, lambda: alone(make), lambda made: json.dumps(made).encode())[1])


def _of_main(others: Exchange, act: Callable[[], T], encode: Callable[[T], bytes]) -> tuple[T | None, bytes]:
    """The result of `act`, on process 0, and its bytes, on every process."""
    result, encoded = None, b""
    if not others.index:
        try:
            result = act()
            encoded = encode(result)
        except BaseException as failure:  # raised again, once the others know
            others.announce(_encode_failure(0, failure))
            raise
    reply = others.conclude(b"", lambda _: _WORKED + encoded)
    _raise_failure(reply)
    return result, reply.removeprefix(_WORKED)


def main_first(make: Callable[[], T]) -> T:
    """Calls `make` on process 0 and then on the others, so that they find the files that process 0 writes.

    Raises:
        BaseException: on the process where `make` fails, whatever it raises.
        ConfigError, PeerError: on all other processes, with the message of the first of them.
    """
    if (others := exchange()) is None:
        return make()
    result, failed = _of_main(others, make, lambda _: b"")[0], None
    if others.index:
        try:
            result = make()
        except BaseException as failure:  # raised again below, once the others know
            failed = failure
    own_status = _WORKED if failed is None else _encode_failure(others.index, failed)
    first_failure = others.conclude(
        own_status, lambda statuses: next((status for status in statuses if status != _WORKED), _WORKED)
    )
    if failed is not None:
        raise failed
    _raise_failure(first_failure)
    return cast(T, result)


_WORKED, _MAX_MESSAGE = b"+", 4000


def _encode_failure(process: int, failure: BaseException) -> bytes:
    is_config = isinstance(failure, ConfigError)
    text = str(failure) if is_config else f"{type(failure).__name__}: {failure}"
    return json.dumps({"is_config": is_config, "text": f"process {process}: {text[:_MAX_MESSAGE]}"}).encode()


def _raise_failure(status: bytes) -> None:
    if status.startswith(_WORKED):
        return
    failure = json.loads(status)
    raise ConfigError(failure["text"]) if failure["is_config"] else PeerError(failure["text"])


def release_ended() -> None:
    """Frees the objects and the compiled programs of what has ended: of a phase, which has frozen its objects for the time
    that it lasted.
    """
    gc.unfreeze()
    jax.clear_caches()
    gc.collect()
