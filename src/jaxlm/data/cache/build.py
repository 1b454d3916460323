"""Text into token caches that are complete or invisible.

A cache is built in `<split>.building` and takes its name when it is whole. The work is kept in shards, so that after a
kill it goes on where it stopped, and comes to the same bytes.
"""

import io
import json
import shutil
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxlm.core.atomic_io import atomic_file, commit_folder, folder_lock, fsync
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Log
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder
from jaxlm.data.cache.cache_key import CacheKey, content_of
from jaxlm.data.cache.token_cache import ABOUT, OFFSETS, TARGETS, TOKENS, TokenCache, open_cache, write_about
from jaxlm.data.cache.workers import LOCAL_WORKERS, Workers
from jaxlm.data.formats.base import Encoder, RawContent, TokenizedText
from jaxlm.data.sources.text_file import TextFile

_SHARD_CHARACTERS = 1 << 22  # what a kill can cost
_SHOW_EVERY_S = 2.0
_PLAN = "plan.json"


class _Shard(NamedTuple):
    """Documents, the number of the file that each is from, and how many bytes of all files are read after them."""

    documents: list[RawContent]
    sources: np.ndarray
    position: int


def open_or_build(
    folder: Path,
    files: Sequence[TextFile],
    encoder: Encoder,
    made_from: CacheKey,
    log: Log,
    workers: Workers = LOCAL_WORKERS,
) -> TokenCache:
    """The cache in `folder`, built first where there is none.

    Raises:
        ConfigError: what is there was made from something else (says from what), or is damaged; or the folder cannot
            be written.
    """
    building = folder.with_name(f"{folder.name}.building")
    if not folder.exists() or building.exists():
        with folder_lock(writable_folder(folder.parent), log):
            if not folder.exists():  # another process may have been faster
                _build(folder, building, files, encoder, made_from, log, workers)
            shutil.rmtree(building, ignore_errors=True)
    return open_cache(folder, made_from)


def _build(
    folder: Path,
    building: Path,
    files: Sequence[TextFile],
    encoder: Encoder,
    made_from: CacheKey,
    log: Log,
    workers: Workers,
) -> None:
    with disk_full_errors(building):
        _begin(building, made_from)
        _make_shards(building, files, encoder, made_from, log, workers)
        _check_unchanged(files, made_from)
        _join_shards(building, files, made_from, log)
        commit_folder(building / "finished", folder)


def _begin(building: Path, made_from: CacheKey) -> None:
    """Keeps what an interrupted start has left, if that was of the same recipe."""
    plan = building / _PLAN
    # Shards of another size would hold other documents under the same numbers.
    content = json.dumps({"shard_characters": _SHARD_CHARACTERS, "made_from": dict(made_from)}).encode()
    if not plan.is_file() or plan.read_bytes() != content:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        with atomic_file(plan) as path:
            path.write_bytes(content)
    shutil.rmtree(building / "finished", ignore_errors=True)
    for leftover in building.glob("*.tmp"):
        leftover.unlink()


def _make_shards(
    building: Path, files: Sequence[TextFile], encoder: Encoder, made_from: CacheKey, log: Log, workers: Workers
) -> None:
    """Tokenizes all documents, so many characters at a time; shards that are there already are kept."""
    dtype = np.uint16 if made_from["vocab_size"] <= 1 << 16 else np.uint32
    progress = _Progress(building.stem, sum(file.size for file in files), log)
    for number, (shard, found) in enumerate(_tokenized(_shards_of(files, encoder), building, encoder, workers)):
        if found is None:
            progress.skip(shard.position)
            continue
        arrays = _arrays(shard, found, dtype)
        if not number and not len(arrays["lengths"]):
            raise ConfigError(encoder.no_targets_message())
        _write_shard(_shard_path(building, number), arrays)
        progress.add(shard.position, len(arrays["lengths"]), len(arrays["tokens"]))


def _arrays(shard: _Shard, found: Sequence[TokenizedText | None], dtype: type[np.unsignedinteger]) -> dict[str, Any]:
    """What a shard holds, without the documents that there is nothing to learn from."""
    pairs = zip(found, shard.documents, shard.sources, strict=True)
    kept = [(tokens, document, source) for tokens, document, source in pairs if tokens is not None]
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([np.zeros(0, dtype), *(tokens.ids.astype(dtype) for tokens, _, _ in kept)]),
        "lengths": np.array([len(tokens.ids) for tokens, _, _ in kept], np.int64),
        "sources": np.array([source for _, _, source in kept], np.int64),
        "num_bytes": sum(document.num_bytes for _, document, _ in kept),
        "left_out": len(found) - len(kept),
    }
    masks = [tokens.targets for tokens, _, _ in kept if tokens.targets is not None]
    if masks:
        arrays["targets"] = np.concatenate(masks).astype(np.uint8)
    return arrays


def _tokenized(
    shards: Iterator[_Shard], building: Path, encoder: Encoder, workers: Workers
) -> Iterator[tuple[_Shard, list[TokenizedText | None] | None]]:
    """Shards in their order, each with its documents' tokens; None where it has been written before."""
    ahead: deque[tuple[_Shard, Future[list[TokenizedText | None]] | None]] = deque()
    with workers.encoding(encoder) as pool:
        for number, shard in enumerate(shards):
            is_there = _read_shard(_shard_path(building, number)) is not None
            contents = [document.what for document in shard.documents]
            ahead.append((shard, None if is_there else pool.submit(contents)))
            if len(ahead) > pool.at_once:
                yield _result(*ahead.popleft())
        while ahead:
            yield _result(*ahead.popleft())


def _result(
    shard: _Shard, tokens: Future[list[TokenizedText | None]] | None
) -> tuple[_Shard, list[TokenizedText | None] | None]:
    return shard, None if tokens is None else tokens.result()


def _shard_path(building: Path, number: int) -> Path:
    return building / f"shard-{number:06d}.npz"


def _check_unchanged(files: Sequence[TextFile], made_from: CacheKey) -> None:
    now = content_of(files)
    changed = sorted(name for name, digest in made_from["files"].items() if now[name] != digest)
    if changed:
        raise ConfigError(
            f"{len(changed)} file(s) changed while they were tokenized: {', '.join(changed[:5])}. Start again"
        )


def _write_shard(path: Path, arrays: Mapping[str, Any]) -> None:
    archive = io.BytesIO()
    np.savez(archive, **arrays)
    raw = archive.getvalue()
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(raw + zlib.crc32(raw).to_bytes(4, "little"))


def _read_shard(path: Path) -> dict[str, np.ndarray] | None:
    """What was written; None where there is no such shard, or it is damaged."""
    raw = path.read_bytes() if path.is_file() else b""
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


def _join_shards(building: Path, files: Sequence[TextFile], made_from: CacheKey, log: Log) -> None:
    """Writes `finished/` from all shards, `cache.json` last."""
    finished = building / "finished"
    finished.mkdir()
    shards = sorted(building.glob("shard-*.npz"))
    with atomic_file(finished / TOKENS) as path, open(path, "wb") as file:
        joined = _append_shards(shards, file)
    if joined["has_targets"]:
        with atomic_file(finished / TARGETS) as path, open(path, "wb") as file:
            joined["crc32"][TARGETS] = _append_targets(shards, file)
    if not joined["lengths"]:
        raise ConfigError("the data holds no text at all: no record of its files has any")
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(joined["lengths"]))]).astype(np.int64)
    with atomic_file(finished / OFFSETS) as path:
        path.write_bytes(offsets.data)  # `tofile` does not say that the disk is full
    num_tokens, num_documents, num_bytes = int(offsets[-1]), len(offsets) - 1, joined["num_bytes"]
    about = {
        "made_from": dict(made_from),
        "dtype": joined["dtype"],
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "num_bytes": num_bytes,
        "documents_of_files": np.bincount(np.concatenate(joined["sources"]), minlength=len(files)).tolist(),
        "crc32": {**joined["crc32"], OFFSETS: zlib.crc32(offsets.data)},
    }
    with atomic_file(finished / ABOUT) as path:
        write_about(path, about)
    fsync(finished)
    log(f"{building.stem}: {num_documents:,} documents, {num_tokens:,} tokens, {num_bytes:,} bytes of text")
    if joined["left_out"]:
        log(f"{building.stem}: {joined['left_out']:,} documents are left out: there is nothing to learn from them")


def _append_shards(shards: Sequence[Path], file: BinaryIO) -> dict[str, Any]:
    """Writes the tokens of all shards; returns what belongs to them."""
    joined: dict[str, Any] = {"lengths": [], "sources": [], "num_bytes": 0, "left_out": 0, "has_targets": False}
    crc32 = 0
    for path in shards:
        shard = _whole_shard(path)
        joined["lengths"].append(shard["lengths"])
        joined["sources"].append(shard["sources"])
        joined["num_bytes"] += int(shard["num_bytes"])
        joined["left_out"] += int(shard.get("left_out", 0))
        joined["has_targets"] |= "targets" in shard
        joined["dtype"] = shard["tokens"].dtype.name
        crc32 = zlib.crc32(shard["tokens"].data, crc32)
        file.write(shard["tokens"].data)
    return joined | {"crc32": {TOKENS: crc32}}


def _append_targets(shards: Sequence[Path], file: BinaryIO) -> int:
    """Writes which tokens of all shards are targets; returns their checksum."""
    crc32 = 0
    for path in shards:
        shard = _whole_shard(path)
        targets = shard.get("targets", np.zeros(0, np.uint8))
        assert len(targets) == len(shard["tokens"]), f"{path} has other targets than tokens"
        crc32 = zlib.crc32(targets.data, crc32)
        file.write(targets.data)
    return crc32


def _whole_shard(path: Path) -> dict[str, np.ndarray]:
    shard = _read_shard(path)
    assert shard is not None, f"{path} was whole a moment ago"
    return shard


class _Progress:
    """A line every two seconds: bytes of the files, and the pace of what this process has tokenized itself."""

    def __init__(self, name: str, total_bytes: int, log: Log):
        self._name, self._total_bytes, self._show = name, total_bytes, log
        self._bytes = self._documents = self._tokens = 0
        self._began = self._shown = time.monotonic()

    def skip(self, bytes_read: int) -> None:
        """What an interrupted start had done already; so many bytes are done by now."""
        self._bytes = bytes_read

    def add(self, bytes_read: int, num_documents: int, num_tokens: int) -> None:
        """What has just been done; so many bytes are done by now."""
        self._bytes = bytes_read
        self._documents += num_documents
        self._tokens += num_tokens
        now = time.monotonic()
        if now - self._shown > _SHOW_EVERY_S:
            self._shown = now
            pace = self._tokens / (now - self._began)
            self._show(
                f"{self._name}: tokenizing, {self._bytes / self._total_bytes:.0%} of {self._total_bytes / 1e6:.1f} MB,"
                f" {self._documents:,} documents, {self._tokens:,} tokens, {pace:,.0f} tokens/s"
            )
