"""The objective `diffusion_blocks`: its loss against models of single blocks, its gradients, batches and refusals."""

import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.models.flops import matrix_operations
from jaxlm.models.moe import num_multiplied
from jaxlm.models.step_flops import ModelInStep
from jaxlm.objectives.next_token import score_batch
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.export import model_card
from jaxlm.session.startup import describe
from jaxlm.systems.progressive.cached_trunk import CachedTrunk
from jaxlm.systems.progressive.losses import Diffusion, DiffusionBlocks
from jaxlm.systems.progressive.surgery import DenoisersConfig
from tests.engine.helpers import MODEL, TinyRun, layout, one_device, phase
from tests.systems.progressive.test_hidden_tokens import (
    BOTH,
    LENGTH,
    VOCAB,
    batch_of,
    columns_of,
    log_probabilities,
    with_random_weights,
)

ROWS = 8
LIMITS = [0.001 + 0.999 * end for end in (0.5, 1.0)]


@pytest.fixture(scope="module")
def plain():
    return with_random_weights(dataclasses.replace(BOTH, num_layers=4))


@pytest.fixture(scope="module")
def blocks(plain):
    return DenoisersConfig(LIMITS, "blocks").apply(plain, key=None)


def arranged(objective, columns, num_microbatches=1):
    """The first microbatch as the step reads it."""
    axes = (Axis("microbatch", num_microbatches), Axis("batch", ROWS // num_microbatches), Axis("position", LENGTH))
    shape = [axis.size for axis in axes[:2]]
    named = {k: hax.named(jnp.asarray(v.reshape(*shape, *v.shape[1:])), axes[: v.ndim + 1]) for k, v in columns.items()}
    batch = objective.prepare_batch(MaskedBatch(**named), None)
    return jax.tree.map(lambda column: column["microbatch", 0], batch, is_leaf=tree.is_named)


@pytest.mark.slow
def test_the_loss_is_the_bound_with_the_block_of_each_row(plain, blocks):
    columns, objective = columns_of(ROWS), DiffusionBlocks(2)
    terms, metrics = jax.jit(lambda model, batch: objective.terms(model, batch, None, key=None)[:2])(
        blocks, arranged(objective, columns)
    )
    batch, hidden = batch_of(columns), columns["loss_mask"]
    is_noisy = columns["mask_fractions"] > LIMITS[0]
    assert is_noisy.sum() == ROWS / 2
    log_p = [log_probabilities(plain.with_layers(layers), batch, without_mask=True) for layers in ([2, 3], [0, 1])]
    nats = -(hidden * np.where(is_noisy[:, None], log_p[1], log_p[0])).sum(1) * columns["rates"]
    expected = nats.sum() / columns["maskable"].sum()
    assert float(terms["loss"].mean()) == pytest.approx(expected, rel=1e-5)
    assert float(terms["loss"].weight) == float(objective.weights(batch)["loss"]) == columns["maskable"].sum()
    by_block = [nats[of_block].sum() / columns["maskable"][of_block].sum() for of_block in (~is_noisy, is_noisy)]
    assert [float(metrics[f"block_loss/{number}"].mean()) for number in (0, 1)] == pytest.approx(by_block, rel=1e-5)
    scores = jax.jit(score_batch)(blocks, batch)
    assert float((scores.nats * scores.mask).array.sum() / scores.mask.array.sum()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_row_trains_its_block_and_what_all_blocks_share(blocks):
    objective, columns = DiffusionBlocks(2), columns_of(ROWS)
    batch, gradient = arranged(objective, columns), {}

    @jax.jit
    def gradients(weights):
        only = dataclasses.replace(batch, rates=batch.rates * hax.named(weights, batch.mask_fractions.axes[0]))
        return jax.grad(lambda model: objective.terms(model, only, None, key=None)[0]["loss"].total)(blocks)

    for block in (0, 1):
        gradient[block] = gradients(jnp.arange(2) == block)
        by_layer = [
            np.abs(leaf.array).reshape(4, -1).max(1) > 0
            for path, leaf in tree.leaves(gradient[block])
            if path.startswith("body.layers.")
        ]
        expected = [block == 1] * 2 + [block == 0] * 2
        assert {tuple(layers.tolist()) for layers in by_layer} == {tuple(expected)}
        shared = [
            path for path, leaf in tree.leaves(gradient[block]) if "layers" not in path and np.abs(leaf.array).any()
        ]
        assert set(shared) == {"tokens.weight", "body.final_norm.weight", "head.weight"}


@pytest.mark.slow
def test_one_block_is_diffusion(plain):
    columns, objective = columns_of(ROWS), DiffusionBlocks(1)
    one = DenoisersConfig([1.0], "blocks").apply(plain, key=None)
    ours = lambda model: objective.terms(model, arranged(objective, columns), None, key=None)[0]["loss"].mean()  # noqa: E731
    theirs = lambda model: Diffusion().terms(model, batch_of(columns), None, key=None)[0]["loss"].mean()  # noqa: E731
    (loss, gradient), (expected, other) = (
        jax.jit(jax.value_and_grad(ours))(one),
        jax.jit(jax.value_and_grad(theirs))(plain),
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_step_is_the_same_on_one_and_on_eight_devices_and_with_microbatches():
    """The first step of each, so that Adam's first moment compares gradients."""
    config = dataclasses.replace(MODEL, use_bidirectional_attention=True)
    columns, surgeries = columns_of(32, vocab=64), (DenoisersConfig(LIMITS, "blocks"),)

    def place(columns, where, num_microbatches):
        axes = (Axis("microbatch", num_microbatches), Axis("batch", 32 // num_microbatches), Axis("position", LENGTH))
        shape = [axis.size for axis in axes]
        named = {k: (v.reshape([*shape[:2], *v.shape[1:]]), axes[: v.ndim + 1]) for k, v in columns.items()}
        return MaskedBatch(**{k: hax.named(jnp.asarray(v), of_column) for k, (v, of_column) in named.items()})

    results = []
    for where, num_microbatches in ((one_device(), 1), (layout(model=2), 2)):
        of_run = phase(model=config, objective=DiffusionBlocks(2), surgeries=surgeries)
        run = TinyRun(where, of_run, model=config, batch=place)
        results.append((run.step(columns, num_microbatches), jax.tree.leaves(run.state.opt_state)))
    (one, state), (eight, sharded) = results
    for name in ("train/loss", "train/block_loss/0", "train/block_loss/1", "grad/norm/total"):
        assert one[name] == pytest.approx(eight[name], rel=1e-5), name
    for a, b in zip(state, sharded, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_a_row_costs_its_share_of_the_layers(plain):
    whole = plain.config.flops_per_token(VOCAB)
    model = ModelInStep(plain.config, VOCAB, plain, functools.partial(num_multiplied, model=plain))
    head = 6 * VOCAB * 16
    of_blocks = DiffusionBlocks(4).facts.flops(model, ())
    of_layer = dataclasses.replace(plain.config, num_layers=1).flops_per_token(VOCAB)
    assert of_blocks == of_layer
    assert of_blocks.causal == (whole.causal - head) / 4 + head
    assert DiffusionBlocks(1).facts.flops(model, ()) == whole


@pytest.mark.slow
def test_the_step_computes_a_share_of_the_layers_for_each_row(plain, blocks):
    """As many matrix products as a model of one block's layers."""
    columns, objective = columns_of(ROWS), DiffusionBlocks(2)
    ours = jax.make_jaxpr(lambda model, batch: objective.terms(model, batch, None, key=None)[0])
    theirs = jax.make_jaxpr(lambda model, batch: Diffusion().terms(model, batch, None, key=None)[0])
    count = matrix_operations(ours(blocks, arranged(objective, columns)).jaxpr)
    assert count == matrix_operations(theirs(plain.with_layers([0, 1]), batch_of(columns)).jaxpr)


def test_blocks_have_no_trunk_to_store():
    with pytest.raises(ConfigError, match="diffusion_blocks given, whose blocks do not read each other"):
        CachedTrunk(objective=DiffusionBlocks())


def test_masks_without_a_bound_are_refused(blocks):
    with pytest.raises(ConfigError, match="diffusion_blocks is a bound only for masks that hide each token"):
        DiffusionBlocks().check(batch_of(columns_of(2, time_step_mask_fractions=[0.15])), blocks, None)


def plan_of(rows=32, masking=None, trainer=None, top=None, **objective):
    tree_of_run = {
        "model": {**MODEL_SECTION, "use_bidirectional_attention": True},
        "objective": {"type": "diffusion_blocks", "num_blocks": 2, **objective},
        "data": {} if masking is None else {"masking": masking},
        "trainer": {"train_batch_size": rows, **(trainer or {})},
        **(top or {}),
    }
    return make_plan(decode_run(ConfigSource(tree_of_run), "x"), "x", 40)


MODEL_SECTION = {
    "type": "llama",
    "seq_len": 16,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 6,
    "num_heads": 4,
}


def test_blocks_are_for_equally_probable_mask_fractions():
    plan = plan_of(masking={"mask_schedule_type": "cosine"})
    rows = dict(describe(plan))
    middle = 0.001 + 0.999 * (1 - 0.5**0.5)
    assert (
        rows["parts of train"]
        == f"layers 3 to 5 for 0 to {middle:.4g}, layers 0 to 2 for {middle:.4g} to 1 of the tokens hidden"
    )
    (single,) = (text for name, text in describe(plan_of(48, {"strata": 6}, num_blocks=6)) if name == "parts of train")
    assert single.startswith("layer 5 for 0 to ")
    assert "after Denoisers; DiffusionBlocks" in rows["phase train"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"phase 'train': .*_blocks trains 2 blocks .* but the data hides no tokens\. Set data\.masking"),
        (
            {"masking": {"strata": 96}, "top": {"objective": {"type": "diffusion"}}},
            r"data\.masking\.strata: 96 given, but a batch has only 32 sequences\. Set it to a divisor of 32",
        ),
        ({"masking": {}, "num_blocks": 3}, r"trains 3 blocks .* but data\.masking\.strata: 1 spreads .* Set it to 3"),
        (
            {"masking": {}, "num_blocks": 4},
            r"^objective\.num_blocks .*: 4 parts given, but the model has one stack of 6 layers",
        ),
        (
            {"masking": {}, "rows": 8},
            "trains 2 blocks of layers on .* a batch of 8 sequences .* of 8 on 8 devices",
        ),
        ({"masking": {}, "top": {"hf_save_path": "hf"}}, "this model is 2 blocks of layers.* It cannot be exported"),
        (
            {"masking": {}, "trainer": {"per_device_parallelism": 1}},
            "a batch of 32 sequences comes in microbatches of 8",
        ),
    ],
)
def test_what_has_no_equal_blocks_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(**keys)


def test_the_card_of_an_exported_model_says_that_it_has_parts():
    parts = {"type": "denoisers", "mask_fractions": [0.5, 1.0]}
    phases = [{"name": "p", "objective": {"type": "mlm"}, "surgery": [parts]}]
    plan = plan_of(masking={}, top={"phases": phases, "hf_save_path": "hf"})
    text = model_card(plan, plan.phases[0].model, 1, {}).text()
    expected = "layers 3 to 5 for 0 to 0.5, layers 0 to 5 for 0.5 to 1 of the tokens hidden"
    assert f"| parts of p | {expected}. jaxlm runs one of them for each text, transformers all layers |" in text


def test_only_batches_that_the_phase_may_read_divide_into_blocks():
    """The phase before it may end at its first evaluation."""

    def planned(steps_per_eval):
        whole = {"name": "whole", "num_train_steps": 8, "objective": {"type": "mlm"}}
        whole["until"] = {"metric": "eval/loss", "below": 1.0}
        data = {"masking": {}, "validation_urls": ["stdlib:validation"]}
        return plan_of(
            rows=[{"start": 0, "value": 24}, {"start": 8, "value": 32}],
            trainer={"num_train_steps": 4, "steps_per_eval": steps_per_eval},
            top={"phases": [whole, {"name": "blocks"}], "data": data},
        )

    assert [phase.start for phase in planned(8).phases] == [0, 8]
    with pytest.raises(
        ConfigError, match="a batch of 24 sequences, which it reads if an earlier phase ends early, comes"
    ):
        planned(7)
