"""Resolves URLs to files: local, remote (copied to a mirror), Hugging Face, or Python's standard library.

corpus/*.jsonl    a glob                  s3://bucket/x-{1..8}.jsonl.gz    any URL with ://, through fsspec
corpus/           all files below it      hf:openai/gsm8k?name=main        a dataset on the Hugging Face Hub
saved/            a saved dataset         stdlib:train, stdlib:validation  Python's standard library
"""

import difflib
import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from jaxlm.core.errors import ConfigError, counted
from jaxlm.data.base import DataSource, Log
from jaxlm.data.sources import hugging_face, stdlib
from jaxlm.data.sources.document_files import ARRAYS, COMPRESSIONS, allowed_suffixes, format_of, has_records
from jaxlm.data.sources.mirror import before_wildcards, common_folder, expand_braces, list_remote
from jaxlm.data.sources.record_files import TextFile

_NAMES_SHOWN = 5
_CONCURRENT_COPIES = 8
_LOCAL_SCHEMES = ("file://", "local://")  # fsspec's schemes for local files


@dataclass(frozen=True)
class LocalFile(DataSource):
    """A local file. `name` is relative to its URL."""

    name: str
    path: Path

    @property
    def num_bytes(self) -> int | None:
        return self.path.stat().st_size

    @property
    def has_records(self) -> bool:
        return has_records(self.path.name)

    def is_local(self, mirror: Path) -> bool:
        del mirror
        return True

    def paths(self, mirror: Path) -> list[tuple[str, Path]]:
        del mirror
        return [(self.name, self.path)]

    def files(self, mirror: Path, log: Log) -> list[tuple[str, Path]]:
        del log
        return self.paths(mirror)


def open_files(
    listed: Sequence[tuple[str, Sequence[DataSource]]],
    text_key: str,
    mirror: Path,
    log: Log,
    known: Mapping[str, str] = MappingProxyType({}),
) -> list[TextFile]:
    """The files of sources in order, without duplicates. Remote files are copied first, except those that are known.

    Args:
        listed: pairs of the config path of a URL (`data.train_urls[0]`) and its sources.
        known: `DataSource.identity` -> SHA-256 of the content.
    """
    files: dict[Path, TextFile] = {}
    names: set[str] = set()
    _copy([source for _, sources in listed for source in sources if source.identity not in known], mirror, log)
    for where, sources in listed:
        entries = ((source.identity or "", *file) for source in sources for file in source.paths(mirror))
        for identity, name, path in entries:
            resolved = path.resolve()
            if resolved in files:
                continue
            # Names must be unique: append the URL, and then a number, to names that are taken.
            candidates = [name, f"{name} ({where})"]
            name = next((c for c in candidates if c not in names), f"{candidates[1]} {len(files)}")
            names.add(name)
            files[resolved] = TextFile(path, name, text_key, identity, known.get(identity))
    return list(files.values())


def _copy(sources: Sequence[DataSource], mirror: Path, log: Log) -> None:
    """Copies remote files into the mirror, several at a time."""
    remote = [source for source in sources if not source.is_local(mirror)]
    if remote:
        with ThreadPoolExecutor(_CONCURRENT_COPIES) as pool:
            list(pool.map(lambda source: source.files(mirror, log), remote))


def sources_of(url: str, key: str, mirror: Path, cache: Path | None) -> list[DataSource]:
    """The sources of a URL, sorted by name. Copies nothing.

    Args:
        key: config path of the URL (`data.train_urls[0]`), for messages.
        cache: a folder whose files are not text; they are left out if it lies inside the folder of the URL.

    Raises:
        ConfigError: the URL matches nothing, or is the cache folder itself.
    """
    if url.startswith(stdlib.SCHEME):
        return [LocalFile(*file) for file in stdlib.library_files(url.removeprefix(stdlib.SCHEME), key)]
    if "://" in url:
        return _remote_files(url, key, cache)
    if url.startswith(hugging_face.SCHEME):
        dataset = hugging_face.parse_hub_url(url, key)
        dataset.check(mirror)
        return [dataset]
    return _local_files(url, key, cache)


def _remote_files(url: str, key: str, cache: Path | None) -> list[DataSource]:
    with ThreadPoolExecutor(_CONCURRENT_COPIES) as pool:
        listed = list(pool.map(lambda pattern: list_remote(pattern, key), expand_braces(url, key)))
    root = common_folder([folder for folder, _ in listed])
    files = list({file.url: file for _, group in listed for file in group}.values())
    if cache is not None and url.startswith(_LOCAL_SCHEMES):
        outside = set(_without_cache([_path_of(file.url) for file in files], Path(root), cache, url, key))
        files = [file for file in files if _path_of(file.url) in outside]
    _check_suffixes((file.url.partition("?")[0] for file in files), key)
    _check_not_empty([file.num_bytes for file in files], url, key)
    renamed = [replace(file, name=file.name.partition("?")[0][len(root) :].lstrip("/")) for file in files]
    return sorted(renamed, key=lambda file: file.name)


def _path_of(url: str) -> Path:
    return Path(url.partition("://")[2])


def _local_files(url: str, key: str, cache: Path | None) -> list[DataSource]:
    patterns = [url] if os.path.exists(os.path.expanduser(url)) else expand_braces(url, key)
    listed = [_matches(pattern, key) for pattern in patterns]
    if len(listed) == 1:
        root, paths = listed[0]
    else:
        root = Path(common_folder([os.path.abspath(folder) for folder, _ in listed]) or "/")
        paths = list(dict.fromkeys(Path(os.path.abspath(path)) for _, group in listed for path in group))
    if cache is not None:
        paths = _without_cache(paths, root, cache, url, key)
    _check_suffixes(paths, key)
    for path in paths:
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{key}: '{path}' is not readable. Change its permissions, or remove it from the URLs")
    _check_not_empty([path.stat().st_size for path in paths], url, key)
    return [LocalFile(*file) for file in sorted((path.relative_to(root).as_posix(), path) for path in paths)]


def _matches(url: str, key: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files that match one pattern."""
    path = Path(os.path.expanduser(url))
    if path.is_dir():
        paths = _files_below(path, key)
        if not paths:
            raise ConfigError(
                f"{key}: the folder '{url}' contains no file with one of the suffixes {allowed_suffixes()}"
            )
        return path, paths
    if path.is_file():
        return path.parent, [path]
    paths = [Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]
    if not paths:
        raise ConfigError(f"{key}: '{url}' matches no file{_nearby(path)}")
    return Path(*before_wildcards(path.parts)), paths


def _without_cache(paths: Sequence[Path], root: Path, cache: Path, url: str, key: str) -> list[Path]:
    """The paths of a URL that are not in the cache folder.

    Args:
        root: the URL's folder, or the part of its pattern before the first wildcard.

    Raises:
        ConfigError: `root` is the cache folder itself, so text and cache files are indistinguishable; or no path is left.
    """
    root, cache = root.resolve(), cache.resolve()
    pattern = os.path.expanduser(url.partition("://")[2] or url)
    if root == cache and (os.path.isdir(pattern) or glob.has_magic(os.path.dirname(pattern))):
        raise ConfigError(
            f"{key}: '{url}' is the folder data.cache_dir, so the files of the caches would be read as text."
            " Choose another data.cache_dir, or put the text into a folder of its own"
        )
    if root not in cache.parents:
        return list(paths)
    outside = [path for path in paths if cache not in path.resolve().parents]
    if not outside:
        raise ConfigError(
            f"{key}: '{url}' contains no files outside data.cache_dir ({cache}), which is not read as text"
        )
    return outside


def _check_suffixes(paths: Iterable[Path | str], key: str) -> None:
    for path in map(Path, paths):
        if format_of(path.name) is None and path.suffix != ARRAYS:
            ending = "".join(path.suffixes[-2:]) if path.suffix in COMPRESSIONS else path.suffix
            raise ConfigError(f"{key}: '{path}' has the suffix '{ending}'. Allowed: {allowed_suffixes()}")


def _check_not_empty(sizes: Sequence[int | None], url: str, key: str) -> None:
    if all(size == 0 for size in sizes):
        raise ConfigError(f"{key}: '{url}' contains no text: {counted(len(sizes), 'empty file')}")


def _files_below(folder: Path, key: str) -> list[Path]:
    """All readable files of a folder and its subfolders, except hidden ones."""
    paths = []
    for parent, folders, names in os.walk(folder):
        hugging_face.check_no_splits(Path(parent), key)
        if hugging_face.is_saved_dataset(Path(parent)):
            folders.clear()
            paths += hugging_face.saved_files(Path(parent), key)
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".") and format_of(name)]
    return paths


def _nearby(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=_NAMES_SHOWN, cutoff=0.3) or names[:_NAMES_SHOWN]
    return f" (looked in {folder.resolve()}, which contains {', '.join(near) if near else 'nothing'})"
