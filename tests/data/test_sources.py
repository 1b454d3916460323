import glob
import json
import os
import random
import sysconfig
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from tests.data.helpers import find_files


def names(*urls, text_key="text"):
    return [file.name for file in find_files([str(url) for url in urls], "data.train_urls", text_key)]


def documents(*urls, text_key="text"):
    files = find_files([str(url) for url in urls], "data.train_urls", text_key)
    return [text for file in files for text in file.documents()]


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.py", "deep/er/c.jsonl", "deep/d.txt", ".hidden/e.txt", "notes.md", ".f.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n" if path.suffix == ".jsonl" else name)
    return tmp_path


def test_folders_files_and_globs(tree):
    assert names(tree) == ["a.py", "b.txt", "deep/d.txt", "deep/er/c.jsonl"]
    assert names(tree / "b.txt", tree / "a.py") == ["b.txt", "a.py"]
    assert names(tree / "*.txt") == ["b.txt"]
    assert names(tree / "**/*.txt") == ["b.txt", "deep/d.txt"]
    assert names(tree / "deep" / "*" / "*.jsonl") == ["er/c.jsonl"]
    assert documents(tree) == ["a.py", "b.txt", "deep/d.txt", "deep/er/c.jsonl"]


def test_braces(tree):
    for number in (8, 9, 10):
        (tree / f"x-{number:02}.txt").write_text(str(number))
    assert names(tree / "x-{08..10}.txt") == ["x-08.txt", "x-09.txt", "x-10.txt"]
    assert names(tree / "{deep/d,b}.txt") == ["b.txt", "deep/d.txt"]
    assert names(tree / "{a.py,*.txt}") == ["a.py", "b.txt", "x-08.txt", "x-09.txt", "x-10.txt"]
    with pytest.raises(ConfigError, match=r"x-11\.txt' matches no file"):
        names(tree / "x-{10..11}.txt")
    (tree / "odd{1,2}.txt").write_text("a file may be called so")
    assert names(tree / "odd{1,2}.txt") == ["odd{1,2}.txt"]


def test_a_file_is_listed_once_and_names_are_unique(tree, tmp_path_factory):
    assert names(tree / "b.txt", tree) == ["b.txt", "a.py", "deep/d.txt", "deep/er/c.jsonl"]
    other = tmp_path_factory.mktemp("other")
    (other / "b.txt").write_text("another b")
    assert names(tree / "b.txt", other / "b.txt") == ["b.txt", "b.txt (data.train_urls[1])"]


def test_same_documents_from_any_folder(tree, monkeypatch):
    absolute = names(tree / "deep")
    monkeypatch.chdir(tree)
    assert names("deep") == absolute
    monkeypatch.chdir(tree / "deep")
    assert names("../deep") == names(".") == absolute


@pytest.mark.parametrize("pattern", [".", "**/*.*"])
def test_the_order_does_not_depend_on_the_file_system(tree, monkeypatch, pattern):
    (tree / "notes.md").unlink()
    expected = ["a.py", "b.txt", "deep/d.txt", "deep/er/c.jsonl"]
    walk, matching = os.walk, glob.glob
    for seed in range(5):
        shuffled = random.Random(seed)

        def any_walk(top, shuffled=shuffled):
            for parent, folders, files in walk(top):
                shuffled.shuffle(folders)
                yield parent, folders, shuffled.sample(files, len(files))

        def any_glob(pathname, *, recursive, shuffled=shuffled):
            found = matching(pathname, recursive=recursive)
            return shuffled.sample(found, len(found))

        monkeypatch.setattr(os, "walk", any_walk)
        monkeypatch.setattr(glob, "glob", any_glob)
        assert names(tree / pattern) == expected


def test_an_unreadable_file_is_an_error(tree, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b.txt")  # root can read everything
    with pytest.raises(ConfigError, match=r"data\.train_urls\[0\]: '.*b\.txt' is not readable"):
        names(tree)


def test_a_digest_depends_on_content_not_on_time(tree):
    [file] = find_files([str(tree / "b.txt")], "data.train_urls", "text")
    before = file.digest
    os.utime(file.path, (1, 1))
    assert file.digest == before
    file.path.write_text("other")
    assert file.digest != before


def test_records(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"body": "one\\ntwo"}\n\n   \n{"body": ""}\r\n{"body": "gr\\u00f6\\u00dfe", "id": 1}', newline="")
    assert documents(path, text_key="body") == ["one\ntwo", "größe"]


def test_text_is_read_byte_for_byte(tmp_path):
    raw = "\ufeffa\r\nb\rc\n\x00 größe".encode()
    (tmp_path / "x.txt").write_bytes(raw)
    assert documents(tmp_path)[0].encode() == raw


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{tree}/b.text", r"data\.train_urls\[1\]: '.*b\.text' matches no file .*which contains b\.txt"),
        ("{tree}/nowhere/*.txt", r"data\.train_urls\[1\]: .*matches no file"),
        ("{tree}/notes.md", r"data\.train_urls\[1\]: .* has the suffix '\.md'\. Allowed: \.txt, \.jsonl, \.py"),
        ("{tree}/empty", r"data\.train_urls\[1\]: the folder .* contains no file with one of the suffixes"),
        ("{tree}/nothing.txt", r"data\.train_urls\[1\]: .* contains no text: 1 empty file"),
        ("nothing://bucket/x.txt", r"data\.train_urls\[1\]: .*fsspec does not support nothing://"),
        ("{tree}/x{{1..9000000}}.txt", r"data\.train_urls\[1\]: .*expands to 9,000,000 files"),
        ("stdlib:test", r"data\.train_urls\[1\]: 'stdlib:test' given\. Allowed: stdlib:train, stdlib:validation"),
    ],
)
def test_invalid_urls_are_refused(tree, url, message):
    (tree / "empty").mkdir()
    (tree / "nothing.txt").touch()
    with pytest.raises(ConfigError, match=message):
        names(tree / "a.py", url.format(tree=tree))


class TestStandardLibrary:
    @pytest.fixture(scope="class")
    def splits(self):
        return {name: find_files([f"stdlib:{name}"], "x", "text") for name in ("train", "validation")}

    def test_splits_share_neither_files_nor_content(self, splits):
        train, held_out = splits.values()
        assert not {file.name for file in train} & {file.name for file in held_out}
        digests = [file.digest for file in [*train, *held_out]]
        assert len(set(digests)) == len(digests)
        assert 0.03 < len(held_out) / len(digests) < 0.07

    @pytest.mark.slow
    def test_contains_exactly_the_readable_text(self, splits):
        root = Path(sysconfig.get_path("stdlib"))
        found = [*splits["train"], *splits["validation"]]
        listed = {file.path for file in found}
        contents = {path: path.read_bytes() for path in listed | set(root.rglob("*.py"))}
        everything = {contents[path] for path in listed}
        for path in contents.keys() - listed:
            if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
                readable = contents[path].decode(errors="ignore").encode() == contents[path]
                assert (contents[path] in everything) == bool(readable and contents[path]), path
        assert all(contents[path].decode() for path in listed)
        assert all(file.name == f"stdlib:{file.path.relative_to(root).as_posix()}" for file in found)
        assert not any({"site-packages", "dist-packages"} & set(path.relative_to(root).parts) for path in listed)
        assert "stdlib:json/decoder.py" in {file.name for file in found}

    def test_is_sorted(self, splits):
        names = [file.name for file in splits["train"]]
        assert names == sorted(names)
