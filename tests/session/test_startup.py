"""Keys that are checked before a run is planned."""

from dataclasses import replace

import jax
import pytest

from jaxlm import train
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import configure_jax
from jaxlm.core.sharding import repeatability
from jaxlm.observe.console import Console
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.plan.rows import attention_choices, fp8_products
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.startup import check_accelerator, describe
from tests.session.test_mesh_plan import MODEL, plan_of


@pytest.mark.trap("D22")
def test_require_accelerator_is_off_by_default():
    """Levanter refuses CPUs by default, after trackers and Ray have started."""
    check_accelerator(plan_of())
    check_accelerator(plan_of(require_accelerator=False))
    with pytest.raises(ConfigError, match="require_accelerator: true given, but JAX finds only CPUs"):
        check_accelerator(plan_of(require_accelerator=True))


def test_jax_config_sets_options_of_jax_and_names_wrong_ones():
    before = jax.config.jax_default_matmul_precision
    try:
        configure_jax({"jax_default_matmul_precision": "highest"})
        assert jax.config.jax_default_matmul_precision == "highest"
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    with pytest.raises(ConfigError, match=r"trainer.jax_config.jax_no_such_option"):
        configure_jax({"jax_no_such_option": 1})
    with pytest.raises(ConfigError, match=r"trainer.jax_config.jax_default_matmul_precision: 'sharp' given"):
        configure_jax({"jax_default_matmul_precision": "sharp"})
    with pytest.raises(ConfigError, match="compilation_cache_dir"):
        configure_jax({"jax_compilation_cache_dir": "x"})


def test_shutdown_at_exit_is_refused():
    assert plan_of(shutdown_at_exit=False).config.trainer.shutdown_at_exit is False
    for value in (True, 60.0):
        with pytest.raises(ConfigError, match=r"shutdown_at_exit.*does not shut machines down"):
            plan_of(shutdown_at_exit=value)


@pytest.mark.parametrize(
    ("warmup", "meaning"),
    [(1.0, "1.0 means the whole cycle"), (300, "300 is cut to the length of the cycle")],
)
def test_a_warmup_of_the_whole_run_is_said_at_every_start(warmup, meaning):
    groups = [{"match": "tokens", "learning_rate": 0.1}]  # the entry takes its warmup from the optimizer around it
    sections = {"trainer": {"num_train_steps": 100}, "optimizer": {"warmup": warmup, "groups": groups}}
    plan = make_plan(decode_run(ConfigSource({"model": {**MODEL, "num_kv_heads": 4}, **sections}), None), "x", 64)
    (warning,) = [text for name, text in describe(plan) if name == "warning"]
    assert warning.startswith(f"optimizer.warmup: {meaning}: the learning rate rises over all its 100 steps")


@pytest.mark.parametrize(
    ("seq_len", "chosen"),
    [
        (16, "short factors for a document of up to 8 tokens, long ones for"),
        (8, "short factors, because no row is longer"),
    ],
)
def test_the_table_says_which_factors_of_longrope_training_chooses(seq_len, chosen):
    factors = [1.0] * (MODEL["hidden_dim"] // MODEL["num_heads"] // 2)
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors, "original_max_position_embeddings": 8}
    model = {**MODEL, "num_kv_heads": 4, "seq_len": seq_len, "rope": rope}
    plan = make_plan(decode_run(ConfigSource({"model": model, "trainer": {"num_train_steps": 9}}), None), "x", 64)
    (text,) = [text for name, text in describe(plan) if name == "positions"]
    assert text.startswith(f"LongRoPE: {chosen}")


def test_adapters_do_not_change_the_attention_backend():
    plain = make_plan(decode_run(ConfigSource({"model": MODEL}), None), "x", 64)
    phases = [{"name": "lora", "surgery": [{"type": "lora", "target": "attn", "rank": 2}], "trainable": ["\\.[ab]$"]}]
    adapted = make_plan(decode_run(ConfigSource({"model": MODEL, "phases": phases}), None), "x", 64)
    assert attention_choices(adapted) == attention_choices(plain)


@pytest.mark.parametrize(("exclude", "others"), [(None, "14 linear layers in fp8 (tensorwise), 1"), ("_proj", "all")])
def test_the_head_is_not_counted_as_fp8_where_the_objective_does_not_multiply_it_in_fp8(exclude, others):
    surgery = [{"type": "fp8", "min_features": 16, "exclude": exclude}]
    sections = {
        "model": {**MODEL, "num_kv_heads": 4},
        "refs": {"teacher": {"type": "hf", "path": "not-read"}},
        "phases": [
            {"name": "plain", "surgery": surgery},
            {"name": "distilled", "objective": {"type": "distill"}},
        ],
    }
    found = fp8_products(make_plan(decode_run(ConfigSource(sections), None), "x", 64))
    assert found["plain"].startswith(
        "1 linear" if exclude else "15 linear layers in fp8 (tensorwise), 0 in the compute"
    )
    assert found["distilled"].startswith(f"{others} in the compute dtype, among them the head: objective distill")


@pytest.mark.parametrize(
    ("key", "value"), [("hybrid_norm", True), ("input_embedding_norm", True), ("use_layer_norm_weight", False)]
)
def test_a_model_that_cannot_be_exported_is_refused_before_it_is_trained(key, value):
    model = {**MODEL, "num_kv_heads": 4, key: value}
    config = decode_run(ConfigSource({"model": model, "hf_save_path": "exports"}), None)
    with pytest.raises(ConfigError, match=rf"config.json of llama cannot represent this model:\n  model.{key}"):
        make_plan(config, "x", 64)
    make_plan(replace(config, hf_save_path=None), "x", 64)


def test_a_reward_model_that_transformers_has_no_class_for_is_refused_before_it_is_trained():
    sections = {
        "model": {**MODEL, "num_kv_heads": 4, "type": "granite"},
        "data": {"type": "pairs"},
        "objective": {"type": "reward"},
        "phases": [{"name": "reward", "surgery": [{"type": "reward_head"}]}],
        "hf_save_path": "exports",
    }
    with pytest.raises(ConfigError, match=r"no GraniteForSequenceClassification.* Remove hf_save_path"):
        make_plan(decode_run(ConfigSource(sections), None), "x", 64)
    for others in ({"hf_save_path": None}, {"model": {**MODEL, "num_kv_heads": 4}}):
        make_plan(decode_run(ConfigSource({**sections, **others}), None), "x", 64)


def test_a_stride_longer_than_a_sequence_is_refused_with_the_plan():
    sections = {"model": {**MODEL, "num_kv_heads": 4}, "data": {"train_urls": ["none.txt"], "stride": 17}}
    with pytest.raises(ConfigError, match=r"data\.stride: 17 given, but model\.seq_len is 16"):
        make_plan(decode_run(ConfigSource(sections), None), "x", 64)


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ("", "within rounding"),
        ("--xla_gpu_deterministic_ops=true", "bit for bit"),
        ("--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops", "bit for bit"),
        ("--xla_gpu_deterministic_ops=false", "within rounding"),
    ],
)
def test_the_table_says_whether_a_run_on_gpus_is_repeatable(flags, start):
    assert repeatability(flags).startswith(start)
    assert "repeatable" not in dict(plan_of().layout.rows()), "on CPUs, there is no choice"


@pytest.mark.slow
def test_the_plan_of_many_phases_is_announced(capsys):
    phases = [{"name": f"p{number}", "num_train_steps": 1} for number in range(16)]
    config = {"model": MODEL, "data": {"train_urls": ["x"]}, "trainer": {"train_batch_size": 8}}
    for given, announced in ((phases, "planning 16 phases ...\n"), (phases[1:], "")):
        train._make_checked_plan(decode_run(ConfigSource({**config, "phases": given}), None), Console())
        assert capsys.readouterr().out == announced
