"""The depth dial against nanochat's own numbers, and with keys of the user's own.

`tests/vectors/nanochat_depth_dial.json` has what nanochat derives at 14 depths with both recipes, worked out from its
formulas without this code; 20 of its numbers are printed in nanochat's files. Everything is compared exactly.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.plan.batches import plan_batches
from jaxlm.plan.load_config import decode_run, load_config
from jaxlm.plan.plan import make_plan
from jaxlm.plan.presets.base import Derivation, preset_rows
from jaxlm.plan.run_config import RunConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import ConfigSource, merge
from jaxlm.session.startup import describe
from jaxlm.systems.nanochat.rates import RECIPES

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "nanochat_depth_dial.json").read_text())
CASES = [(recipe, depth) for recipe in ("seed", "head") for depth in VECTORS[recipe]]
SMALL = {
    "preset": {"type": "depth_dial", "depth": 2, "recipe": "head", "aspect_ratio": 32, "head_dim": 16},
    "data": {"vocab_size": 300},
    "model": {"seq_len": 32},
}


def dial(depth: int, recipe: str = "seed", **keys: Any) -> dict[str, Any]:
    return {"preset": {"type": "depth_dial", "depth": depth, "recipe": recipe, **keys}}


def configured(*trees: dict[str, Any]) -> RunConfig:
    merged: dict[str, Any] = {}
    for each in trees:
        merged = merge(merged, each)
    return decode_run(ConfigSource(merged), "run")


def test_the_only_preset_needs_no_type():
    assert configured({**SMALL, "preset": {"depth": 3}}) == configured(
        {**SMALL, "preset": {"type": "depth_dial", "depth": 3}}
    )


def derivation(config: RunConfig) -> Derivation:
    assert config.preset is not None
    return config.preset.derive(ConfigSource(encode(config)))


def numbers(config: RunConfig) -> dict[str, Any]:
    found = derivation(config).numbers
    assert len({number.name for number in found}) == len(found)
    return {number.name: number.value for number in found}


def rows(config: RunConfig) -> dict[str, str]:
    return {name.strip(): text for name, text in preset_rows(config.preset, encode(config))}


def rates(config: RunConfig) -> dict[str, float]:
    """The learning rate of each entry of the optimizer's groups, by what it matches."""
    return {group.match or "": group.learning_rate for group in config.optimizer.groups}


@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_every_number_is_nanochats(recipe, name):
    want = VECTORS[recipe][name]
    config = configured(dial(want["depth"], recipe))
    got = numbers(config)
    model: Any = config.model
    sizes = (model.num_layers, model.hidden_dim, model.num_heads, model.hidden_dim // model.num_heads)
    assert sizes == (want["depth"], want["n_embd"], want["n_head"], want["head_dim"])
    assert model.KVHeads.size == want["n_kv_head"]
    assert model.ValueLayers.size == want["n_value_embeds"]
    windows = [{"S": want["short"], "L": 2048}[letter] for letter in want["windows"]]
    assert list(model.window_distances) == windows
    assert got["vocabulary, padded"] == 32_768
    assert got["parameters"] == want["param_counts"]
    assert got["scaling parameters"] == want["scaling_params"]
    assert got["FLOPs per token"] == want["flops_per_token"]
    assert got["target tokens D"] == want["target_tokens"]
    assert got["reference tokens D_ref"] == want["D_REF"]
    assert got["predicted batch"] == want["predicted_batch_tokens"]
    assert math.log2(got["predicted batch"]) == want["log2_predicted"]
    assert config.trainer.train_batch_size * model.seq_len == got["batch in tokens B"] == want["total_batch_size"]
    assert got["scale of learning rates"] == want["batch_lr_scale"]
    assert got["scale of AdamW with width"] == want["dmodel_lr_scale"]
    assert config.optimizer.weight_decay == got["weight decay of Muon"] == want["weight_decay_scaled"]
    assert config.trainer.num_train_steps == got["steps N"] == want["num_iterations"]
    assert got["training tokens"] == want["total_tokens"]
    assert got["tokens per scaling parameter"] == want["tokens_per_scaling_param"]
    assert got["training FLOPs"] == want["total_training_flops"]
    assert config.optimizer.learning_rate == want["lr"]["muon_base"]
    assert got["  by matrix"] == want["lr"]["muon_by_shape"]
    names = {"lm_head": r"^head\.", "wte": r"^tokens\.", "value_embeds": "value_embedding$"}
    names |= {each: f"{each}$" for each in ("resid_lambdas", "x0_lambdas")}
    assert {each: rates(config)[match] for each, match in names.items()} == {each: want["lr"][each] for each in names}


@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_eight_devices_need_no_other_microbatch_than_nanochats(recipe, name):
    """nanochat ends with an assertion where its 32 sequences per device are more than a device's share."""
    want = VECTORS[recipe][name]["grad_accum_at"]
    trainer = configured(dial(VECTORS[recipe][name]["depth"], recipe)).trainer
    assert trainer.max_per_device_parallelism == want["device_batch"]
    stage = plan_batches(trainer, want["world"]).train.first
    num_microbatches = want["steps"] if isinstance(want["steps"], int) else 1
    assert stage.num_microbatches == num_microbatches
    assert stage.num_microbatches * stage.microbatch == stage.size


@pytest.mark.parametrize(("may_pad", "expected"), [(True, (3, 23)), (False, (67, 1))])
def test_a_batch_with_few_divisors_is_padded_if_it_may_be(may_pad, expected):
    trainer = TrainerConfig(train_batch_size=67, max_per_device_parallelism=32, allow_nondivisible_batch_size=may_pad)
    stage = plan_batches(trainer, 1).train.first
    assert (stage.num_microbatches, stage.microbatch) == expected


@pytest.mark.parametrize("num_shards", [1, 2, 3, 6, 7, 48, 100])
@pytest.mark.parametrize("limit", [None, 1, 5, 32])
def test_microbatches_hold_the_batch_on_any_number_of_devices(num_shards, limit):
    trainer = TrainerConfig(train_batch_size=128, max_per_device_parallelism=limit, allow_nondivisible_batch_size=True)
    stage = plan_batches(trainer, num_shards).train.first
    per_device, rest = divmod(stage.microbatch, num_shards)
    assert not rest
    assert per_device <= (limit or 128)
    assert stage.num_microbatches * stage.microbatch >= 128
    if 128 % num_shards == 0:
        assert stage.num_microbatches * stage.microbatch == 128
    # One microbatch less would not hold the batch, if the devices' shares are even.
    fewer = [k for k in range(1, stage.num_microbatches) if -(-128 // num_shards) % k == 0]
    assert not any(-(-128 // num_shards) // k <= (limit or 128) for k in fewer)


# nanochat's leaderboard: https://github.com/karpathy/nanochat/blob/master/dev/LEADERBOARD.md
@pytest.mark.parametrize(
    ("tree", "steps"),
    [
        (dial(24, target_param_data_ratio=12.0, total_batch_size=524_288), 16_704),
        (dial(26, target_param_data_ratio=8.5, total_batch_size=524_288), 14_889),
        (dial(26, target_param_data_ratio=8.25), 7_226),
        (dial(24, "head", target_param_data_ratio=8.0), 5_568),
    ],
)
def test_the_steps_of_nanochats_leaderboard(tree, steps):
    assert configured(tree).trainer.num_train_steps == steps


def test_the_flops_that_nanochat_prints_for_its_first_leaderboard_run():
    config = configured(dial(24, target_param_data_ratio=12.0, total_batch_size=524_288))
    assert f"{numbers(config)['training FLOPs']:.15e}" == "4.330784131228946e+19"


@pytest.mark.parametrize("depth", [1, 11, 13])
def test_other_depths_are_rounded_up_to_whole_heads(depth):
    model: Any = configured(dial(depth)).model
    assert model.hidden_dim == {1: 128, 11: 768, 13: 896}[depth]


def test_what_is_given_first_sets_the_number_of_steps():
    steps = lambda **keys: configured(dial(12, **keys)).trainer.num_train_steps  # noqa: E731
    flops = 2.0 * 802_167_552 * 524_288
    assert steps() == 2205
    assert steps(target_flops=100.4 * flops) == 201
    assert steps(target_flops=100.25 * flops) == 200  # 200.5: to the even number
    assert steps(target_flops=flops, num_iterations=7) == 7
    # Batch and weight decay follow the ratio, whatever sets the steps.
    seven = configured(dial(12, num_iterations=7))
    assert (seven.trainer.train_batch_size, seven.optimizer.weight_decay) == (256, 0.2)


def lr_multiplier(it: int, steps: int, warmup: int, warmdown_ratio: float, final: float) -> float:
    """nanochat's `get_lr_multiplier`."""
    warmdown = round(warmdown_ratio * steps)
    if it < warmup:
        return (it + 1) / warmup
    if it <= steps - warmdown:
        return 1.0
    progress = (steps - it) / warmdown
    return progress + (1 - progress) * final


@pytest.mark.parametrize(
    ("recipe", "schedule"), [("seed", (0, 0.5, 0.0)), ("head", (40, 0.65, 0.05))], ids=["seed", "head"]
)
def test_learning_rates_follow_nanochats_schedule(recipe, schedule):
    optimizer = configured(dial(12, recipe)).optimizer
    steps = {"seed": 2205, "head": 2520}[recipe]
    every = np.arange(steps)
    want = np.array([lr_multiplier(it, steps, *schedule) for it in every])
    assert (want == 1).sum() == {"seed": 1104, "head": 844}[recipe]
    for group in (optimizer, *optimizer.groups):
        got = group.schedule(steps)(every) / group.learning_rate
        np.testing.assert_allclose(got, want, rtol=0, atol=2 * np.finfo(np.float32).eps)  # of the peak


@pytest.mark.parametrize(("steps", "decay"), [(1, 0), (2, 1), (3, 2), (49, 24)])
def test_short_runs_have_whole_numbers_of_steps_too(steps, decay):
    optimizer = configured(dial(4, num_iterations=steps)).optimizer
    ends = [s.length for s in optimizer.schedule(steps).segments if s.name == "decay"]
    assert ends == ([decay] if decay else [])


@pytest.mark.parametrize(
    ("steps", "lengths"), [(1, (0, 1)), (2, (1, 1)), (30, (10, 20)), (114, (40, 74)), (115, (40, 75))]
)
def test_a_warmup_ends_before_the_warmdown_begins(steps, lengths):
    optimizer = configured(dial(4, "head", num_iterations=steps)).optimizer
    found = {s.name: s.length for s in optimizer.schedule(steps).segments}
    assert (found.get("warmup", 0), found["decay"]) == lengths
    assert steps - sum(found.values()) == 0


@pytest.mark.parametrize("recipe", ["seed", "head"])
def test_every_parameter_has_the_optimizer_that_nanochat_gives_it(recipe):
    config = configured(SMALL, dial(3, recipe), {"trainer": {"train_batch_size": 8}})
    plan = make_plan(config, "x", 300)
    (phase,) = plan.phases
    model = plan.state_builder.abstract_state(phase).model
    groups = phase.groups(model)
    optimizer = config.optimizer
    sizes: dict[str, int] = {}
    for group in groups:
        owner = optimizer if group.owner is None else optimizer.groups[group.owner]
        # Everything that is in no group is a matrix: nothing is left to Muon's own Adam.
        assert group.as_matrices == (group.owner is None)
        assert group.weight_decay == owner.weight_decay
        sizes[owner.match or "matrices"] = group.num_parameters
    counts = numbers(config)["parameters"]
    rows_ratio = 300 / numbers(config)["vocabulary, padded"]  # nanochat's tables have the padding too
    assert sizes["matrices"] == counts["transformer_matrices"]
    tables = {r"^head\.": "lm_head", r"^tokens\.": "wte", "value_embedding$": "value_embeds"}
    assert {name: sizes[match] for match, name in tables.items()} == {
        name: counts[name] * rows_ratio for name in tables.values()
    }
    others = sum(size for match, size in sizes.items() if match not in (*tables, "matrices"))
    assert others == counts["scalars"]
    assert sum(sizes.values()) == tree.num_parameters(model)
    assert {g.epsilon for g in optimizer.groups} == {1e-10}
    assert [g.beta1 for g in optimizer.groups if g.match == "x0_lambdas$"] == [0.96]


LOOKUPS = json.loads((Path(__file__).parents[2] / "vectors" / "nanochat_lookup.json").read_text())["models"]
TABLES = r"lookups\.\d+\.\w+_embedding$"


def with_lookup(*layers: int, **keys: Any) -> dict[str, Any]:
    return {"model": {"lookup": {"layers": list(layers), **keys}}}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_layers_of_the_recipe_seed_are_nanochats(name):
    want = LOOKUPS[name]
    config = configured(dial(int(name[1:])), with_lookup(int(want["l3_after_layers"])))
    got, lookup = numbers(config), config.model.lookup  # pyright: ignore[reportAttributeAccessIssue]
    assert got["entries of a lookup layer"] == lookup.num_entries == want["l3_n_emb_auto"]
    assert got["parameters"] == want["param_counts"]
    assert got["scaling parameters"] == want["scaling_params"]
    assert got["FLOPs per token"] == want["flops_per_token_seed"]
    assert got["batch in tokens B"] == want["total_batch_size"]
    assert got["weight decay of Muon"] == want["weight_decay_scaled"]
    assert config.trainer.num_train_steps == want["num_iterations"]
    assert rates(config)[TABLES] == rates(config)[r"^tokens\."]
    width = 128 * -(-int(name[1:]) * 64 // 128)
    by_shape = got["  by matrix"]
    assert by_shape[f"{want['d_up']}x{width}"] == pytest.approx(2 * config.optimizer.learning_rate)
    assert by_shape[f"{width}x{width + want['d_up']}"] == config.optimizer.learning_rate
    theirs = (lookup.allocation, lookup.key_norm, lookup.score_scale, lookup.sample_tokens, lookup.max_entries)
    assert theirs == ("nanochat", False, 1.0, 204_800, 512)


def test_lookup_layers_are_yours_to_change():
    model: Any = configured(dial(4), with_lookup(1, 2, allocation="lzw", num_entries=50_000)).model
    assert (model.lookup.allocation, model.lookup.num_entries, model.lookup.key_norm) == ("lzw", 50_000, False)
    even: Any = configured(dial(4), with_lookup(1, allocation="uniform")).model
    even.check()  # without nanochat's sample_tokens, which would have no effect
    late: Any = configured(dial(4, "head"), with_lookup(2)).model
    assert (late.lookup.allocation, late.lookup.key_norm, late.lookup.score_scale) == ("lzw", True, None)
    assert configured(dial(4)).model.lookup is None  # pyright: ignore[reportAttributeAccessIssue]
    scale = rates(configured(dial(4)))[r"^tokens\."] / 0.3
    own = {"lookup_lr": 0.2}, {"embedding_lr": 0.1}, {"lookup_lr": 0.2, "embedding_lr": 0.1}
    found = [rates(configured(dial(4, **keys), with_lookup(2)))[TABLES] / scale for keys in own]
    assert found == pytest.approx([0.2, 0.1, 0.2])


def test_adam_updates_the_tables_and_muon_the_matrices_of_lookup_layers():
    config = configured(SMALL, {"trainer": {"train_batch_size": 8}}, with_lookup(0, 1, tied=False))
    plan = make_plan(config, "x", 300)
    (phase,) = plan.phases
    groups = {
        config.optimizer.groups[g.owner].match if g.owner is not None else "": g
        for g in phase.groups(plan.state_builder.abstract_state(phase).model)
    }
    counts = numbers(config)["parameters"]
    assert groups[TABLES].num_parameters == counts["l3_embeds"] == 4 * numbers(config)["entries of a lookup layer"] * 64
    assert not groups[TABLES].as_matrices
    assert groups[""].num_parameters == counts["transformer_matrices"] + counts["l3_matrices"]
    assert {path.split(".")[-1] for path in groups[TABLES].paths} == {"keys_embedding", "values_embedding"}
    assert not any("bounds" in path for group in groups.values() for path in group.paths)


OWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sizes": {"model": {"hidden_dim": 48, "num_kv_heads": 1, "window_pattern": "L"}},
    "batch": {"trainer": {"train_batch_size": 12, "per_device_parallelism": 2}},
    "length": {"trainer": {"num_train_steps": 50}, "optimizer": {"decay": 0.2, "warmup": 3}},
    "rates": {"optimizer": {"learning_rate": 0.5, "weight_decay": 0.0, "momentum_schedule": {"warmup": 10}}},
    "another optimizer": {"optimizer": {"type": "adam", "learning_rate": 0.001}},
    "own groups": {"optimizer": {"groups": [{"match": "tokens", "type": "adam"}]}},
    "lookup layers": with_lookup(1, num_entries=900),
    "both": {"preset": {"num_iterations": 7, "total_batch_size": 64}, "trainer": {"num_train_steps": 50}},
    "phases": {"phases": [{"name": "a"}, {"name": "b", "num_train_steps": 5}]},
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_your_own_keys_win_and_deriving_again_changes_nothing(own):
    config = configured(SMALL, own)

    def holds(section: Any, value: Any) -> bool:
        if isinstance(value, dict):
            return all(holds(section[key], item) for key, item in value.items())
        if isinstance(value, list):
            return len(section) == len(value) and all(map(holds, section, value))
        return section == value

    plain = encode(config)
    assert holds(plain, own)
    assert decode_run(ConfigSource(plain), None) == config  # as a checkpoint does
    merged = merge(SMALL, own)
    yours = {name for name, text in rows(config).items() if "you wrote" in text}
    assert yours == {
        name
        for name, path in {
            "width": ("model", "hidden_dim"),
            "entries of a lookup layer": ("model", "lookup"),
            "batch in sequences": ("trainer", "train_batch_size"),
            "steps N": ("trainer", "num_train_steps"),
            "warmup": ("optimizer", "warmup"),
            "warmdown": ("optimizer", "decay"),
            "last learning rate": ("optimizer", "min_lr_ratio"),
            "learning rate of Muon": ("optimizer", "learning_rate"),
            "weight decay of Muon": ("optimizer", "weight_decay"),
            "momentum of Muon": ("optimizer", "momentum_schedule"),
            **{f"learning rate of {group}": ("optimizer", "groups") for group in RECIPES["head"].groups},
        }.items()
        if path[1] in merged.get(path[0], {}) and "type" not in merged.get(path[0], {})
    }


def test_what_you_write_is_what_the_rest_is_derived_from():
    batch = configured(dial(12), {"trainer": {"train_batch_size": 64}})
    assert batch.optimizer.learning_rate == 0.02 * 0.5  # a quarter of the batch
    assert batch.trainer.num_train_steps == 4 * 2205
    wide = configured(SMALL, {"model": {"hidden_dim": 128}})
    assert encode(wide.model)["num_heads"] == 8
    assert rates(wide)[r"^tokens\."] > rates(configured(SMALL, {"model": {"hidden_dim": 512}}))[r"^tokens\."]


def test_the_vocabulary_is_that_of_the_tokenizer(tmp_path):
    assert configured(dial(4)).data.vocab_size == 32_768
    assert configured(dial(4), {"data": {"vocab_size": 4096}}).data.vocab_size == 4096
    words = tokenizers.models.WordLevel({f"word{number}": number for number in range(270)}, "word0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    config = configured(dial(4), {"data": {"tokenizer": str(tmp_path)}})
    assert config.data.vocab_size == 270
    assert numbers(config)["vocabulary, padded"] == 320


def test_the_start_up_table_has_every_number_with_its_formula_and_source():
    config = configured(SMALL, {"trainer": {"num_train_steps": 50, "train_batch_size": 8}})
    plan = make_plan(config, "x", 300)
    shown = dict(describe(plan))
    assert shown["preset"] == "depth_dial, which derives:"
    found = derivation(config).numbers
    for number in found:
        text = shown[f"  {number.name}"]
        assert number.formula in text
        assert not number.source or f"[{number.source}]" in text
    assert len(found) > 25
    assert shown["  steps N"].startswith("50: you wrote trainer.num_train_steps (the preset derives ")
    assert shown["  heads"] == "4: 64 / 16 [base_train.py] -> model.num_heads"


def test_the_start_up_table_has_the_rates_that_are_used():
    groups = [
        {"match": "^tokens\\.", "type": "adam", "learning_rate": 0.007},
        {"match": "x0_lambdas$", "type": "adam"},  # takes the learning rate around it
        {"match": "mlp", "type": "adam", "learning_rate": 0.001},
    ]
    own = {"learning_rate": 0.4, "groups": groups, "momentum_schedule": {"warmup": 10}, "momentum": 0.9}
    config = configured(dial(12), {"optimizer": own})
    shown, derived = rows(config), rows(configured(dial(12)))
    assert rates(config)["x0_lambdas$"] == 0.4
    assert (
        shown["learning rate of wte"]
        == f"0.007: you wrote optimizer.groups (the preset derives {derived['learning rate of wte']})"
    )
    assert shown["learning rate of x0_lambdas"].startswith("0.4: you wrote optimizer.groups (the preset derives ")
    for name, match in {"lm_head": "^head\\.", "resid_lambdas": "resid_lambdas$"}.items():
        start = f"not used: you wrote optimizer.groups without an entry that matches {match} (the preset derives "
        assert shown[f"learning rate of {name}"].startswith(start)
    assert shown["by matrix"].startswith("768x768 0.4, ")
    assert shown["momentum of Muon"] == (
        "0.9: you wrote optimizer.momentum (the preset derives 0.95: from 0.85 over 10 steps, as you wrote in"
        " optimizer.momentum_schedule [base_train.py])"
    )


UNUSED = {"none": {}, "two": {"matrix_lr": 0.1, "weight_decay": 0.0}}


def test_rates_of_the_preset_that_another_optimizer_does_not_use_are_named():
    adam = {"optimizer": {"type": "adam"}}
    shown = {name: rows(configured(dial(12, **own), adam))["optimizer"] for name, own in UNUSED.items()}
    text = "adam: your choice: nothing of its section is filled in"
    assert shown == {"none": text, "two": f"{text}; preset.matrix_lr, preset.weight_decay: not used"}


def test_a_warmup_of_the_whole_run_is_named_where_the_momentum_cannot_fall_after_it():
    config = configured(
        SMALL, {"optimizer": {"warmup": 1.0}, "trainer": {"num_train_steps": 50, "train_batch_size": 8}}
    )
    with pytest.raises(ConfigError, match=r"^optimizer\.warmup: 1\.0 means the whole cycle: .*final \(0\.9\)"):
        make_plan(config, "x", 300)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (dial(0), r"preset\.depth: 0 given, an integer of 1 or more and at most 1024 expected"),
        (dial(12, target_param_data_ratio=0.0), r"preset\.target_param_data_ratio: 0\.0 given, .* above 0"),
        (dial(12, target_param_data_ratio=-1.0), r"preset\.target_param_data_ratio: -1\.0 given"),
        (
            dial(12, target_param_data_ratio=1e-9),
            r"preset\.target_param_data_ratio: 1e-09 given, which is less than one",
        ),
        (dial(12, head_dim=63), r"preset\.head_dim: 63 given, an even number expected"),
        (dial(12, recipe="tail"), r"preset\.recipe: 'tail' given, 'seed' or 'head' expected"),
        (dial(12, target_flops=1e6), r"preset\.target_flops: the run has no steps: one step is 524,288 tokens"),
        (dial(4, total_batch_size=2**30), r"preset: the run has no steps: .* D / B, rounded down = 0"),
        (dial(12, total_batch_size=3000), r"preset\.total_batch_size: 3000 tokens given, .* Set it to 2048"),
        (dial(12) | {"model": {"hidden_dim": 500}}, r"model\.hidden_dim: 500 given, .* model\.hidden_dim: 512"),
        (dial(12) | {"model": {"type": "llama"}}, r"model\.type: 'llama' given, but the preset depth_dial is for"),
        (dial(12) | {"model": {"hiden_dim": 5}}, r"hiden_dim: no such key in model \(type nano\)\. Did you mean"),
        (dial(12) | {"epoch": 2}, r"epoch: given with the preset depth_dial"),
        (dial(12) | {"use_hf_model_config": True}, r"use_hf_model_config: given with the preset"),
        (
            dial(12) | {"trainer": {"train_batch_size": -1}},
            r"trainer\.train_batch_size: -1 given, but the preset scales",
        ),
        (
            {"preset": {"type": "depth_dial", "depth": 4, "lookup_lr": 0.1}},
            r"preset\.lookup_lr: given, but the model has no lookup layers",
        ),
        ({"preset": {"type": "dial"}}, r"preset\.type: 'dial' given\. Allowed: depth_dial"),
        ({"preset": {"type": "depth_dial"}}, r"preset: the key 'depth' is missing"),
        ({"preset": "depth_dial"}, r"preset: 'depth_dial' given, a section with keys"),
    ],
)
def test_mistakes_are_one_message(tree, message):
    with pytest.raises(ConfigError) as raised:
        configured(tree)
    assert re.search(message, str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_limit_beside_a_size_of_microbatches_is_refused():
    trainer = TrainerConfig(train_batch_size=8, per_device_parallelism=2, max_per_device_parallelism=4)
    with pytest.raises(
        ConfigError, match=r"max_per_device_parallelism: 4 given together with per_device_parallelism: 2"
    ):
        check_fields(trainer, "trainer")


@pytest.mark.parametrize("depth", [4, 12, 20])
def test_the_base_recipe_has_the_derived_values_and_own_data(depth):
    own = ["--data.train_urls", "[mine.parquet]", "--data.validation_urls", "[held_out.parquet]"]
    found = load_config(["--config_path", "jaxlm:nanochat/base.yaml", "--preset.depth", str(depth), *own], "train")
    derived = configured(dial(depth, "head"), {"data": {"vocab_size": None}})
    assert found.model == derived.model
    assert found.optimizer == derived.optimizer
    for name in ("train_batch_size", "num_train_steps", "max_per_device_parallelism"):
        assert getattr(found.trainer, name) == getattr(derived.trainer, name)
    assert (found.data.train_urls, found.data.validation_urls) == (["mine.parquet"], ["held_out.parquet"])
    assert found.data.vocab_size == 32_768


OPTIONS = """run device-type fp8 fp8-recipe depth aspect-ratio head-dim max-seq-len window-pattern l3-after-layers l3-n-emb
l3-d-up l3-k-max num-iterations target-flops target-param-data-ratio device-batch-size total-batch-size embedding-lr
unembedding-lr weight-decay matrix-lr scalar-lr adam-beta1 adam-beta2 warmup-ratio warmup-steps warmdown-ratio final-lr-frac
resume-from-step eval-every eval-tokens core-metric-every core-metric-max-per-task sample-every save-every model-tag"""


def test_the_page_names_a_key_for_each_option_of_nanochat():
    text = (Path(__file__).parents[3] / "docs" / "howto" / "depth-dial.md").read_text()
    rows = re.findall(r"^\| (`--.*?) \| (.+?) \|$", text, re.M)
    named = [name for options, _ in rows for name in re.findall(r"`--([\w-]+)`", options)]
    assert sorted(named) == sorted(OPTIONS.split())


def test_the_option_of_nanochat_is_suggested_with_its_path():
    with pytest.raises(ConfigError, match=r"command line --depth: no such key in .*Did you mean 'preset\.depth'"):
        load_config(["--depth", "1"], "jaxlm.train")
