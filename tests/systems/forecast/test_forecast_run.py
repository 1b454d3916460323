"""`jaxlm bench --topology`: forecasts, without the devices that they are for."""

import json

import pytest

from jaxlm.commands.bench import main
from jaxlm.core.devices import peak_flops
from jaxlm.systems.forecast.aot import CUDA_PLUGINS, is_installed
from tests.session.test_tuning import check_arguments


@pytest.mark.soak
def test_forecast_with_simulated_devices(workplace):
    place = workplace()
    place.write("")
    changes = ["--trainer.train_batch_size", "-1", "--trainer.per_device_parallelism", "2", "--model.seq_len", "128"]
    phases = [{"name": "all", "num_train_steps": 2}, {"name": "norms", "num_train_steps": 2, "trainable": ["norm"]}]
    changes += ["--phases", json.dumps(phases)]
    done = place.finish(
        "--config_path", "run.yaml", *changes, "--topology", "h100-8,h100-16", module="jaxlm.commands.bench"
    )
    eight, norms, sixteen, _ = map(json.loads, done.out.splitlines()[-4:])
    assert "h100-8: 8 chips, phase 'norms'" in done.out
    assert (eight["phase"], norms["phase"]) == ("all", "norms")
    scores = 2 * 12 * 32 * 128 / 2  # have a backward pass in frozen layers too
    assert norms["flops_per_token"] - scores == pytest.approx((eight["flops_per_token"] - scores) * 2 / 3)
    assert norms["argument_bytes"] < eight["argument_bytes"] / 2, "without Adam's moments"
    assert " 0.000 s" not in done.out
    assert (eight["chips"], sixteen["chips"]) == (8, 16)
    assert sixteen["tokens_per_step"] == 2 * eight["tokens_per_step"] == 2 * 8 * 2 * 128
    assert sixteen["compute_seconds"] == pytest.approx(eight["compute_seconds"])
    assert sixteen["communication_seconds"] > eight["communication_seconds"] > 0, "beyond one domain links are slower"
    for one in (eight, sixteen):
        assert one["step_seconds"] <= one["step_seconds_exposed"]
        assert 0 < one["mfu_exposed"] <= one["mfu"] < 0.8
        assert 0 < one["argument_bytes"] < one["memory_bytes"] < one["memory_limit"]
        assert one["collectives"]["all-gather"][1] > 0
        assert (one["optimizer_seconds"] is None) == ("simulated" in one["compiled_for"])
        assert one["sampling"] is None


@pytest.mark.slow
@pytest.mark.skipif(not any(map(is_installed, CUDA_PLUGINS)), reason="jax's CUDA plugin is not installed")
def test_forecast_with_the_nvidia_compiler(workplace):
    """Needs no GPU. The program has fused attention for whole and for packed rows, and no [T, T] array."""
    place = workplace(1)
    place.write("")
    sizes = {
        "seq_len": 1024,
        "hidden_dim": 256,
        "intermediate_dim": 512,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    changes = [part for key, value in sizes.items() for part in (f"--model.{key}", str(value))]
    changes += ["--trainer.train_batch_size", "16", "--trainer.mp", "p=f32,c=bfloat16"]
    changes += ["--optimizer", "{type: muon, learning_rate: 0.02}"]
    done = place.finish(
        "--config_path", "run.yaml", *changes, "--topology", "h100-1,h100-16", module="jaxlm.commands.bench"
    )
    one, sixteen = map(json.loads, done.out.splitlines()[-2:])
    for found in (one, sixteen):
        assert found["compiled_for"] == "NVIDIA H100 80GB HBM3, ahead of time"
        assert found["kernels"].keys() == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
        assert 0 < found["mfu_exposed"] <= found["mfu"] < 0.66
        assert found["step_seconds"] <= found["step_seconds_scheduled"] <= found["step_seconds_exposed"]
        assert 0 < found["optimizer_seconds"] < found["compute_seconds"] + found["memory_seconds"]
    # Each of Muon's five iterations has two products of small x small with small x large, and one of small x small.
    shapes = 2 * (2 * [(256, 256)] + 2 * [(128, 256)] + 3 * [(256, 512)])
    iterations = sum(5 * 2 * (2 * small**2 * large + small**3) for small, large in shapes)
    model = one["mfu"] * one["step_seconds"] * peak_flops("NVIDIA H100")
    assert one["optimizer_flops_share"] == pytest.approx(iterations / (iterations + model), rel=0.1)
    assert one["communication_seconds"] == 0 < sixteen["communication_seconds"]
    assert sixteen["memory_bytes"] < one["memory_bytes"] < 16 * 4 * 1024 * 1024 * 4 + (1 << 30)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(is_installed, CUDA_PLUGINS)), reason="jax's CUDA plugin is not installed")
def test_forecast_of_offloaded_activations_with_the_nvidia_compiler(workplace):
    """What is offloaded is in the host's memory, to the byte, and no longer in the device's."""
    place = workplace(1)
    place.write("")
    layers, tokens, width, heads = 4, 4096, 256, 4
    sizes = {"seq_len": tokens, "hidden_dim": width, "intermediate_dim": 512, "num_layers": layers, "num_heads": heads}
    changes = [part for key, value in sizes.items() for part in (f"--model.{key}", str(value))]
    changes += ["--model.num_kv_heads", "2", "--trainer.train_batch_size", "8", "--trainer.mp", "p=f32,c=bfloat16"]
    forecasts = {}
    for policy in ("attention", "{offload: [residual, attention]}", "{save: [attention], offload: [residual]}"):
        changed = [*changes, "--model.gradient_checkpointing", policy, "--topology", "h100-8"]
        done = place.finish("--config_path", "run.yaml", *changed, module="jaxlm.commands.bench")
        forecasts[policy] = json.loads(done.out.splitlines()[-1])
    on_device, both, residual = forecasts.values()
    stream, logsumexp = 2 * layers * tokens * width, 4 * layers * tokens * heads
    assert [one["host_bytes"] for one in forecasts.values()] == [0, 2 * stream + logsumexp, stream]
    assert on_device["memory_bytes"] - both["memory_bytes"] > stream
    there, back = sorted(both["host_traffic"], key=lambda traffic: traffic["copies"]["back"])
    a_layer = both["host_bytes"] // layers
    assert there["copies"] == {"there": a_layer, "back": 0}
    assert back["copies"] == {"there": 0, "back": a_layer}
    assert there["turns"] == back["turns"] == layers
    assert both["step_seconds_scheduled"] > residual["step_seconds_scheduled"] > on_device["step_seconds_scheduled"]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(is_installed, CUDA_PLUGINS)), reason="jax's CUDA plugin is not installed")
def test_forecast_of_shared_rows_with_the_nvidia_compiler(workplace):
    """Sixteen GPUs in two machines. The transfers of a ring are beside its attention, whatever computes that. All blocks of
    queries and keys that a row of one document has are counted."""
    place = workplace(1)
    place.write("")
    sizes = {"seq_len": 65536, "hidden_dim": 512, "intermediate_dim": 1024, "num_layers": 2, "num_heads": 8}
    changes = [part for key, value in sizes.items() for part in (f"--model.{key}", str(value))]
    changes += ["--model.num_kv_heads", "1", "--model.gradient_checkpointing", "attention"]
    changes += ["--trainer.train_batch_size", "1", "--trainer.mp", "p=f32,c=bfloat16", "--topology", "h100-16"]
    forecasts = {}
    for balance in ("zigzag", "blocks"):
        changed = [*changes, "--trainer.context", f"{{size: 16, method: ring, balance: {balance}}}"]
        done = place.finish("--config_path", "run.yaml", *changed, module="jaxlm.commands.bench")
        assert "context parallelism" in done.out
        forecasts[balance] = json.loads(done.out.splitlines()[-1])
        taken, hidden = forecasts[balance]["context_seconds"]["collective-permute"]
        assert 0.9 * taken < hidden <= taken
        assert forecasts[balance]["counted_once"] == []
    zigzag, blocks = forecasts.values()
    hops = 16 * sizes["num_layers"]
    assert zigzag["kernels"] == {"__cudnn$fmhaSoftmax": hops, "__cudnn$fmhaSoftmaxBackward": hops}
    assert not blocks["kernels"].keys() & zigzag["kernels"].keys()
    assert blocks["executed_flops"] == pytest.approx(zigzag["executed_flops"], rel=0.02)
    assert blocks["mfu"] < zigzag["mfu"] < 0.43


@pytest.mark.slow
@pytest.mark.skipif(not any(map(is_installed, CUDA_PLUGINS)), reason="jax's CUDA plugin is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_forecast_of_fp8_with_the_nvidia_compiler(workplace, recipe):
    """All products of two layers and the head are in fp8 in the program for a Hopper, and none in that for an Ampere."""
    place = workplace(1)
    place.write("")
    sizes = {
        "seq_len": 256,
        "hidden_dim": 256,
        "intermediate_dim": 512,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
    }
    changes = [part for key, value in sizes.items() for part in (f"--model.{key}", str(value))]
    changes += ["--data.vocab_size", "1024", "--trainer.train_batch_size", "16", "--trainer.mp", "p=f32,c=bfloat16"]
    changes += ["--phases", json.dumps([{"name": "train", "surgery": [{"type": "fp8", "recipe": recipe}]}])]
    changes += ["--model.gradient_checkpointing", "none"]
    done = place.finish(
        "--config_path", "run.yaml", *changes, "--topology", "h100-1,a100-1", module="jaxlm.commands.bench"
    )
    hopper, ampere = (json.loads(line)["kernels"] for line in done.out.splitlines()[-2:])
    # The compiler merges products that read the same inputs: of q, k and v, and of gate and up. So output and gradient of
    # the weight are 4 to 7 for each layer, and gradients of the inputs 7. Rowwise, the gradient of the head's weight is not.
    head = 2 if recipe == "rowwise" else 3
    assert 2 * (4 + 7 + 4) + head <= hopper["fp8 products"] <= 2 * 3 * 7 + head
    assert "fp8 products" not in ampere


@pytest.mark.slow
@pytest.mark.skipif(any(map(is_installed, CUDA_PLUGINS)), reason="jax's CUDA plugin describes as many as one likes")
def test_too_many_simulated_devices_are_refused(workplace):
    place = workplace()
    place.write("")
    done = place.run("--config_path", "run.yaml", "--topology", "h100-4096", module="jaxlm.commands.bench")
    assert done.code == 2
    assert "2048 simulated devices" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v5p-7"), "--topology v5p-7"),
        (("--topology", ""), "a chip and a number expected"),
        (("--topology", "h100-8", "--steps", "20"), "--steps and --warmup have no effect"),
        (("--topology", "h100-8", "--warmup", "0"), "--steps and --warmup have no effect"),
    ],
)
def test_invalid_topologies_are_refused(workplace, in_process, arguments, message):
    place = workplace()
    place.write()
    done = in_process(main, place, "--config_path", "run.yaml", *arguments)
    assert done.code == 2
    assert message in done.err


def test_a_forecast_tunes_nothing(capsys):
    check_arguments(["--topology", "h100-1"], "Remove --topology", capsys)
