"""From URLs to files: local ones, remote ones through a mirror, Hugging Face's, and the standard library's.

corpus/*.jsonl    a glob                  s3://bucket/x-{1..8}.jsonl.gz    anything with :// through fsspec
corpus/           everything below        hf:openai/gsm8k?name=main        a dataset of the hub
saved/            a saved dataset         stdlib:train, stdlib:validation  Python's standard library
"""

import difflib
import glob
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import DataSource, Log
from jaxlm.data.sources import hugging_face, stdlib
from jaxlm.data.sources.compression import COMPRESSIONS
from jaxlm.data.sources.document_files import ARRAYS, allowed_suffixes, format_of, has_records
from jaxlm.data.sources.globs import before_wildcards, common_folder, expand_braces
from jaxlm.data.sources.mirror import list_remote
from jaxlm.data.sources.text_file import TextFile

_NAMES_SHOWN = 5
_COPIES_AT_ONCE = 8
_USUAL_MIRROR = Path("cache/mirror")
_HERE = ("file://", "local://")  # fsspec's names for this machine's own files


@dataclass(frozen=True)
class LocalFile(DataSource):
    """A file that is here already.

    Attributes:
        known_as: its name.
        path: where it is.
    """

    known_as: str
    path: Path

    @property
    def name(self) -> str:
        return self.known_as

    @property
    def num_bytes(self) -> int | None:
        return self.path.stat().st_size

    @property
    def has_records(self) -> bool:
        return has_records(self.path.name)

    def is_here(self, mirror: Path) -> bool:
        del mirror
        return True

    def files(self, mirror: Path, log: Log) -> list[tuple[str, Path]]:
        del mirror, log
        return [(self.known_as, self.path)]


def list_sources(
    urls: Sequence[str], key: str, mirror: Path = _USUAL_MIRROR, cache: Path | None = None
) -> list[list[DataSource]]:
    """What each URL means, sorted by name. Nothing is copied.

    Args:
        key: where URLs are configured (`data.train_urls`), for messages.
        mirror: where copies of what is elsewhere are kept.
        cache: a folder whose files are no text: left out where it lies in a folder that a URL means.

    Raises:
        ConfigError: a URL that matches nothing, or means the cache itself; says what there is nearby, or what to do.
    """
    return [_sources_of(url, f"{key}[{number}]", mirror, cache) for number, url in enumerate(urls)]


def find_files(
    urls: Sequence[str],
    key: str,
    text_key: str,
    mirror: Path = _USUAL_MIRROR,
    log: Log = print,
    cache: Path | None = None,
) -> list[TextFile]:
    """The files that URLs mean, each once: in the order of the URLs, and sorted by name within each.

    What is elsewhere is copied into `mirror` first. Files of the folder `cache` are left out, see `list_sources`.

    Raises:
        ConfigError: as `list_sources`, or a copy that fails.
    """
    listed = list_sources(urls, key, mirror, cache)
    return open_files([(f"{key}[{number}]", some) for number, some in enumerate(listed)], text_key, mirror, log)


def open_files(
    listed: Sequence[tuple[str, Sequence[DataSource]]], text_key: str, mirror: Path, log: Log
) -> list[TextFile]:
    """The files of sources, each once, in their order; copied first where they are not here.

    Args:
        listed: where each is configured (`data.train_urls[0]`), and the sources that this means.
    """
    found: dict[Path, TextFile] = {}
    names: set[str] = set()
    _copy([source for _, sources in listed for source in sources], mirror, log)
    for where, sources in listed:
        for name, path in (file for source in sources for file in source.files(mirror, log)):
            place = path.resolve()
            if place in found:
                continue
            # Files may have one name; the later ones say which URL they are of, and which file of it.
            wanted = [name, f"{name} ({where})"]
            name = next((w for w in wanted if w not in names), f"{wanted[1]} {len(found)}")
            names.add(name)
            found[place] = TextFile(path, name, text_key)
    return list(found.values())


def _copy(sources: Sequence[DataSource], mirror: Path, log: Log) -> None:
    """Copies what is not here, several at once."""
    away = [source for source in sources if not source.is_here(mirror)]
    if away:
        with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
            list(pool.map(lambda source: source.files(mirror, log), away))


def _sources_of(url: str, key: str, mirror: Path, cache: Path | None) -> list[DataSource]:
    if url.startswith(stdlib.SCHEME):
        return [LocalFile(*file) for file in stdlib.library_files(url.removeprefix(stdlib.SCHEME), key)]
    if "://" in url:
        return _remote_files(url, key, cache)
    if url.startswith(hugging_face.SCHEME):
        dataset = hugging_face.hub_dataset(url, key)
        dataset.check(mirror)
        return [dataset]
    return _local_files(url, key, cache)


def _remote_files(url: str, key: str, cache: Path | None) -> list[DataSource]:
    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        listed = list(pool.map(lambda one: list_remote(one, key), expand_braces(url, key)))
    root = common_folder([folder for folder, _ in listed])
    files = list({file.url: file for _, some in listed for file in some}.values())
    if cache is not None and url.startswith(_HERE):
        text = set(_without_cache([_path_of(file.url) for file in files], Path(root), cache, url, key))
        files = [file for file in files if _path_of(file.url) in text]
    _check_suffixes((file.url.partition("?")[0] for file in files), key)
    _check_some_text([file.num_bytes for file in files], url, key)
    named = [file.renamed(file.name.partition("?")[0][len(root) :].lstrip("/")) for file in files]
    return sorted(named, key=lambda file: file.name)


def _path_of(url: str) -> Path:
    """Of a URL that begins with one of `_HERE`."""
    return Path(url.partition("://")[2])


def _local_files(url: str, key: str, cache: Path | None) -> list[DataSource]:
    patterns = [url] if os.path.exists(os.path.expanduser(url)) else expand_braces(url, key)
    listed = [_matches(pattern, key) for pattern in patterns]
    if len(listed) == 1:
        root, paths = listed[0]
    else:
        root = Path(common_folder([os.path.abspath(folder) for folder, _ in listed]) or "/")
        paths = list(dict.fromkeys(Path(os.path.abspath(path)) for _, some in listed for path in some))
    if cache is not None:
        paths = _without_cache(paths, root, cache, url, key)
    _check_suffixes(paths, key)
    for path in paths:
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{key}: '{path}' may not be read. Change its permissions, or leave it out")
    _check_some_text([path.stat().st_size for path in paths], url, key)
    return [LocalFile(*file) for file in sorted((path.relative_to(root).as_posix(), path) for path in paths)]


def _matches(url: str, key: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files of one pattern."""
    path = Path(url).expanduser()
    if path.is_dir():
        paths = _below(path, key)
        if not paths:
            raise ConfigError(f"{key}: the folder '{url}' holds no file that ends in {allowed_suffixes()}")
        return path, paths
    if path.is_file():
        return path.parent, [path]
    paths = [Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]
    if not paths:
        raise ConfigError(f"{key}: '{url}' matches no file{_nearby(path)}")
    return Path(*before_wildcards(path.parts)), paths


def _without_cache(paths: Sequence[Path], root: Path, cache: Path, url: str, key: str) -> list[Path]:
    """The paths of a URL that do not lie in the cache.

    Args:
        root: the folder that the URL means, or what its pattern has before its wildcards.

    Raises:
        ConfigError: that is the cache itself, so that text and what is made of it cannot be told apart; or nothing is left.
    """
    root, cache = root.resolve(), cache.resolve()
    place = os.path.expanduser(url.partition("://")[2] or url)
    if root == cache and (os.path.isdir(place) or any(c in os.path.dirname(place) for c in "*?[")):
        raise ConfigError(
            f"{key}: '{url}' means the folder of data.cache_dir, in which the caches' own files would be read as text."
            " Choose another data.cache_dir, or put the text into a folder of its own"
        )
    if root not in cache.parents:
        return list(paths)
    text = [path for path in paths if cache not in path.resolve().parents]
    if not text:
        raise ConfigError(f"{key}: '{url}' holds no text but what lies in data.cache_dir ({cache}), which is left out")
    return text


def _check_suffixes(paths: Iterable[Path | str], key: str) -> None:
    for path in map(Path, paths):
        if format_of(path.name) is None and path.suffix != ARRAYS:
            ending = "".join(path.suffixes[-2:]) if path.suffix in COMPRESSIONS else path.suffix
            raise ConfigError(f"{key}: '{path}' ends in '{ending}'. Allowed: {allowed_suffixes()}")


def _check_some_text(sizes: Sequence[int | None], url: str, key: str) -> None:
    if all(size == 0 for size in sizes):
        raise ConfigError(f"{key}: '{url}' holds no text: {len(sizes)} file(s), all of them empty")


def _below(folder: Path, key: str) -> list[Path]:
    """All files of a folder and the folders in it that can be read; hidden ones are not meant."""
    found = []
    for parent, folders, names in os.walk(folder):
        hugging_face.check_no_splits(Path(parent), key)
        if hugging_face.is_saved_dataset(Path(parent)):
            folders.clear()
            found += hugging_face.saved_files(Path(parent), key)
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".") and format_of(name)]
    return found


def _nearby(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=_NAMES_SHOWN, cutoff=0.3) or names[:_NAMES_SHOWN]
    return f" (looked in {folder.resolve()}, which holds {', '.join(near) if near else 'nothing'})"
