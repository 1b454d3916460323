"""Builds token caches, with workers.

Progress is saved in shards, so an interrupted build resumes where it stopped and produces the same bytes.
"""

import abc
import contextlib
import io
import json
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError, counted
from jaxlm.core.safe_io import atomic_file, read_bytes
from jaxlm.data.base import Log
from jaxlm.data.cache.artifacts import Files, Key
from jaxlm.data.cache.token_cache import GROUPS, NUMBERS, OFFSETS, TARGETS, TOKENS
from jaxlm.data.formats.base import Encoder
from jaxlm.data.formats.segments import RawContent, TokenizedText
from jaxlm.data.sources.record_files import TextFile, file_digests

_SHARD_CHARACTERS = 1 << 22  # at most this much work is lost if the process is killed
_SHARD_VERSION = 2  # of what a shard file has
_LOG_INTERVAL_S = 2.0
_PLAN = "plan.json"


class EncodingPool(NamedTuple):
    """Workers bound to an encoder.

    Attributes:
        submit: tokenizes a list of documents with `Encoder.encode` and returns a future.
        max_in_flight: how many submitted calls keep all workers busy.
    """

    submit: Callable[[Sequence[Any]], Future[list[TokenizedText | None]]]
    max_in_flight: int


class Workers(abc.ABC):
    """Workers that tokenize documents. The result must not depend on their kind or number."""

    @abc.abstractmethod
    def encoding(self, encoder: Encoder) -> contextlib.AbstractContextManager[EncodingPool]:
        """Makes the encoder available to the workers until the block ends."""


class LocalWorkers(Workers):
    """Threads in this process. The tokenizer itself runs outside Python and uses all cores."""

    @contextlib.contextmanager
    def encoding(self, encoder: Encoder) -> Iterator[EncodingPool]:
        # Two calls in flight, so no core idles during the last long document of a call, or during file I/O.
        with ThreadPoolExecutor(2) as pool:
            yield EncodingPool(lambda contents: pool.submit(encoder.encode, contents), max_in_flight=2)


LOCAL_WORKERS = LocalWorkers()


class _Shard(NamedTuple):
    """Documents, the index of each one's file, and how many bytes of all files have been read after them."""

    documents: list[RawContent]
    sources: np.ndarray
    position: int


def build_cache(
    made: Files,
    texts: Sequence[TextFile],
    encoder: Encoder,
    made_from: Key,
    log: Log,
    workers: Workers = LOCAL_WORKERS,
) -> dict[str, Any]:
    """Writes the files of a token cache. Returns what its metadata says of them.

    Raises:
        ConfigError: the texts cannot be tokenized, or have changed meanwhile.
    """
    _prepare_shards(made.work, made_from)
    _write_shards(made.work, texts, encoder, made_from, log, workers)
    _check_unchanged(texts, made_from)
    return _join_shards(made, len(texts), log)


def _prepare_shards(building: Path, made_from: Key) -> None:
    """Keeps the shards of an interrupted build if its key is the same; otherwise starts over."""
    plan = building / _PLAN
    # With another shard size, the same shard number would hold other documents.
    plan_content = {"version": _SHARD_VERSION, "shard_characters": _SHARD_CHARACTERS, "made_from": dict(made_from)}
    content = json.dumps(plan_content).encode()
    if not plan.is_file() or read_bytes(plan) != content:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        with atomic_file(plan) as path:
            path.write_bytes(content)
    for leftover in building.glob("*.tmp"):
        leftover.unlink()


def _write_shards(
    building: Path, files: Sequence[TextFile], encoder: Encoder, made_from: Key, log: Log, workers: Workers
) -> None:
    """Tokenizes all documents shard by shard; shards that exist already are kept."""
    dtype = np.uint16 if made_from["vocab_size"] <= 1 << 16 else np.uint32
    progress = _Progress(building.stem, sum(file.size for file in files), log)
    first, num_read, num_usable = "", 0, 0
    for number, (shard, texts) in enumerate(_tokenized(_shards_of(files, encoder), building, encoder, workers)):
        if number == 1 and not num_usable:
            log(
                f"{building.stem}: warning: none of the first {num_read:,} documents has a token to compute the loss on. If"
                f" the others have none either, the run will not start: {encoder.no_targets_message()}"
            )
        if isinstance(texts, int):
            num_usable += texts
            progress.skip(shard.position)
        else:
            arrays = _shard_arrays(shard, texts, dtype)
            _write_shard(_shard_path(building, number), arrays)
            num_usable += len(arrays["lengths"])
            progress.add(shard.position, len(arrays["lengths"]), len(arrays["tokens"]))
        first, num_read = first or shard.documents[0].where, num_read + len(shard.documents)
    if num_read and not num_usable:
        raise ConfigError(encoder.no_targets_message() + (f". The first record is {first}" if first else ""))


def _shard_arrays(
    shard: _Shard, texts: Sequence[TokenizedText | None], dtype: type[np.unsignedinteger]
) -> dict[str, Any]:
    """The content of a shard file, without documents that have no target tokens."""
    triples = zip(texts, shard.documents, shard.sources, strict=True)
    usable = [(tokens, document, source) for tokens, document, source in triples if tokens is not None]
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([np.zeros(0, dtype), *(tokens.ids.astype(dtype) for tokens, _, _ in usable)]),
        "lengths": np.array([len(tokens.ids) for tokens, _, _ in usable], np.int64),
        "sources": np.array([source for _, _, source in usable], np.int64),
        "groups": np.array([document.group for _, document, _ in usable], np.int64),
        "num_bytes": sum(document.num_bytes for _, document, _ in usable),
        "left_out": len(texts) - len(usable),
    }
    masks = [tokens.target_mask for tokens, _, _ in usable if tokens.target_mask is not None]
    if masks:
        arrays["targets"] = np.concatenate(masks).astype(np.uint8)
    numbers = [tokens.numbers for tokens, _, _ in usable if tokens.numbers is not None]
    if numbers:
        arrays["numbers"] = np.concatenate(numbers).astype(np.float32)
    return arrays


def _tokenized(
    shards: Iterator[_Shard], building: Path, encoder: Encoder, workers: Workers
) -> Iterator[tuple[_Shard, list[TokenizedText | None] | int]]:
    """The shards in order, each with its tokenized documents; with their number, if it has been written before."""
    in_flight: deque[tuple[_Shard, Future[list[TokenizedText | None]] | int]] = deque()
    with workers.encoding(encoder) as pool:
        for number, shard in enumerate(shards):
            written = _read_shard(_shard_path(building, number))  # all of it, because it may be damaged
            contents = [document.content for document in shard.documents]
            in_flight.append((shard, pool.submit(contents) if written is None else len(written["lengths"])))
            if len(in_flight) > pool.max_in_flight:
                yield _result(*in_flight.popleft())
        while in_flight:
            yield _result(*in_flight.popleft())


def _result(
    shard: _Shard, tokens: Future[list[TokenizedText | None]] | int
) -> tuple[_Shard, list[TokenizedText | None] | int]:
    return shard, tokens if isinstance(tokens, int) else tokens.result()


def _shard_path(building: Path, number: int) -> Path:
    return building / f"shard-{number:06d}.npz"


def _check_unchanged(files: Sequence[TextFile], made_from: Key) -> None:
    now = file_digests(files)
    changed = sorted(name for name, digest in made_from["files"].items() if now[name] != digest)
    if changed:
        raise ConfigError(
            f"{counted(len(changed), 'file')} changed during tokenization: {', '.join(changed[:5])}. Start again"
        )


def _write_shard(path: Path, arrays: Mapping[str, Any]) -> None:
    archive = io.BytesIO()
    np.savez(archive, **arrays)
    raw = archive.getvalue()
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(raw + zlib.crc32(raw).to_bytes(4, "little"))


def _read_shard(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a shard; None if the shard does not exist or is damaged."""
    raw = read_bytes(path) if path.is_file() else b""
    archive, checksum = raw[:-4], raw[-4:]
    if not archive or zlib.crc32(archive).to_bytes(4, "little") != checksum:
        return None
    with np.load(io.BytesIO(archive)) as arrays:
        return dict(arrays)


def _shards_of(files: Sequence[TextFile], encoder: Encoder) -> Iterator[_Shard]:
    documents: list[RawContent] = []
    sources: list[int] = []
    size = bytes_before = position = 0
    for number, file in enumerate(files):
        for document in encoder.read(file):
            documents.append(document)
            sources.append(number)
            size += document.size
            position = bytes_before + document.position
            if size >= _SHARD_CHARACTERS:
                yield _Shard(documents, np.array(sources, np.int64), position)
                documents, sources, size = [], [], 0
        bytes_before += file.size
    if documents:
        yield _Shard(documents, np.array(sources, np.int64), position)


def _join_shards(made: Files, num_files: int, log: Log) -> dict[str, Any]:
    """Concatenates all shards."""
    name, shards = made.work.stem, sorted(made.work.glob("shard-*.npz"))
    with made.open(TOKENS) as file:
        joined = _append_shards(shards, file.write)
    if joined["has_targets"]:
        with made.open(TARGETS) as file:
            _append_targets(shards, file.write)
    if joined["numbers"]:
        made.put(NUMBERS, np.concatenate(joined["numbers"]))
    if not joined["lengths"]:
        raise ConfigError("the data contains no text: every record of its files is empty")
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(joined["lengths"]))]).astype(np.int64)
    made.put(OFFSETS, offsets)
    num_tokens, num_documents, num_bytes = int(offsets[-1]), len(offsets) - 1, joined["num_bytes"]
    sources, groups = np.concatenate(joined["sources"]), np.concatenate(joined["groups"])
    group_ends = np.flatnonzero(np.append((np.diff(sources) != 0) | (np.diff(groups) != 0), True)) + 1
    log(f"{name}: {counted(num_documents, 'document')}, {num_tokens:,} tokens, {num_bytes:,} bytes of text")
    if joined["left_out"]:
        log(f"{name}: {counted(joined['left_out'], 'document')} left out, without a token to compute the loss on")
    return {
        "dtype": joined["dtype"],
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "num_bytes": num_bytes,
        "documents_of_files": np.bincount(sources, minlength=num_files).tolist(),
        GROUPS: np.diff(group_ends, prepend=0).tolist(),
    }


def _append_shards(shards: Sequence[Path], write: Callable[[Any], None]) -> dict[str, Any]:
    """Writes the tokens of all shards. Returns the rest of them."""
    joined: dict[str, Any] = {"lengths": [], "sources": [], "groups": [], "numbers": []}
    joined |= {"num_bytes": 0, "left_out": 0, "has_targets": False}
    for path in shards:
        shard = _read_complete_shard(path)
        joined["lengths"].append(shard["lengths"])
        joined["sources"].append(shard["sources"])
        joined["groups"].append(shard["groups"])
        joined["num_bytes"] += int(shard["num_bytes"])
        joined["left_out"] += int(shard.get("left_out", 0))
        joined["has_targets"] |= "targets" in shard
        joined["numbers"] += [shard["numbers"]] if "numbers" in shard else []
        joined["dtype"] = shard["tokens"].dtype.name
        write(shard["tokens"].data)
    return joined


def _append_targets(shards: Sequence[Path], write: Callable[[Any], None]) -> None:
    """Writes the target mask of all shards."""
    for path in shards:
        shard = _read_complete_shard(path)
        target_mask = shard.get("targets", np.zeros(0, np.uint8))
        assert len(target_mask) == len(shard["tokens"]), f"{path}: target mask and tokens differ in length"
        write(target_mask.data)


def _read_complete_shard(path: Path) -> dict[str, np.ndarray]:
    shard = _read_shard(path)
    assert shard is not None, f"{path} is missing or damaged after it was written"
    return shard


class _Progress:
    """Logs progress every two seconds: the share of bytes read, and tokens/s without the skipped shards."""

    def __init__(self, name: str, total_bytes: int, log: Log):
        self._name, self._total_bytes, self._log = name, total_bytes, log
        self._bytes = self._documents = self._tokens = 0
        self._started_at = self._logged_at = time.monotonic()

    def skip(self, bytes_read: int) -> None:
        """Records a shard written by an earlier, interrupted build. Args: bytes_read: total so far."""
        self._bytes = bytes_read

    def add(self, bytes_read: int, num_documents: int, num_tokens: int) -> None:
        """Records a shard tokenized just now. Args: bytes_read: total so far."""
        self._bytes = bytes_read
        self._documents += num_documents
        self._tokens += num_tokens
        now = time.monotonic()
        if now - self._logged_at > _LOG_INTERVAL_S:
            self._logged_at = now
            pace = self._tokens / (now - self._started_at)
            self._log(
                f"{self._name}: tokenizing, {self._bytes / self._total_bytes:.0%} of {self._total_bytes / 1e6:.1f} MB,"
                f" {self._documents:,} documents, {self._tokens:,} tokens, {pace:,.0f} tokens/s"
            )
