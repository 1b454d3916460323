"""Forecasts of runs of other systems: of upcycling, and of rollouts."""

import json
from pathlib import Path

import pytest

from jaxlm.systems.forecast.aot import CUDA_PLUGINS, is_installed
from tests.systems.rl.test_rollouts_run import start as start_rollouts

TEACHER = Path(__file__).parent.parent / "fields/teacher"


@pytest.mark.slow
def test_both_phases_of_upcycling_are_forecast_without_weights(workplace):
    """Of the teacher there is a config.json alone, which the student's first model is read from, too."""
    place = workplace(1)
    sizes = ["--vars.teacher", str(TEACHER), "--vars.sem_dim", "16", "--vars.geo_dim", "16", "--vars.seq_len", "16"]
    done = place.finish(
        "--config_path", "jaxlm:upcycle/dba.yaml", *sizes, "--topology", "h100-1", module="jaxlm.commands.bench"
    )
    blocks, whole = map(json.loads, done.out.splitlines()[-2:])
    assert (blocks["phase"], whole["phase"]) == ("blocks", "all_weights")
    assert blocks["tokens_per_step"] == whole["tokens_per_step"] == 16 * 16
    content = json.loads((TEACHER / "config.json").read_text())
    head = content["vocab_size"] * content["hidden_size"]
    assert whole["flops_per_token"] - blocks["flops_per_token"] > 8 * head, "of two heads, one of them with gradients"
    assert 0 < blocks["mfu"] < 0.8
    assert blocks["argument_bytes"] < whole["argument_bytes"]


@pytest.mark.soak
def test_the_imbalance_of_shared_rows_is_shown_for_tokenized_data(workplace):
    place = workplace()
    place.write()
    own_cache = ("--data.cache_dir", str(place.folder / "tokens"))  # the shared one may hold tokens of an earlier test
    run = ("--config_path", "run.yaml", "--model.seq_len", "512", *own_cache)
    arguments = (*run, "--trainer.context", "{size: 4, method: ring}", "--topology", "h100-4")
    before = place.finish(*arguments, module="jaxlm.commands.bench")
    assert "unknown: the data is not tokenized. Run jaxlm prepare" in before.out
    place.finish(*run, module="jaxlm.commands.prepare")
    found = json.loads(place.finish(*arguments, module="jaxlm.commands.bench").out.splitlines()[-1])["imbalance"]
    assert found["num_rows"] > 1
    for mean, most in found["by_order"].values():
        assert 1 <= mean <= most <= 4
    means = {order: mean for order, (mean, _) in found["by_order"].items()}
    assert means["none"] > 1.5 > 1.1 > means["zigzag"] >= means["blocks"]
    undivided = place.finish(*run, "--topology", "h100-4", module="jaxlm.commands.bench")
    assert json.loads(undivided.out.splitlines()[-1])["imbalance"] is None
    sampled = start_rollouts(workplace(), steps=2)
    sampled.finish("--config_path", "run.yaml", module="jaxlm.commands.prepare")
    shared = ("--trainer.context", "{size: 2, method: ring}", "--topology", "h100-2")
    done = sampled.finish("--config_path", "run.yaml", *shared, module="jaxlm.commands.bench")
    assert json.loads(done.out.splitlines()[-1])["imbalance"] is None, "the rows are written later"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(is_installed, CUDA_PLUGINS)), reason="jax's CUDA plugin is not installed")
def test_forecast_of_rollouts_with_the_nvidia_compiler(workplace):
    """FSDP gathers all weights for each new token, in the dtype of the computation; whole weights need no gathering."""
    place = workplace(1)
    place.write("")
    data = {
        "type": "rollouts",
        "vocab_size": 1024,
        "group_size": 8,
        "max_new_tokens": 128,
        "rewards": [{"type": "exact_match"}],
    }
    model = {
        "type": "llama",
        "seq_len": 256,
        "hidden_dim": 256,
        "intermediate_dim": 512,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
    }
    phases = [{"name": "a", "surgery": [{"type": "lora", "target": "attn|mlp", "rank": 4}], "trainable": [r"\.[ab]$"]}]
    changes = ["--data", json.dumps(data), "--model", json.dumps(model), "--phases", json.dumps(phases)]
    changes += ["--objective", json.dumps({"type": "grpo", "old_policy": "rollout", "kl": None}), "--evals", "[]"]
    changes += ["--trainer.train_batch_size", "16", "--trainer.mp", "p=f32,c=bfloat16", "--topology", "h100-8"]
    weights = 2 * (2 * (4 * 256 * 256 + 3 * 256 * 512) + 1024 * 256)  # bytes of all layers and the head
    cache = 2 * 2 * 2 * 4 * 64 * (256 - 1)  # bytes of a row
    found = {}
    for fsdp in ("embed", "null"):
        done = place.finish(
            "--config_path", "run.yaml", *changes, "--trainer.fsdp_axis", fsdp, module="jaxlm.commands.bench"
        )
        found[fsdp] = json.loads(done.out.splitlines()[-1])
    for result in found.values():
        sampling = result["sampling"]
        assert (sampling["rows"], sampling["calls"], sampling["steps"]) == (16 * 8, 1, 1)
        assert (sampling["prompt_tokens"], sampling["new_tokens"]) == (128, 128)
        assert sampling["cache_bytes"] == 16 * cache
        assert sampling["memory_bytes"] > sampling["cache_bytes"]
        assert 0 < sampling["token_seconds"] <= sampling["token_seconds_exposed"]
        rollout = sampling["prompt_seconds"] + 127 * sampling["token_seconds"]
        assert sampling["rollout_seconds"] == pytest.approx(rollout)
        assert sampling["tokens_per_second"] == pytest.approx(128 * 128 / rollout)
        assert result["executed_flops"] > 0.9 * result["flops_per_token"] * result["tokens_per_step"] / 8
    gathered = found["embed"]["sampling"]["collectives"]["all-gather"][1]
    assert weights <= gathered < 1.2 * weights, "adapters and the embedding besides"
    assert sum(size for _, size in found["null"]["sampling"]["collectives"].values()) < 1e4
