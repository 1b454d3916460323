"""caramba's manifests, in the real command."""

import json

import pytest
import yaml

from tests.end_to_end.commands import Workplace, check_close

NORM = {"type": "RMSNormLayer", "d_model": 32}
ATTENTION = {"type": "AttentionLayer", "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "mode": "gqa"}
MLP = {"type": "SwiGLULayer", "d_model": 32, "d_ff": 64, "bias": False}
ORCHESTRATED = {"enabled": True, "decision_interval": 6, "eval_horizon": 3, "use_adagc": True, "adagc_warmup": 4}
WAYS = {
    "one": {},
    "ddp": {"distributed_strategy": "ddp"},
    "fsdp": {"distributed": {"strategy": "FSDP", "fsdp_sharding_strategy": "FULL_SHARD"}},
    "orchestrated": {f"orchestrator_{key}": value for key, value in ORCHESTRATED.items()},
}


def write_manifest(place: Workplace) -> None:
    """A manifest with a target for each way to train."""
    residuals = [{"type": "ResidualTopology", "layers": [NORM, layer]} for layer in (ATTENTION, MLP)]
    unit = {"type": "NestedTopology", "repeat": "${n_layers}", "layers": residuals}
    head = {"type": "LinearLayer", "d_in": 32, "d_out": 300, "bias": False}
    model = {"type": "TransformerModel", "topology": {"type": "StackedTopology", "layers": [unit, NORM, head]}}
    text = place.folder / "text.txt"
    text.write_text((place.corpus / "train" / "argparse.py").read_text())
    train = {"phase": "standard", "batch_size": 16, "block_size": 32, "lr": 0.01, "warmup_steps": 1, "device": "mps"}
    targets = [
        {
            "type": "experiment",
            "name": name,
            "trainer": "trainer.standard",
            "data": {"ref": "dataset.tokens", "config": {"path": str(text)}},
            "system": {"ref": "system.language_model", "config": {"model": model}},
            "runs": [{"id": "train", "mode": "train", "steps": "${steps}", "seed": 1, "train": {**train, **keys}}],
        }
        for name, keys in WAYS.items()
    ]
    manifest = {"version": 2, "name": "small", "vars": {"n_layers": 2, "steps": 5}, "targets": targets}
    manifest["entrypoints"] = {"default": "one"}
    (place.folder / "manifest.yml").write_text(json.dumps(manifest))


@pytest.mark.soak
def test_ddp_and_fsdp_train_like_one_device(workplace):
    """Check 39."""
    cache = ("--data.cache_dir", "cache", "--trainer.log_dir", "logs", "--trainer.compilation_cache_dir", "xla")
    one, many = workplace(1), workplace(8)
    for place in (one, many):
        write_manifest(place)
    result = one.finish("--config_path", "manifest.yml", *cache)
    assert "JAX has no backend for mps" in result.out
    expected = one.losses("small-one")
    assert sorted(expected) == [1, 2, 3, 4, 5]
    for name in ("ddp", "fsdp"):
        many.finish("--config_path", "manifest.yml", "--target", name, *cache)
        check_close(many.losses(f"small-{name}"), expected, rel=1e-5)


@pytest.mark.slow
def test_a_manifest_is_written_as_a_configuration(workplace):
    place = workplace(1)
    write_manifest(place)
    convert = ("caramba", "manifest.yml", "--target", "ddp")
    printed = place.run(*convert, module="jaxlm.commands.convert")
    place_of_file = place.folder / "ddp.yaml"
    assert place.run(*convert, "--output", "ddp.yaml", module="jaxlm.commands.convert").code == 0
    assert place_of_file.read_text() == printed.out
    assert yaml.safe_load(printed.out)["trainer"]["fsdp_axis"] is None
    assert "# targets.1.runs.0.train.device: JAX has no backend for mps" in printed.out
    again = place.run(*convert, "--output", "ddp.yaml", module="jaxlm.commands.convert")
    assert (again.code, "ddp.yaml cannot be created (File exists)" in again.err) == (2, True)
    own = place.write()
    result = place.run("caramba", str(own), module="jaxlm.commands.convert")
    assert (result.code, "not a caramba manifest" in result.err) == (2, True)
    plan = place.finish("--config_path", "ddp.yaml", "--dry_run", "true", "--data.cache_dir", "cache")
    assert "small-ddp" in plan.out


@pytest.mark.slow
def test_an_orchestrated_manifest_tries_strategies(workplace):
    place = workplace(1)
    write_manifest(place)
    keys = ("--target", "orchestrated", "--vars.steps", "45", "--data.cache_dir", "cache", "--trainer.log_dir", "logs")
    orchestrator = (
        "--trainer.controllers.0.branch_budget",
        "1.0",
        "--trainer.controllers.0.min_steps_between_switches",
        "1",
    )
    own = ("--data.num_validation_sequences", "8", *orchestrator)
    place.finish("--config_path", "manifest.yml", *keys, *own)
    assert sorted(place.losses("small-orchestrated")) == list(range(1, 46))
    lines = (place.folder / "logs" / "small-orchestrated" / "decisions.jsonl").read_text().splitlines()
    branches = [note for line in lines if (note := json.loads(line))["event"] == "branch"]
    assert len(branches) >= 2
    for branch in branches:
        assert branch["losses"][branch["winner"]] == min(branch["losses"].values())
    strategies = {"conservative_adamw", "aggressive_adamw", "spike_resistant", "sgd_escape"}
    assert {name for branch in branches for name in branch["losses"]} == strategies
