"""Tokens on disk: one long array that is mapped into memory, and where each document begins in it.

    <cache_dir>/<split>/tokens.bin     uint16, or uint32 for vocabularies above 65,536
                        offsets.npy    int64 [documents + 1]
                        cache.json     what it was made from, and checksums

A cache is complete or invisible: it is built in `<split>.building` and renamed when it is whole. Building goes on after a
kill where it stopped, shard by shard.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources import TextFile
from jaxlm.data.tokenizer import Tokenizer

_SHARD_BYTES = 4 << 20  # of text: what a kill can cost
_SHOW_EVERY_S = 2.0
_NAMES_SHOWN = 5


class DamagedCacheError(ConfigError):
    """The files of a token cache are not what was written."""


@dataclass(frozen=True)
class TokenCache:
    """An open cache.

    Attributes:
        folder: where it is.
        tokens: [num_tokens], mapped into memory.
        offsets: int64 [documents + 1]: where each document begins, and where the last one ends.
        vocab_size: ids are below this.
        num_bytes: of the documents' text.
        fingerprint: CRC-32 of tokens and offsets: equal for equal data.
    """

    folder: Path
    tokens: np.ndarray
    offsets: np.ndarray
    vocab_size: int
    num_bytes: int
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Special tokens included."""
        return len(self.tokens)

    def read(self, places: np.ndarray) -> np.ndarray:
        """int32: the tokens at `places`.

        Raises:
            DamagedCacheError: an id that the vocabulary does not have; names file and place.
        """
        ids = self.tokens[places].astype(np.int32)
        if ids.size and ids.max() >= self.vocab_size:
            bad = np.unravel_index(int(ids.argmax()), ids.shape)
            raise DamagedCacheError(
                f"{self.folder / 'tokens.bin'}: token {places[bad]} is {ids[bad]}, but the vocabulary has"
                f" {self.vocab_size}. The cache is damaged: delete {self.folder} and start again"
            )
        return ids


def recipe(files: Sequence[TextFile], tokenizer: Tokenizer, *, bos: bool, eos: bool) -> dict[str, Any]:
    """Everything that decides about a cache's content."""
    made_from: dict[str, Any] = {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "enforce_bos": bos,
        "enforce_eos": eos,
        "files": {file.name: file.digest for file in files},
    }
    if any(file.path.suffix == ".jsonl" for file in files):
        made_from["text_key"] = files[0].text_key
    return made_from


def open_or_build(
    folder: Path, files: Sequence[TextFile], tokenizer: Tokenizer, made_from: Mapping[str, Any], show: Callable[[str], None]
) -> TokenCache:
    """The cache in `folder`, built first where there is none.

    Raises:
        ConfigError: what is there was made from something else (says from what), or is damaged.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not folder.exists():
            _build(folder, files, tokenizer, made_from, show)
    return open_cache(folder, made_from)


def open_cache(folder: Path, made_from: Mapping[str, Any] | None = None) -> TokenCache:
    """An existing cache, its files checked.

    Raises:
        ConfigError: it was made from something else than `made_from`.
        DamagedCacheError: a file is missing, or is not what was written.
    """
    try:
        about = json.loads((folder / "cache.json").read_text())
        if made_from is not None:
            _check_recipe(folder, about["made_from"], made_from)
        dtype = np.dtype(about["dtype"])
        tokens = np.memmap(folder / "tokens.bin", dtype, mode="r") if about["num_tokens"] else np.zeros(0, dtype)
        offsets = np.load(folder / "offsets.npy")
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(folder, str(error)) from error
    for name, array in (("tokens", tokens), ("offsets", offsets)):
        if len(array) != about[f"num_{name}"] or zlib.crc32(np.ascontiguousarray(array)) != about[f"crc32_{name}"]:
            raise _damaged(folder, f"the {name} are not what was written")
    fingerprint = f"{about['crc32_tokens']:08x}{about['crc32_offsets']:08x}"
    return TokenCache(folder, tokens, offsets, about["made_from"]["vocab_size"], about["num_bytes"], fingerprint)


def _damaged(folder: Path, problem: str) -> DamagedCacheError:
    return DamagedCacheError(f"the token cache {folder} is damaged: {problem}. Delete it; it will be built again")


def _check_recipe(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if before == now:
        return
    differences = [
        f"{key}: {_short(before.get(key))} then, {_short(now.get(key))} now"
        for key in dict.fromkeys([*before, *now])
        if key != "files" and before.get(key) != now.get(key)
    ]
    then, today = before["files"], now["files"]
    for label, names in (
        ("files added", today.keys() - then.keys()),
        ("files removed", then.keys() - today.keys()),
        ("files changed", {name for name in then.keys() & today.keys() if then[name] != today[name]}),
    ):
        if names:
            listed = ", ".join(sorted(names)[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            differences.append(f"{label}: {len(names)} ({listed})")
    raise ConfigError(
        f"the token cache {folder} was made from something else:\n  "
        + "\n  ".join(differences)
        + "\nChoose another data.cache_dir, or delete this one to build it anew"
    )


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 15 else str(value)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One builder at a time on this machine; the others wait and then find the cache."""
    with open(folder.with_name(f"{folder.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(
    folder: Path, files: Sequence[TextFile], tokenizer: Tokenizer, made_from: Mapping[str, Any], show: Callable[[str], None]
) -> None:
    building = folder.with_name(f"{folder.name}.building")
    plan = building / "made_from.json"
    if not plan.is_file() or json.loads(plan.read_text()) != made_from:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        _write(plan, json.dumps(made_from).encode())
    if not (building / "cache.json").is_file():
        _make_shards(building, files, tokenizer, made_from, show)
        _join_shards(building, made_from, show)
    for leftover in [*building.glob("shard-*"), plan]:
        leftover.unlink()
    os.rename(building, folder)


def _make_shards(
    building: Path, files: Sequence[TextFile], tokenizer: Tokenizer, made_from: Mapping[str, Any], show: Callable[[str], None]
) -> None:
    """Tokenizes all documents, _SHARD_BYTES of text at a time; shards that are there already are skipped over."""
    before = [tokenizer.bos_id] if made_from["enforce_bos"] and tokenizer.bos_id is not None else []
    after = [tokenizer.eos_id] if made_from["enforce_eos"] and tokenizer.eos_id is not None else []
    documents = itertools.chain.from_iterable(file.documents() for file in files)
    total_bytes = sum(file.path.stat().st_size for file in files)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    began = last_shown = time.monotonic()
    num_bytes = num_tokens = 0
    for number, texts in enumerate(_batches_of_text(documents)):
        shard_bytes = sum(len(text.encode()) for text in texts)
        num_bytes += shard_bytes
        path = building / f"shard-{number:06d}.npz"
        if path.is_file():
            continue
        encoded = [[*before, *ids, *after] for ids in tokenizer.encode_batch(texts)]
        lengths = np.array([len(ids) for ids in encoded], np.int64)
        tokens = np.fromiter(itertools.chain.from_iterable(encoded), dtype, int(lengths.sum()))
        with open(path.with_suffix(".unfinished"), "wb") as file:
            np.savez(file, tokens=tokens, lengths=lengths, num_bytes=shard_bytes)
        os.replace(path.with_suffix(".unfinished"), path)
        num_tokens += len(tokens)
        if time.monotonic() - last_shown > _SHOW_EVERY_S:
            last_shown = time.monotonic()
            pace = num_tokens / (last_shown - began)
            show(f"tokenizing: {num_bytes / total_bytes:.0%} of {total_bytes / 1e6:.1f} MB, {pace:,.0f} tokens/s")


def _batches_of_text(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _SHARD_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _join_shards(building: Path, made_from: Mapping[str, Any], show: Callable[[str], None]) -> None:
    lengths, num_bytes, crc, dtype = [], 0, 0, np.dtype(np.uint16)
    with open(building / "tokens.bin", "wb") as file:
        for path in sorted(building.glob("shard-*.npz")):
            with np.load(path) as shard:
                tokens = shard["tokens"]
                lengths.append(shard["lengths"])
                num_bytes += int(shard["num_bytes"])
            crc, dtype = zlib.crc32(tokens, crc), tokens.dtype
            file.write(tokens.data)
        file.flush()
        os.fsync(file.fileno())
    if not lengths:
        raise ConfigError("the data holds no text at all: every file is empty")
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    np.save(building / "offsets.npy", offsets)
    about = {
        "made_from": dict(made_from),
        "dtype": dtype.name,
        "num_tokens": int(offsets[-1]),
        "num_offsets": len(offsets),
        "num_bytes": num_bytes,
        "crc32_tokens": crc,
        "crc32_offsets": zlib.crc32(offsets),
    }
    _write(building / "cache.json", json.dumps(about).encode())
    show(f"token cache: {len(offsets) - 1:,} documents, {int(offsets[-1]):,} tokens, {num_bytes:,} bytes of text")


def _write(path: Path, content: bytes) -> None:
    """Writes a small file whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
