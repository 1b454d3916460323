"""`trainer.ray`: a cluster builds the same cache as this process, even if workers are killed."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.cache import build as build_module
from jaxlm.data.cache.build import LOCAL_WORKERS
from jaxlm.data.cache.ray_workers import RayConfig, join_cluster
from jaxlm.data.cache.token_cache import cache_key
from jaxlm.data.formats.base import Encoder
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from tests.data.helpers import built, find_files, small_tokenizer, write_corpus


def test_an_unreachable_cluster_is_an_error(monkeypatch):
    with (
        pytest.raises(ConfigError, match=r"trainer\.ray\.address: '127\.0\.0\.1:1' cannot be reached \(ConnectionRef"),
        RayConfig(address="127.0.0.1:1").cluster(print, shared=False),
    ):
        pass
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayConfig().uses_cluster
    assert not RayConfig(auto_start_cluster=False).uses_cluster  # how the guide turns Ray off
    assert RayConfig(address="host:1", auto_start_cluster=False).uses_cluster
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert RayConfig(auto_start_cluster=False).uses_cluster
    with (
        pytest.raises(ConfigError, match=r"'127\.0\.0\.1:1' cannot be reached.*Remove trainer\.ray to tokenize"),
        RayConfig().cluster(print, shared=False),
    ):
        pass


def killing_one(folder: Path, killed: list[int]) -> threading.Thread:
    """A thread that kills the worker of the fourth part while it works on it."""

    def watch() -> None:
        while len(begun := sorted(folder.iterdir())) < 4:
            time.sleep(0.01)
        killed.append(int(begun[-1].name.partition("-")[2]))
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
def test_the_cache_is_the_same_when_workers_are_killed_and_join(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(build_module, "_SHARD_CHARACTERS", 300)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    @dataclass(frozen=True)
    class Slow:
        """Records its process id for each part, and works slowly. Ray copies it by value."""

        usual: Any
        begun: Path

        def encode_arrays(self, texts):
            if texts and "not tokenized" in texts[0]:
                raise ConfigError("this cannot be tokenized")
            (self.begun / f"{time.time():.6f}-{os.getpid()}").touch()
            time.sleep(0.2)
            return self.usual.encode_arrays(texts)

    write_corpus(tmp_path / "text")
    (tmp_path / "begun").mkdir()
    tokenizer = small_tokenizer()
    usual = TextFormat().encoder(tokenizer, bos=True, eos=True, key="")
    slow = replace(usual, tokenizer=cast(Tokenizer, Slow(tokenizer, tmp_path / "begun")))
    logged: list[str] = []

    def build(name: str, encoder: Encoder, workers, text: str = "text") -> dict[str, bytes]:
        files = find_files([str(tmp_path / text)], "x", "text")
        made_from = cache_key(files, tokenizer, bos=True, eos=True)
        built(tmp_path / name / "train", files, encoder, made_from, logged.append, workers)
        return {path.name: path.read_bytes() for path in (tmp_path / name / "train").iterdir()}

    expected = build("local", usual, LOCAL_WORKERS)
    before = signal.getsignal(signal.SIGTERM)
    with RayConfig().cluster(logged.append, shared=True) as workers:
        import ray

        killed: list[int] = []
        killer = killing_one(tmp_path / "begun", killed)
        assert build("cluster", slow, workers) == expected
        killer.join()
        begun = [path.name for path in (tmp_path / "begun").iterdir()]
        assert len({name.partition("-")[2] for name in begun}) > 1
        assert len(killed) == 1
        alone = sum(node["Alive"] for node in ray.nodes())
        # Errors of tokenizing arrive as they were raised.
        (tmp_path / "bad.txt").write_text("not tokenized")
        with pytest.raises(ConfigError, match=r"^this cannot be tokenized"):
            build("bad", slow, workers, "bad.txt")
        # The machine of another process; in this test, the same machine.
        with join_cluster(workers.cluster_address) as node:
            end = time.monotonic() + 60
            while sum(n["Alive"] for n in ray.nodes()) == alone and time.monotonic() < end:
                assert node.poll() is None
                time.sleep(0.2)
            assert sum(n["Alive"] for n in ray.nodes()) == alone + 1
        assert node.poll() is not None
    assert signal.getsignal(signal.SIGTERM) is before
    assert any(line.startswith("ray: tokenizing on ") and "(started)" in line for line in logged)
    shown = capfd.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if line.strip()]
    assert all("(raylet)" in line for line in lines), lines  # it reports only the worker that died
