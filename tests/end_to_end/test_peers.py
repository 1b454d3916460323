"""If one process fails, all of them exit promptly with its message."""

import os
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.end_to_end.commands import REPOSITORY, end_of
from tests.ports import reserved_port
from tests.tiers import one_of
from tests.xla_flags import flags_for

RUN = ("--config_path", "run.yaml")
SOON_S = 200  # the coordination service would take 300 s


def errors(processes: Sequence[Any]) -> list[str]:
    """What the processes of a run print, all of which end soon with a message about the configuration."""
    began = time.monotonic()
    ends = [end_of(process) for process in processes]
    assert time.monotonic() - began < SOON_S
    assert [one.code for one in ends] == [2] * len(ends), ends
    assert all("Traceback" not in one.err for one in ends)
    return [one.err for one in ends]


@pytest.mark.slow
def test_other_processes_do_not_wait_for_a_failed_process(workplace, tmp_path):
    place = workplace(2)
    place.write()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"good \xff bad " * 100)  # detected only when process 0 reads it
    other = ("--data.train_urls", f"[{tmp_path}/text]", "--data.cache_dir", str(tmp_path / "cache"))
    first, second = errors(place.start_all(2, *RUN, *other))
    assert "error: " in first
    assert "a.txt: not UTF-8 text" in first
    assert "error: process 0: " in second
    assert "a.txt: not UTF-8 text" in second


@pytest.mark.soak
def test_a_folder_that_process_0_cannot_write_ends_all_processes(workplace):
    place = workplace(2)
    place.write()
    (place.folder / "checkpoints").write_text("a file where the folder should be")
    for err in errors(place.start_all(2, *RUN)):
        assert "trainer.checkpointer.base_path: cannot write to" in err


DIFFERENT = {
    "rate": (("--optimizer.learning_rate", "0.5"), "optimizer.learning_rate: 0.01 on process 0; 0.5 on process 1"),
    "batch": (("--trainer.train_batch_size", "8"), "trainer.train_batch_size: 16 on process 0; 8 on process 1"),
    "steps": (("--trainer.num_train_steps", "30"), "trainer.num_train_steps: 24 on process 0; 30 on process 1"),
    "seed": (("--trainer.seed", "1"), "trainer.seed: 0 on process 0; 1 on process 1"),
    "model": (("--model.hidden_dim", "64"), "model.hidden_dim: 32 on process 0; 64 on process 1"),
    "data": (("--data.vocab_size", "301"), "data.vocab_size: 300 on process 0; 301 on process 1"),
    "evaluation": (("--trainer.steps_per_eval", "7"), "trainer.steps_per_eval: 9 on process 0; 7 on process 1"),
    "identity": (("--trainer.id", "other"), "trainer.id: run on process 0; other on process 1"),
    "jax": (
        ("--trainer.jax_config", "{jax_default_matmul_precision: highest}"),
        "jax_default_matmul_precision: None on",
    ),
    "objective": (("--objective.z_loss_weight", "0.1"), "objective.z_loss_weight: "),
    "optimizer": (("--optimizer.type", "lion"), "optimizer."),
    "warmup": (("--optimizer.warmup", "5"), "optimizer.warmup: 2 on process 0; 5 on process 1"),
    "precision": (
        ("--trainer.mp", "p=f32,c=bfloat16"),
        'trainer.mp: "f32" on process 0; "p=f32,c=bfloat16" on process 1',
    ),
    "sharding": (("--trainer.fsdp_axis", "null"), 'trainer.fsdp_axis: "embed" on process 0; null on process 1'),
    "accumulation": (
        ("--trainer.per_device_parallelism", "2"),
        "trainer.per_device_parallelism: -1 on process 0; 2 on",
    ),
    "end of text": (("--data.enforce_eos", "false"), "data.enforce_eos: true on process 0; false on process 1"),
    "shuffle": (("--data.shuffle", "false"), "data.shuffle: true on process 0; false on process 1"),
    "phases": (("--phases", "[{name: a}, {name: b}]"), "phases"),
    "averages": (("--trainer.model_averaging", "{type: ema}"), "trainer.model_averaging"),
}


TOGETHER = ("rate", "batch", "seed", "evaluation", "objective", "precision", "end of text", "shuffle")
TOGETHER += ("steps", "model", "data", "warmup", "sharding", "accumulation", "averages")


def words_of(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for name in names for word in DIFFERENT[name][0])


@pytest.mark.slow
def test_processes_that_differ_end_before_they_train(workplace, tmp_path):
    """The last of three has other keys, another environment, and a copy of the source in which one comment differs."""
    shutil.copytree(REPOSITORY / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "jaxlm" / "train.py").open("a") as file:
        file.write("# another version\n")
    place = workplace(2)
    place.write()
    variables = {
        "XLA_FLAGS": f"{flags_for(2)} --xla_cpu_enable_fast_math=true",
        "LIBTPU_INIT_ARGS": "--xla_tpu_x=1",
        "JAX_RANDOM_SEED_OFFSET": "3",
        "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{REPOSITORY}",
    }
    facts = [
        *(DIFFERENT[name][1].replace("on process 0;", "on processes 0, 1;") for name in TOGETHER),
        "--xla_cpu_enable_fast_math=true",
        "LIBTPU_INIT_ARGS: none on processes 0, 1; --xla_tpu_x=1 on process 2",
        "variable JAX_RANDOM_SEED_OFFSET: missing on processes 0, 1; 3 on process 2",
        "source of jaxlm: ",
    ]
    facts = [fact.replace("on process 1", "on process 2") for fact in facts]
    for err in errors(place.start_each([RUN, RUN, (*RUN, *words_of(TOGETHER))], variables={2: variables})):
        assert [fact for fact in facts if fact not in err] == [], err
        assert re.search(r"XLA_FLAGS: \S.* on processes 0, 1; \S.* on process 2", err), err
        assert err.count("the same files, versions and environment variables, on machines with the same devices") == 1
    assert place.checkpoints() == []
    assert not (place.folder / "logs").exists()


@pytest.mark.soak
@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_with_one_other_key_end_before_they_train(workplace, name):
    place = workplace(2)
    place.write()
    assert all(DIFFERENT[name][1] in err for err in errors(place.start_each([RUN, (*RUN, *words_of([name]))])))
    assert place.checkpoints() == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("variables", "fact"),
    [
        ({"JAX_PLATFORMS": ""}, "JAX_PLATFORMS: cpu on process 0; none on process 1"),
        # The check itself must not need the devices.
        ({"XLA_FLAGS": flags_for(1)}, "devices of the process: 2 x cpu on process 0; 1 x cpu on process 1"),
    ],
    ids=["platform", "devices"],
)
def test_processes_with_other_devices_end_before_they_train(workplace, variables, fact):
    place = workplace(2)
    place.write()
    assert all(fact in err for err in errors(place.start_each([RUN, RUN], variables={1: variables})))
    assert place.checkpoints() == []
    assert not (place.folder / "logs").exists()


FAILING = {
    "a wrong key": (("--model.hidden_dimm", "3"), "command line --model.hidden_dimm: no such key in model"),
    "a wrong line": (("word",), "command line: 'word' is not an option"),
    "a module that raises": (
        ("--objective.type", "broken:Objective"),
        "importing broken failed: RuntimeError: not today",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failing", "number"),
    one_of([("a wrong key", 0, 3), ("a wrong line", 1, 2), ("a module that raises", 0, 2)]),
)
def test_a_process_that_fails_before_it_connects_ends_the_others(workplace, name, failing, number):
    """It hosts the service that the others connect to, or would leave it waiting."""
    place = workplace(1)
    place.write()
    (place.folder / "broken.py").write_text("raise RuntimeError('not today')\n")
    more, message = FAILING[name]
    started = place.start_each([(*more, *RUN) if process == failing else RUN for process in range(number)])
    for index, err in enumerate(errors(started)):
        said = "error: " if index == failing else f"error: process {failing}: "
        assert err.startswith(said), err
        assert message in err.partition("\n")[0]
    assert not (place.folder / "logs").exists()


@pytest.mark.slow
def test_a_process_whose_file_cannot_be_read_tells_the_others(workplace):
    """How the processes connect is in the file too."""
    place = workplace(1)
    path = place.write()
    where = {"coordinator_address": f"127.0.0.1:{reserved_port()}", "num_processes": 2}
    keys = "".join(f"{name}: {value}, " for name, value in where.items())
    for number in range(2):
        own = f"trainer:\n  distributed: {{{keys}process_id: {number}}}\n"
        text = path.read_text().replace("trainer:\n", own + "  oops: 1\n" * number)
        (place.folder / f"{number}.yaml").write_text(text)
    started = [place.start("--config_path", f"{number}.yaml", "--trainer.id", "run") for number in range(2)]
    assert all("oops: no such key in trainer" in err for err in errors(started))


@pytest.mark.soak
def test_waiting_for_a_process_that_never_connects_times_out(workplace):
    place = workplace(1)
    place.write()
    limited = (*RUN, "--trainer.distributed.initialization_timeout", "3s")
    alone, gone = place.start_each([limited, (*limited, "--help")])
    end_of(gone)
    code, _, err = end_of(alone)
    assert code == 1, err
    assert err.startswith("error: not all processes of the run connected within 3 s")
    assert "check failure" not in err.lower()


@pytest.mark.soak
def test_one_of_four_processes_with_other_text_ends_all_four(workplace, tmp_path):
    """Its machine has a copy of the text that is not up to date."""
    place = workplace(1)
    place.write()
    shutil.copytree(place.corpus, tmp_path / "corpus")
    with next((tmp_path / "corpus" / "train").glob("*.py")).open("a") as file:
        file.write("# one more line\n")
    own = ("--data.cache_dir", str(tmp_path / "cache"), "--data.train_urls", f"[{tmp_path}/corpus/train]")
    for err in errors(place.start_each([RUN, RUN, RUN, (*RUN, *own)])):
        assert "data of phase 'train': " in err
    assert place.checkpoints() == []
