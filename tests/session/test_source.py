"""Exports differ from the model that training began with only in what training has changed."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from jaxlm import train
from jaxlm.commands import convert
from jaxlm.plan.load_config import decode_run
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.load_model import open_model
from jaxlm.session.source import SOURCE
from tests.answers import LLAMA, instructions, write_model, write_tokenizer

LENGTH = LLAMA["max_position_embeddings"]
OWN_KEYS = {"name_of_author": "someone", "rope_scaling": None, "head_dim": 8}
SIZES = {"hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
MODEL = {"type": "llama", **SIZES, "initializer_range": 0.2, "layer_norm_epsilon": 1e-6}


def run(place: Path, name: str, steps: int = 1, **keys):
    """Trains, and returns the folder of the last export."""
    (place / "text.txt").write_text(" ".join(record["response"] for record in instructions()) * 20)
    trainer = {
        "id": name,
        "num_train_steps": steps,
        "train_batch_size": 8,
        "log_dir": str(place / "logs"),
        "compilation_cache_dir": str(place.parent / "xla"),  # for all tests of a worker
        "checkpointer": {"base_path": str(place / "checkpoints")},
        **keys.pop("trainer", {}),
    }
    data = {"train_urls": [str(place / "text.txt")], "tokenizer": str(place / "tokenizer"), **keys.pop("data", {})}
    data["cache_dir"] = str(place / "cache" / name)
    exports = {"hf_save_path": str(place / "exports" / name), "hf_save_steps": 100}
    with mock.patch("jaxlm.session.final_report.write_plots", return_value=[]):
        train(decode_run(ConfigSource({"data": data, "trainer": trainer, "evals": [], **exports, **keys}), None))
    return place / "exports" / name / f"step-{steps}"


def checkpoint(place: Path, name: str) -> str:
    return str(place / "checkpoints" / name)


def differences(folder: Path, source: dict) -> dict:
    """Key -> (in the source, in the folder), for those that differ."""
    written = json.loads((folder / "config.json").read_text())
    keys = {key for key in {**source, **written} if source.get(key) != written.get(key)}
    return {key: (source.get(key), written.get(key)) for key in keys}


@pytest.fixture
def place(tmp_path):
    """A folder with a source whose rows are those of the tokenizer, which is elsewhere, without a config.json."""
    pytest.importorskip("transformers")
    write_model(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | OWN_KEYS))
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.slow
def test_a_chain_of_runs_exports_the_config_of_its_first_source(place):
    """The source is gone after the first start: checkpoints have what later exports need."""
    source = json.loads((place / "hf" / "config.json").read_text())
    start = {"initialize_from_hf": str(place / "hf"), "model": {**MODEL, "seq_len": 64}}
    assert differences(run(place, "a", **start), source) == {}
    shutil.rmtree(place / "hf")
    assert differences(run(place, "a", 2, **start), source) == {}
    again = ["to-hf", "--checkpoint", checkpoint(place, "a"), "--output_dir", str(place / "converted")]
    assert convert.main(again) == 0
    assert differences(place / "converted", source) == {}
    model = {**MODEL, "seq_len": 32}
    second = run(place, "b", model=model, trainer={"initialize_from": checkpoint(place, "a")})
    assert differences(second, source) == {}
    third = run(place, "c", model=model, trainer={"initialize_from": checkpoint(place, "b")})
    assert differences(third, source) == {}
    resumed = run(place, "c", 2, model=model, trainer={"initialize_from": checkpoint(place, "b")})
    assert differences(resumed, source) == {}
    state = run(place, "d", 2, model=model, trainer={"initialize_from_state": checkpoint(place, "b")})
    assert differences(state, source) == {}
    again = ["to-hf", "--checkpoint", checkpoint(place, "c"), "--output_dir", str(place / "of_c")]
    assert convert.main(again) == 0
    assert differences(place / "of_c", source) == {}


@pytest.mark.slow
def test_a_run_from_a_checkpoint_keeps_the_length_that_this_was_trained_on(place):
    """Of random weights, and with a context that was extended after the import."""
    first = run(place, "a", model={**MODEL, "seq_len": 64})
    source = json.loads((first / "config.json").read_text())
    second = run(place, "b", model={**MODEL, "seq_len": 32}, trainer={"initialize_from": checkpoint(place, "a")})
    assert source["max_position_embeddings"] == 64
    assert differences(second, source) == {}
    surgery = {"type": "extend_context", "seq_len": 128, "rope": {"type": "yarn"}}
    start = {"initialize_from_hf": str(place / "hf"), "use_hf_model_config": True, "model": {"seq_len": 64}}
    long = run(place, "c", phases=[{"name": "long", "surgery": [surgery]}], **start)
    source = json.loads((long / "config.json").read_text())
    assert source["max_position_embeddings"] == 128, "not the 512 of the folder, for which this scaling was not made"
    assert (source["name_of_author"], source["rope_scaling"]["factor"]) == ("someone", 2.0)
    model = encode(open_model(checkpoint(place, "c"), {}).model) | {"seq_len": 32}
    short = run(place, "d", model=model, trainer={"initialize_from": checkpoint(place, "c")})
    assert differences(short, source) == {}


@pytest.mark.slow
def test_checkpoints_of_earlier_versions_are_exported_as_they_were(place):
    """They have no source: it is read again, if it is there."""
    source = json.loads((place / "hf" / "config.json").read_text())
    start = {"initialize_from_hf": str(place / "hf"), "model": {**MODEL, "seq_len": 64}}
    run(place, "a", **start)
    folder = Path(checkpoint(place, "a")) / "step-1"
    sums = json.loads((folder / "checksums.json").read_text())
    del sums[f"run/{SOURCE}"]
    (folder / "checksums.json").write_text(json.dumps(sums))
    (folder / "run" / SOURCE).unlink()
    assert differences(run(place, "a", 2, **start), source) == {}
    assert json.loads((folder.with_name("step-2") / "run" / SOURCE).read_text()) == source
