"""The check of a configuration where its devices are not: the plan that the devices themselves would make."""

import pytest

from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.preflight import absent_devices, main

SMALL = "model: {type: llama, seq_len: 16, hidden_dim: 32, intermediate_dim: 32, num_layers: 2, num_heads: 4}\n"
MESHES = [{}, {"model_axis_size": 2, "tensor_parallel_axes": ["mlp"]}, {"replica_ici_axis_size": 2}]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(SMALL + "trainer: {train_batch_size: 64}\ndata: {vocab_size: 64}\n")
    return str(file)


@pytest.mark.parametrize("trainer", MESHES, ids=str)
def test_absent_devices_have_the_plan_of_present_ones(trainer):
    model = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "intermediate_dim": 32, "num_layers": 2, "num_heads": 4}
    config = decode_run(ConfigSource({"model": model, "trainer": {"train_batch_size": 16, **trainer}}), None)
    here, absent = make_plan(config, "x", 64), make_plan(config, "x", 64, absent_devices(8, 1, "cpu"))
    assert (absent.mesh, absent.batches, absent.warnings) == (here.mesh, here.batches, here.warnings)
    assert absent.layout.parameter == here.layout.parameter


@pytest.mark.parametrize(
    ("words", "train", "printed"),
    [
        (("--devices", "0"), (), "the number of devices is not known here"),
        (("--devices", "32", "--slices", "2", "--platform", "tpu"), (), "mesh replica 1 x data 32 x model 1"),
        (
            ("--devices", "32", "--slices", "2", "--platform", "tpu"),
            ("--trainer.mesh.dcn_axes", "{replica: 2}"),
            "mesh replica 2 x model 1 x data 16",
        ),
    ],
)
def test_valid_configurations_pass(path, capsys, words, train, printed):
    assert main([*words, "--", "--config_path", path, *train]) == 0
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "train", "message"),
    [
        (("--devices", "0"), ("--optimizer.lerning_rate", "1"), "Did you mean 'learning_rate'?"),
        (
            ("--devices", "16"),
            ("--trainer.train_batch_size", "17"),
            "17 sequences do not divide evenly over the 16 devices",
        ),
        (
            ("--devices", "9", "--slices", "2"),
            (),
            "--devices: 9 with --slices: 2 given, a positive multiple of the slices",
        ),
        (("--devices", "8", "--slices", "0"), (), "--slices: 0 given"),
        (("--devices", "-8"), (), "--devices: -8"),
    ],
)
def test_invalid_configurations_are_reported(path, capsys, words, train, message):
    assert main([*words, "--", "--config_path", path, *train]) == 2
    assert message in capsys.readouterr().err
