"""Where tables are written, and which checks come first."""

import json

import fsspec
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import PublishError
from jaxlm.core.values.batch_types import PairBatch
from jaxlm.evals.tables import Table
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import tables
from jaxlm.session.tables import ABOUT, check_run_tables, default_folder
from jaxlm.systems.upcycle.measurements import MemoryTableConfig

MODEL = {"seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4}
CONFIG = MemoryTableConfig(contexts=[8, 16])
VALUES = ("m", "float32", "int8", 1, 8, 100, 0, 800, 800, 68, 12345, "compiler")
ROW = dict(zip((column.name for column in CONFIG.columns), VALUES, strict=True))
TABLE = Table("memory", CONFIG.caption, CONFIG.columns, (ROW, ROW | {"context": 16}), CONFIG.picture)


def plan_of(**sections):
    config = {"model": MODEL, "trainer": {"id": "x", "train_batch_size": 16}} | sections
    return make_plan(decode_run(ConfigSource(config), None), "x", 64)


def test_files_are_uploaded_and_the_description_comes_last(monkeypatch):
    order = []
    store = fsspec.filesystem("memory")
    put = type(store).put_file

    def spied(self, local, remote, **rest):
        order.append(remote)
        return put(self, local, remote, **rest)

    monkeypatch.setattr(type(store), "put_file", spied)
    tables._write([TABLE], {"a": 1}, "memory://bucket/run/tables")
    names = [path.rpartition("/")[2] for path in store.ls("/bucket/run/tables", detail=False)]
    assert set(names) == {"memory.csv", "memory.tex", "memory_scaling.png", ABOUT}
    assert json.loads(store.cat("/bucket/run/tables/tables.json")) == {"a": 1}
    assert order[-1].endswith(ABOUT)


def test_earlier_tables_are_replaced_file_by_file(tmp_path):
    folder = tmp_path / "logs" / "tables"
    tables._write([TABLE], {"a": 1}, folder)
    (folder / "other.csv").write_text("kept")
    before = (folder / "memory.csv").read_text()
    tables._write([Table("memory", "", TABLE.columns, TABLE.rows[:1], TABLE.picture)], {"a": 2}, folder)
    assert before.startswith((folder / "memory.csv").read_text())
    assert json.loads((folder / ABOUT).read_text()) == {"a": 2}
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory.csv", "memory.tex", "memory_scaling.png", "other.csv", ABOUT,
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_is_a_failure_with_advice(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="Free up disk space, or choose a writable folder"):
        tables._write([TABLE], {}, tmp_path / "file" / "tables")


def test_the_folder_follows_the_logs():
    assert str(default_folder(plan_of())).endswith("/x/tables")
    assert default_folder(plan_of(trainer={"id": "x", "train_batch_size": 16, "log_dir": "gs://b/logs"})) == (
        "gs://b/logs/x/tables"
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tables": [{"type": "memory", "contexts": [17]}]}, "tables.0.contexts: 17 given, but lengths from 3 to 16"),
        ({"tables": [{"type": "perplexity"}]}, "tables.0: type perplexity needs validation data"),
        (
            {"tables": [{"type": "memory", "contexts": [8]}], "refs": {"x": {"type": "hf", "path": "nowhere"}}},
            "refs.x: the run is called 'x' too",
        ),
        ({"tables": [{"type": "memory", "contexts": [0]}]}, "tables.0.contexts.0: 0 given"),
        ({"tables": [{"type": "memory", "cache_dtypes": ["int4"]}]}, "'int4'"),
        ({"tables": [{"type": "latency", "warmup": 0}]}, "tables.0.warmup"),
    ],
)
def test_tables_that_a_run_cannot_write(sections, message):
    with pytest.raises(ConfigError) as error:
        check_run_tables(plan_of(**sections), print)
    assert message in str(error.value)


def test_perplexity_needs_batches_that_it_can_score(monkeypatch):
    data = {"type": "pairs", "train_urls": ["a.jsonl"], "validation_urls": ["b.jsonl"], "format": {"type": "pairs"}}
    others = {"evals": [{"type": "objective"}], "objective": {"type": "dpo", "reference": "initial"}}
    check_run_tables(plan := plan_of(data=data, tables=[{"type": "perplexity"}], **others), print)
    monkeypatch.delattr(PairBatch, "supervised")
    with pytest.raises(ConfigError, match=r"type perplexity reads `supervised\(\)` of a batch, which PairBatch"):
        check_run_tables(plan, print)
