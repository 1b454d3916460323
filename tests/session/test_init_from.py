"""Where a run starts: its own checkpoint, another run's state or weights; and refused combinations.

Runs the trainer in this process, on eight devices.
"""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jaxlm.commands import convert
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import find_checkpoints
from jaxlm.engine.checkpoint.restore import restore
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import vocab_axis
from jaxlm.observe.callbacks import CallbackConfig
from jaxlm.observe.console import Console
from jaxlm.observe.log_file import LogStore
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import init_from
from jaxlm.session.init_from import find_init_from, starts_at_random
from jaxlm.surgery.quantize import QuantizeConfig
from jaxlm.train import train
from tests.engine.helpers import one_device
from tests.observe.test_callbacks import RecorderConfig
from tests.tiers import one_of

MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "num_layers": 1, "num_heads": 4, "intermediate_dim": 32}


class Trainings:
    """Runs in one folder; `output` is the last run's output."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("".join(f"some words {n * n % 97} and more\n" for n in range(400)))
        self.checkpointer = {"base_path": f"{folder}/checkpoints", "keep": [{"every": 2}]}
        self.output = ""

    def config(self, run_id: str, steps: int, **sections: Any) -> dict[str, Any]:
        trainer = {
            "id": run_id,
            "num_train_steps": steps,
            "train_batch_size": 8,
            "log_dir": f"{self.folder}/logs",
            "compilation_cache_dir": f"{self.folder.parent}/xla",  # for all tests of a worker
            "checkpointer": self.checkpointer,
            **sections.pop("trainer", {}),
        }
        data = {"train_urls": [f"{self.folder}/text"], "cache_dir": f"{self.folder}/cache", "vocab_size": 280}
        optimizer = {"learning_rate": 1e-2, "warmup": 0, "lr_schedule": "constant"}
        tree = {"data": data, "model": {**MODEL, "num_kv_heads": 4}, "trainer": trainer, "optimizer": optimizer}
        return {**tree, **sections}

    def run(self, run_id: str, steps: int, **sections: Any) -> Any:
        stream = io.StringIO()
        config = decode_run(ConfigSource(self.config(run_id, steps, **sections)), None)
        try:
            # Pictures take a tenth of the time, and tests/observe draws them.
            with mock.patch("jaxlm.session.final_report.write_plots", return_value=[]):
                return train(config, Console(stream))
        finally:
            self.output = stream.getvalue()

    def losses(self, run_id: str) -> dict[int, str]:
        lines = (self.folder / "logs" / run_id / "metrics.jsonl").read_text().splitlines()
        return {r["step"]: r["train/loss"].hex() for r in map(json.loads, lines) if "train/loss" in r}

    def place(self, run_id: str) -> Path:
        return self.folder / "checkpoints" / run_id


@pytest.fixture(scope="module")
def trainings(tmp_path_factory) -> Trainings:
    """`whole` has trained for six steps; `part` has been trained for four of them."""
    made = Trainings(tmp_path_factory.mktemp("trainings"))
    made.run("whole", 6, trainer={"log_jaxprs": True, "log_xla_hlo": True})
    made.run("part", 4, trainer={"checkpointer": {**made.checkpointer, "keep": [{"every": 3}]}})
    return made


def parameters(state: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(state.model)}


def saved_arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        paths = reader.metadata(checkpoint / "state").item_metadata.tree
        as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths}
        return reader.restore(checkpoint / "state", args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[path], two[path]) for path in one)


@pytest.mark.slow
@pytest.mark.trap("T3")
def test_the_last_step_is_saved_permanently(trainings):
    """A Levanter run ends with its last timed save."""
    assert [path.name for path in find_checkpoints(trainings.place("part"))] == ["step-3", "step-4"]
    cursor = json.loads((trainings.place("part") / "step-4" / "run" / "cursor.json").read_text())
    assert cursor["temporary"] is False


@pytest.mark.slow
def test_programs_are_dumped_to_the_configured_folder(trainings):
    artifacts = trainings.folder / "logs" / "whole" / "artifacts"
    assert "lambda" in (artifacts / "train.jaxpr.txt").read_text()
    assert "ENTRY" in (artifacts / "train.hlo.txt").read_text()
    assert not (trainings.folder / "logs" / "part" / "artifacts").exists()


@pytest.mark.slow
def test_callbacks_that_look_or_raise_change_no_bit(trainings, monkeypatch):
    monkeypatch.setitem(CallbackConfig.get_known_choices(), "recorder", RecorderConfig)
    kind, seen = "recorder", trainings.folder / "seen.txt"
    callbacks = [
        {"type": kind, "path": str(seen)},
        {"type": kind, "path": str(trainings.folder / "broken.txt"), "fail_in": "on_batch_end", "at": 3},
    ]
    trainings.run("followed", 6, trainer={"callbacks": callbacks})
    assert trainings.losses("followed") == trainings.losses("whole")
    saved = [saved_arrays(trainings.place(name) / "step-6") for name in ("followed", "whole")]
    assert same(*saved)
    assert trainings.output.count("callback 2 (recorder)") == 1
    assert "failed in on_batch_end at step 3 (ValueError: no on_batch_end;" in trainings.output
    lines = seen.read_text().splitlines()
    assert [line for line in lines if "batch_end" in line] == [f"on_batch_end {number}" for number in range(1, 7)]
    assert (lines[0], lines[1]) == ("on_train_begin followed", "on_epoch_begin 0")
    assert lines[-2:] == ["on_epoch_end 0", "on_train_end"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["load_checkpoint_path", "initialize_from_state"])
def test_another_runs_state_continues_bit_for_bit_and_is_saved_as_the_runs_own(trainings, key):
    name = f"by_{key}"
    result = trainings.run(name, 6, trainer={key: str(trainings.place("part"))})
    assert f"resuming, from {trainings.place('part')}/step-4" in trainings.output
    losses = trainings.losses("whole")
    assert trainings.losses(name) == {step: losses[step] for step in (5, 6)}
    assert [path.name for path in find_checkpoints(trainings.place(name))] == ["step-6"]
    assert int(result.state.step) == 6


@pytest.mark.slow
@pytest.mark.trap("T4")
def test_the_runs_own_checkpoints_take_precedence(trainings):
    trainings.run("own", 2)
    trainings.run("own", 4, trainer={"load_checkpoint_path": str(trainings.place("whole")), "load_checkpoint": True})
    assert f"resuming, from {trainings.place('own')}/step-2" in trainings.output


@pytest.mark.slow
def test_a_state_at_the_end_of_its_run_is_adopted_as_complete(trainings):
    result = trainings.run("adopted", 6, trainer={"load_checkpoint_path": str(trainings.place("whole"))})
    assert "the run is complete" in trainings.output
    assert result.checkpoint == trainings.place("adopted") / "step-6"


@pytest.mark.slow
@pytest.mark.trap("D10")
def test_initialize_from_loads_only_the_model(trainings):
    """According to the guide, only the model is initialized; Levanter loads the whole state including the step."""
    source = trainings.place("whole") / "step-2"
    result = trainings.run("begun", 2, trainer={"initialize_from": str(source)}, optimizer={"learning_rate": 0.0})
    assert f"initializing the model from {source}" in trainings.output
    assert sorted(trainings.losses("begun")) == [1, 2]
    assert int(result.state.guard.updates) == 2
    begun, saved = parameters(result.state), saved_arrays(source)
    assert {path: np.array_equal(array, saved[f"model.{path}"]) for path, array in begun.items()} == dict.fromkeys(
        begun, True
    )
    assert trainings.losses("begun")[1] != trainings.losses("whole")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"), [("nf4", np.nan), ("nvfp4", np.nan), ("int8", np.inf), ("float16", 1e30), ("bfloat16", -np.inf)]
)
def test_weights_that_are_not_finite_are_not_stored_as_others(kind, number):
    model = LlamaConfig(**{key: value for key, value in MODEL.items() if key != "type"}).build(
        vocab_axis(280), key=jax.random.key(0)
    )
    (path, change), *_ = QuantizeConfig(kind).on_read(model).items()
    weight = dict(tree.leaves(model))[path]
    stored = init_from._ChangeOnRead(path, change, one_device())
    for layer in (weight, 2 * weight):
        assert isinstance(stored(iter([layer])), StoredWeight)
    damaged = dataclasses.replace(weight, array=weight.array.at[(0,) * weight.array.ndim].set(number))
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(path)}, layer 1: .* numbers that are not finite, or become so"
    ):
        stored(iter([weight, damaged]))


@pytest.mark.slow
def test_weights_of_a_checkpoint_are_stored_one_parameter_after_the_other(trainings, monkeypatch):
    """At most one of them exists in floating point, and the model is what the surgery makes of the whole one."""
    sections = {"phases": [{"name": "few", "surgery": [{"type": "quantize"}], "trainable": ["^tokens"]}]}
    key = {"initialize_from": str(trainings.place("part"))}
    plan = make_plan(decode_run(ConfigSource(trainings.config("few", 4, trainer=key, **sections)), None), "few", 280)
    start, (surgery,), counts = find_init_from(plan, print), plan.phases[0].surgeries, []
    abstract = plan.state_builder.abstract_initial_model
    shapes = {dict(tree.leaves(abstract))[path].array.shape for path in surgery.on_read(abstract)}
    change = init_from._ChangeOnRead.__call__

    def in_floats() -> int:
        return sum(array.shape in shapes and array.dtype == np.float32 for array in jax.live_arrays())

    def counted(self, layers):
        changed = change(self, layers)
        counts.append(in_floats())
        return changed

    monkeypatch.setattr(init_from._ChangeOnRead, "__call__", counted)
    before = in_floats()
    with plan.layout.use():
        found, num_applied = start.load_weights(plan, print)
        whole = restore(start.weights, abstract, plan.layout, prefix="model", cast=True)
        expected = jax.jit(lambda model: surgery.apply(model, key=jax.random.key(0)))(whole)
    assert num_applied == 1
    assert len(counts) == 7
    assert max(counts) <= before + 2, "the parameter, and a layer of it"
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


RENAMED = {"lora": [{"type": "lora"}], "quantize and lora": [{"type": "quantize"}, {"type": "lora"}]}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", one_of(RENAMED))
def test_a_checkpoint_whose_surgeries_renamed_its_weights_is_refused_with_a_way_that_works(
    trainings, kinds, monkeypatch, capsys
):
    check_renamed(trainings, kinds, RENAMED[kinds], monkeypatch, capsys)


def check_renamed(trainings, kinds, surgery, monkeypatch, capsys):
    monkeypatch.chdir(trainings.folder)
    run_id, model = kinds.replace(" ", "_"), {**MODEL, "num_layers": 2, "num_kv_heads": 4}
    trainable = [r"\.[ab]$"] if "lora" in kinds else [".*"]
    trainings.run(run_id, 2, model=model, phases=[{"name": "only", "surgery": surgery, "trainable": trainable}])
    start = {"initialize_from": str(trainings.place(run_id))}
    for partial in ({}, {"allow_partial_checkpoint": True}):
        with pytest.raises(
            ConfigError, match=rf"saved after the surgery {kinds}, so \d+ parameters .*\(body\."
        ) as caught:
            trainings.run("from", 2, model=model, trainer={**start, **partial})
        assert "partial" not in str(caught.value)
    assert not (trainings.folder / "logs" / "from").exists(), "it is refused before anything is tokenized"
    folder = f"{run_id}-hf"
    command = re.search(r"jaxlm convert (.*?) FOLDER", str(caught.value))
    assert command is not None
    assert convert.main([*command[1].split(), folder]) == 0, capsys.readouterr().err
    data = {"train_urls": ["text"], "cache_dir": f"cache-{run_id}", "tokenizer": folder}
    keys = {"initialize_from_hf": folder, "use_hf_model_config": True, "model": {"seq_len": 16}, "data": data}
    trainings.run(f"{run_id}-from-hf", 2, **keys)
    assert f"weights: {folder}" in trainings.output


@pytest.mark.slow
def test_a_checkpoint_with_another_vocabulary_is_refused_before_anything_is_tokenized(trainings):
    cache = trainings.folder / "another"
    data = {"train_urls": [f"{trainings.folder}/text"], "cache_dir": str(cache), "vocab_size": 300}
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer: it has 300 tokens, but .*whole/step-\d was trained with 280"
    ):
        trainings.run("other", 2, trainer={"initialize_from": str(trainings.place("whole"))}, data=data)
    assert not (cache / "train").exists()


@pytest.mark.slow
def test_a_vocabulary_grows_by_an_export_and_then_stays(trainings, capsys):
    """The way that the refusal names works; rows of tokens that a checkpoint has are its own."""
    added, saved = ["<|im_start|>", "<|im_end|>"], trainings.place("whole") / "step-6"
    data = {"train_urls": [f"{trainings.folder}/text"], "cache_dir": f"{trainings.folder}/grown"}
    tokens = {"tokenizer": str(saved / "run" / "tokenizer"), "added_tokens": added}
    for partial in ({}, {"allow_partial_checkpoint": True}):
        with pytest.raises(ConfigError, match=r"has 282 tokens, but .* was trained with 280") as caught:
            trainings.run("more", 2, trainer={"initialize_from": str(saved), **partial}, data=data | tokens)
    folder = trainings.folder / "whole-hf"
    command = re.search(r"jaxlm convert (.*?) FOLDER", str(caught.value))
    assert command is not None
    assert convert.main([*command[1].split(), str(folder)]) == 0, capsys.readouterr().err
    tokens = {"tokenizer": str(folder), "added_tokens": added}
    keys = {"initialize_from_hf": str(folder), "use_hf_model_config": True, "model": {"seq_len": 16}}
    frozen = {"optimizer": {"learning_rate": 0.0}}
    grown = parameters(trainings.run("grown", 1, **keys, **frozen, data=data | tokens).state)
    before = saved_arrays(saved)["model.tokens.weight"]
    np.testing.assert_array_equal(grown["tokens.weight"][:280], before)
    np.testing.assert_allclose(grown["tokens.weight"][280:], [before.mean(0, np.float64)] * 2, rtol=0, atol=1e-8)
    start = {"initialize_from": str(trainings.place("grown"))}
    of_run = {"tokenizer": str(trainings.place("grown") / "step-1" / "run" / "tokenizer")}
    for name, one, partial in (("same", tokens, False), ("saved", of_run, False), ("partial", tokens, True)):
        trainer = {**start, "allow_partial_checkpoint": partial}
        assert same(parameters(trainings.run(name, 1, trainer=trainer, **frozen, data=data | one).state), grown), name
        assert "another tokenizer" not in trainings.output


@pytest.mark.slow
def test_a_checkpoint_whose_surgeries_kept_the_names_is_a_start(trainings):
    trainings.run("fp8", 2, phases=[{"name": "only", "surgery": [{"type": "fp8", "min_features": 1}]}])
    trainings.run("from_fp8", 2, trainer={"initialize_from": str(trainings.place("fp8"))})
    assert "initializing the model from" in trainings.output


@pytest.mark.slow
def test_the_newest_below_a_folder_of_runs_is_the_one_with_the_most_steps(trainings):
    """Levanter sorts by time first."""
    (trainings.place("part") / "step-4" / "checksums.json").touch()
    trainings.run("discovered", 6, trainer={"load_checkpoint_path": str(trainings.folder / "checkpoints")})
    assert "/step-6" in trainings.output.split("the run is complete")[1].splitlines()[0]


WIDER = {**MODEL, "num_kv_heads": 4, "tie_word_embeddings": True}


@pytest.mark.slow
def test_partial_checkpoints_list_missing_and_unused_arrays(trainings):
    tied = {"trainer": {"initialize_from": str(trainings.place("whole"))}, "model": WIDER}
    with pytest.raises(
        ConfigError, match=r"(?s)does not match this model.*this model has no such array.*allow_partial_checkpoint"
    ):
        trainings.run("tied", 2, **tied)
    tied["trainer"]["allow_partial_checkpoint"] = True
    trainings.run("tied", 2, **tied)
    assert "1 arrays are only in the checkpoint and are ignored: model.head" in trainings.output
    back = {"trainer": {"initialize_from": str(trainings.place("tied")), "allow_partial_checkpoint": True}}
    result = trainings.run("untied", 2, **back, optimizer={"learning_rate": 0.0})
    assert "1 arrays are not in the checkpoint and are newly initialized: model.head" in trainings.output
    fresh = parameters(trainings.run("fresh", 2, optimizer={"learning_rate": 0.0}).state)
    heads = [path for path in fresh if path.startswith("head")]
    assert same({p: parameters(result.state)[p] for p in heads}, {p: fresh[p] for p in heads})
    other_sizes = {**MODEL, "num_kv_heads": 4, "hidden_dim": 64}
    with pytest.raises(ConfigError, match=r"\[.*64.*\]"):
        trainings.run("sizes", 2, **back, model=other_sizes)


REFUSED = {
    "load_checkpoint": ({"load_checkpoint": True}, "load_checkpoint: true given, but there is no checkpoint at"),
    "nothing to resume": ({"load_checkpoint_path": "nowhere"}, "load_checkpoint_path: no checkpoint at nowhere"),
    "required": (
        {"load_checkpoint": True, "load_checkpoint_path": "nowhere"},
        "load_checkpoint_path: no checkpoint at nowhere",
    ),
    "nothing there": ({"initialize_from": "nowhere"}, "initialize_from: no checkpoint at nowhere"),
    "nothing to go on from": ({"initialize_from_state": "nowhere"}, "initialize_from_state: no checkpoint at nowhere"),
    "required state": (
        {"load_checkpoint": True, "initialize_from_state": "nowhere"},
        "initialize_from_state: no checkpoint at nowhere",
    ),
    "both": (
        {"initialize_from": "a", "initialize_from_state": "b"},
        r"trainer\.initialize_from: a given together with initialize_from_state: b, .* Remove one of them",
    ),
    "no and where": (
        {"load_checkpoint": False, "load_checkpoint_path": "a"},
        r"trainer\.load_checkpoint_path: a given together with load_checkpoint: false\. Remove one of them",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_impossible_starts_are_refused_before_anything_is_written(trainings, case):
    trainer, named = REFUSED[case]
    with pytest.raises(ConfigError, match=named):
        trainings.run("refused", 2, trainer=trainer)
    assert not (trainings.folder / "logs" / "refused").exists()


@pytest.mark.parametrize("key", ["load_checkpoint_path", "initialize_from_state", "initialize_from"])
def test_a_run_that_starts_from_a_checkpoint_initializes_nothing(key):
    config = {"model": MODEL, "data": {"tokenizer": "byte"}, "trainer": {key: "elsewhere"}}
    assert not starts_at_random(decode_run(ConfigSource(config), None), "byte")
    config["trainer"]["allow_partial_checkpoint"] = True
    assert starts_at_random(decode_run(ConfigSource(config), None), "byte")


@pytest.mark.slow
def test_starting_over_existing_checkpoints_is_refused(trainings):
    with pytest.raises(ConfigError, match="load_checkpoint: false given, but the run 'part' already has checkpoints"):
        trainings.run("part", 4, trainer={"load_checkpoint": False})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relative", pytest.param("absolute", marks=pytest.mark.soak), "url"])
@pytest.mark.trap("T2")
def test_temporary_checkpoints_are_deleted_for_every_kind_of_base_path(trainings, kind, monkeypatch):
    """Levanter never deletes them with its default, a relative path."""
    monkeypatch.chdir(trainings.folder)
    base = {"relative": "temporary", "absolute": f"{trainings.folder}/absolute", "url": "memory://runs/"}[kind]
    checkpointer = {"base_path": base, "save_interval": 0, "keep": [], "staging_dir": f"{trainings.folder}/staging"}
    trainings.run("x", 3, trainer={"checkpointer": checkpointer, "log_dir": f"{trainings.folder}/logs_{kind}"})
    if kind == "url":
        import fsspec

        found = fsspec.filesystem("memory").ls("/runs/x", detail=False)
    else:
        found = (Path(base) / "x").iterdir()
    assert [str(path).rpartition("/")[2] for path in found] == ["step-3"]
    assert (trainings.folder / "staging").exists() == (kind == "url")


@pytest.mark.slow
def test_old_temporary_checkpoints_can_be_kept(trainings):
    checkpointer = {**trainings.checkpointer, "save_interval": 0, "keep": [], "delete_old_temp_checkpoints": False}
    trainings.run("kept", 3, trainer={"checkpointer": checkpointer})
    names = [path.name for path in find_checkpoints(trainings.place("kept"))]
    assert names == ["step-0", "step-1", "step-2", "step-3"]


@pytest.mark.slow
def test_a_run_with_other_checkpoints_may_not_write_the_logs_of_one_that_trains(tmp_path, monkeypatch):
    trainings = Trainings(tmp_path)
    with LogStore(None, tmp_path / "logs" / "x", print).locked():
        with monkeypatch.context() as patch:
            # In a store, this would take the lease of a process that is paused, and end it when it goes on.
            patch.setattr(LocalFolder, "locked", lambda *_: pytest.fail("it has taken the checkpoints"))
            with pytest.raises(
                ConfigError, match=r"already being trained \(process \d+ .*: both would write their logs to .*logs/x"
            ):
                trainings.run("x", 1)
        trainings.run("y", 1)
    trainings.run("x", 1)
