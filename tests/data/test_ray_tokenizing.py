"""Which caches are built on a cluster, and when the cluster is started."""

import contextlib
from dataclasses import dataclass

from jaxlm.data.cache.build import LOCAL_WORKERS
from jaxlm.data.cache.ray_workers import RayConfig, tokenize_on_ray
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import write_corpus


def test_a_cluster_is_started_only_to_build_missing_caches(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    events: list[str] = []

    @dataclass(frozen=True)
    class Cluster(RayConfig):
        @contextlib.contextmanager
        def cluster(self, log, *, shared):
            events.append(f"begun, shared {shared}")
            yield LOCAL_WORKERS
            events.append("stopped")

    write_corpus(tmp_path / "text")
    text = [str(tmp_path / "text")]
    config = TokensConfig(train_urls=text, validation_urls=text, cache_dir=str(tmp_path / "cache"), vocab_size=270)
    tokenizer = config.corpus.load_tokenizer(lambda _: None)
    for none in (None, Cluster(auto_start_cluster=False)):
        tokenize_on_ray(none, [config], tokenizer, [16], print)
    assert not config.is_tokenized()
    tokenize_on_ray(Cluster(), [config], tokenizer, [16], lambda _: None)
    assert config.is_tokenized()
    assert events == ["begun, shared False", "stopped"]
    tokenize_on_ray(Cluster(), [config], tokenizer, [16], print)
    assert len(events) == 2
