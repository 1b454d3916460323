"""Compiling the step: how often, and what happens if memory is short."""

import re
from collections import Counter
from unittest import mock

import jax
import jaxlib.version
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.hardware.cpu_products import EIGEN, cpu_products, shares_by_library
from jaxlm.models.remat import CANDIDATES
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.compilation.step import CompiledStep, StepPrograms, check_state_fits, compile_step

SIZES = {"type": "llama", "seq_len": 256, "hidden_dim": 64, "intermediate_dim": 128, "num_layers": 2, "num_heads": 4}


def plan_of(vocab: int = 512, devices=None, **changes):
    tree = {"model": SIZES | {"num_kv_heads": 2}, "trainer": {"train_batch_size": 16}} | changes
    return make_plan(decode_run(ConfigSource(tree), "compiled"), "compiled", vocab, devices)


def compiled(plan, **options):
    lines: list[str] = []
    with plan.layout.use():
        step = compile_step(plan, plan.phases[0], lines.append, **options)
    return step, "\n".join(lines)


@pytest.mark.slow
def test_the_least_recomputation_that_fits_is_chosen():
    plan = plan_of()
    roomy, output = compiled(plan)
    assert (roomy.remat_policy, roomy.fits) == ("cheap", True)
    assert "remat policy cheap" in output
    assert roomy.num_bytes is not None
    tight, output = compiled(plan, limit=roomy.num_bytes)
    assert (tight.remat_policy, tight.fits) == ("attention", True)
    assert "trying the next remat policy" in output
    assert tight.num_bytes is not None
    assert tight.num_bytes < roomy.num_bytes
    none, output = compiled(plan, limit=1 << 20)
    assert not none.fits
    assert "warning: the step needs more than 92%" in output
    assert "To use less memory, set trainer.per_device_parallelism (a device computes its 2 sequences at once" in output


@pytest.mark.parametrize(
    ("compiler_remat", "chosen"), [((), "none"), (("none",), "cheap"), (("none", "cheap"), "cheap")]
)
def test_policies_that_need_compiler_remat_are_not_chosen(monkeypatch, compiler_remat, chosen):
    def attempt(plan, phase, stage, remat_policy, limit):
        return CompiledStep(mock.Mock(), mock.Mock(), remat_policy, 1.0, 900, limit, remat_policy in compiler_remat, "")

    monkeypatch.setitem(CANDIDATES, "cpu", CANDIDATES["gpu"])
    monkeypatch.setattr("jaxlm.session.compilation.step._compile", attempt)
    assert compiled(plan_of(), limit=1000)[0].remat_policy == chosen


def test_a_step_that_does_not_fit_is_refused_before_the_state_is_created():
    def needing(num_bytes: int | None) -> CompiledStep:
        return CompiledStep(mock.Mock(), mock.Mock(), "full", 1.0, num_bytes, 1 << 30, False, "Use less")

    for enough in (1 << 30, None):
        StepPrograms({(1, 8): needing(enough)}).check_fits_memory()
    with pytest.raises(ConfigError, match=r"needs 2\.000 GiB per device, but only 1\.000 GiB are available\. Use less"):
        StepPrograms({(1, 8): needing(1 << 30), (1, 16): needing(2 << 30)}).check_fits_memory()


def test_a_state_that_does_not_fit_is_refused_before_anything_is_compiled():
    plan = plan_of(model=SIZES | {"intermediate_dim": 2**31 - 2})
    where = r"phase 'train': parameters and optimizer state take \d+\.\d+ GiB per device, but only 16\.000 GiB are available"
    with plan.layout.use(), pytest.raises(ConfigError, match=where):
        check_state_fits(plan, plan.phases[0], 16 << 30)
    check_state_fits(plan_of(), plan_of().phases[0], 16 << 30)


BATCH = {"train_batch_size": 16}
HALF = "set trainer.mp: 'p=f32,c=bfloat16'"
MICROBATCH = "trainer.per_device_parallelism (a device computes its 2 sequences at once; the batch stays the same)"
SHARD = "shard the parameters: trainer.fsdp_axis: embed"


@pytest.mark.parametrize(
    ("trainer", "model", "advice"),
    [
        (
            {},
            {},
            f"set {MICROBATCH} or lower trainer.train_batch_size, {HALF}, or use more devices",
        ),
        # One that cannot go lower, or is done already, is not advised.
        (
            {"per_device_parallelism": 1},
            {},
            f"lower model.seq_len (256; a device computes one sequence at a time already), {HALF}, or use more devices",
        ),
        (
            {"max_per_device_parallelism": 2, "mp": "p=f32,c=bfloat16", "fsdp_axis": None},
            {"gradient_checkpointing": "cheap"},
            f"lower trainer.max_per_device_parallelism (2), set model.gradient_checkpointing: full, or {SHARD}",
        ),
    ],
)
def test_a_compiler_out_of_memory_is_one_message_with_what_is_left_to_do(monkeypatch, trainer, model, advice):
    plan = plan_of(trainer=BATCH | trainer, model=SIZES | {"num_kv_heads": 2} | model)

    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")

    monkeypatch.setattr("jaxlm.session.compilation.step.trace_step", refuse)
    with pytest.raises(ConfigError, match="does not fit into a device's memory: RESOURCE_EXHAUSTED") as caught:
        compiled(plan)
    assert str(caught.value).endswith(f"Ran out of memory on HBM. To use less memory, {advice}")


@pytest.mark.slow
def test_no_array_holds_all_logits_or_all_scores():
    """Tokens x vocabulary and position x position: the arrays that the kernels avoid."""
    plan = plan_of(vocab=4096, trainer={"train_batch_size": 64}, model=SIZES | {"num_kv_heads": 2, "seq_len": 512})
    text = compiled(plan)[0].call.as_text()
    rows = plan.batches.train.largest.size // 8
    for tokens in (rows * 512, rows):
        assert f"f32[{tokens},4096]" not in text
    assert f"f32[{rows},512,4096]" not in text
    assert "512,512]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_accumulation_needs_no_more_memory(scan):
    def temporary(batch, per_device):
        trainer = {"train_batch_size": batch, "per_device_parallelism": per_device}
        plan = plan_of(trainer=trainer, model=SIZES | {"num_kv_heads": 2, "scan_layers": scan})
        return compiled(plan)[0].call.memory_analysis().temp_size_in_bytes

    assert temporary(128, 2) <= 1.05 * temporary(16, 2)


@pytest.mark.slow
def test_xlas_operation_count_matches_the_formula():
    """XLA's operation count of a step with one layer and one chunk (it counts a loop's body once), against the formula."""
    sizes = SIZES | {"num_layers": 1, "hidden_dim": 1024, "intermediate_dim": 2816, "num_kv_heads": 4}
    plan = plan_of(
        vocab=2048, model=sizes | {"scan_layers": False}, trainer={"train_batch_size": 16, "fsdp_axis": None}
    )
    counted = compiled(plan)[0].call.cost_analysis()["flops"] / 512
    formula = plan.config.model.flops_per_token(2048)
    assert counted == pytest.approx(formula.causal, rel=0.03)


@pytest.mark.slow
def test_a_step_is_compiled_once():
    plan = plan_of()
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    compiled(plan)
    assert sum(name.endswith("backend_compile_duration") for name in events) == 1


@pytest.mark.slow
def test_a_step_in_bfloat16_casts_each_weight_once_and_leaves_no_product_to_xla():
    """On CPUs. Before 0.12, XLA computes products with a bfloat16 result in float32, and rounds weights for both passes."""
    keeps_bfloat16 = jaxlib.version.__version_info__ >= (0, 12)
    sizes = {"hidden_dim": 48, "intermediate_dim": 160, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    trainer = {"train_batch_size": 1, "mp": "p=f32,c=bfloat16"}
    plan = plan_of(1024, jax.devices()[:1], model={**SIZES, **sizes, "tie_word_embeddings": False}, trainer=trainer)
    text = compiled(plan)[0].call.as_text()
    casts = Counter(re.findall(r"= bf16\[([\d,]*)\]\S* convert\(", text))
    model = plan.state_builder.abstract_initial_model
    weights = Counter(
        ",".join(map(str, leaf.array.shape))
        for path, leaf in tree.leaves(model)
        if path.endswith("weight") and leaf.ndim > 2
    )
    times = 1 if keeps_bfloat16 else 2
    assert {shape: casts[shape] for shape in weights} == {shape: times * count for shape, count in weights.items()}
    shares = shares_by_library(cpu_products(text))
    assert not any(name.startswith(EIGEN) for name in shares)
    if keeps_bfloat16:
        assert shares == {"YNNPACK bf16": pytest.approx(1)}
