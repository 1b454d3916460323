"""Parts of a model that fill in hidden tokens by themselves, against models of these layers alone."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.models.diffusion import Denoiser, needed
from jaxlm.models.flops import matrix_operations
from jaxlm.models.inference.denoise import DenoisingConfig, denoise_tokens
from jaxlm.models.inference.sampling import Sampling
from jaxlm.surgery.base import export_form, merge_surgeries
from jaxlm.systems.progressive.surgery import DenoisersConfig, GrowConfig
from tests.engine.helpers import layout

MASK, GREEDY, DEPTH = 39, Sampling(temperature=0.0), DenoisingConfig(schedule="depth")
LIMITS = [0.25, 0.5, 1.0]
LAYERS = {"suffixes": [(2, 3), (1, 3), (0, 3)], "blocks": [(2, 3), (1, 2), (0, 1)]}


@pytest.fixture(scope="module")
def whole(request):
    from tests.models.conftest import TINY, _built

    return _built(dataclasses.replace(TINY["llama"], use_bidirectional_attention=True, num_layers=3))


def parted(model, parts):
    return DenoisersConfig(LIMITS, parts).apply(model, key=None)


def final(model, inputs, fractions):
    batch = inputs.tokens.resolve_axis("batch")
    inputs = dataclasses.replace(inputs, mask_fractions=hax.named(jnp.asarray(fractions, jnp.float32), (batch,)))
    return np.asarray(model.hidden(inputs).final.rearrange(("batch", "position", "embed")).array)


@pytest.mark.slow
@pytest.mark.parametrize("parts", LAYERS)
def test_each_row_is_computed_by_the_part_for_its_share_of_masks(whole, as_inputs, parts):
    model = parted(whole, parts)
    assert model.traits.denoisers == tuple(
        Denoiser(limit, *layers) for limit, layers in zip(LIMITS, LAYERS[parts], strict=True)
    )
    inputs = as_inputs(np.random.default_rng(0).integers(0, 39, (5, 12)))
    found = final(model, inputs, [0.1, 0.25, 0.26, 0.5, 1.0])
    alone = [final(whole.with_layers(range(*layers)), inputs, np.ones(5)) for layers in LAYERS[parts]]
    for row, part in enumerate([0, 0, 1, 1, 2]):
        np.testing.assert_allclose(found[row], alone[part][row], rtol=1e-5, atol=1e-5)
    assert not np.allclose(alone[0], alone[1], atol=0.1)


@pytest.mark.slow
def test_texts_with_one_share_of_masks_cost_their_part_alone(whole, as_inputs):
    """In the loss and in its gradient: as many matrix products, and none that is run under a condition."""
    model, tokens = parted(whole, "suffixes"), np.random.default_rng(0).integers(0, 39, (2, 12))
    of_rows = hax.named(jnp.asarray([0.3, 0.5], jnp.float32), hax.Axis("batch", 2))
    inputs = dataclasses.replace(as_inputs(tokens), mask_fractions=of_rows, mask_range=(0.25, 0.5))
    alone = whole.with_layers([1, 2])

    def squares(model, inputs):
        return jnp.sum(jnp.square(model.hidden(inputs).final.array))

    ours, theirs = (jax.make_jaxpr(jax.grad(squares))(one, inputs).jaxpr for one in (model, alone))
    assert " cond[" not in str(ours)
    assert matrix_operations(ours) == matrix_operations(theirs)
    assert float(squares(model, inputs)) == pytest.approx(float(squares(alone, inputs)), rel=1e-6)
    any_texts = dataclasses.replace(inputs, mask_range=None)
    assert " cond[" in str(jax.make_jaxpr(squares)(model, any_texts))


@pytest.mark.parametrize(
    ("mask_range", "parts"),
    [
        (None, [0, 1, 2]),
        ((0.25, 0.25), [0]),
        ((0.25, 0.5), [1]),
        ((0.2, 0.5), [0, 1]),
        ((0.5, 1.0), [2]),
        ((0.0, 1.0), [0, 1, 2]),
        ((1.0, 1.0), [2]),
    ],
)
def test_texts_need_the_parts_for_their_range(mask_range, parts):
    denoisers = [Denoiser(limit, 0, 1) for limit in LIMITS]
    assert list(needed(denoisers, mask_range)) == [denoisers[part] for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["prepend", "append"])
def test_the_parts_of_a_grown_model_are_its_stacks(whole, at):
    grown = GrowConfig(1, at, "random").apply(parted(whole, "blocks"), key=jax.random.key(0))
    assert grown.traits.denoisers == ()
    export_form(grown, [DenoisersConfig(LIMITS, "blocks"), GrowConfig(1, at, "random")])  # blocks no more
    model = DenoisersConfig([0.5, 1.0], "blocks").apply(grown, key=None)
    edge = 1 if at == "prepend" else 3
    assert [(one.first, one.stop) for one in model.traits.denoisers] == [(edge, 4), (0, edge)]
    merged = merge_surgeries(model, [GrowConfig(1, at), DenoisersConfig([0.5, 1.0], "blocks")])
    assert len(merged.body.stacks) == 1
    assert merged.traits.denoisers == model.traits.denoisers
    with pytest.raises(ConfigError, match="3 parts given, but the model has 2 stacks"):
        parted(grown, "blocks")


def by_hand(whole, parts, logits_of, as_inputs, prompt, num_new):
    """One pass with a model of each part's layers, for one prompt: the most likely tokens, until few enough are left."""
    row = np.array([*prompt, *[MASK] * num_new])
    limits = dict(zip(range(3), [0.0, *LIMITS], strict=False))
    for part, layers in reversed(list(enumerate(LAYERS[parts]))):
        count = (row == MASK).sum() - int(np.floor(limits[part] * len(row) + 1e-9))
        if count <= 0:
            continue
        logits = np.asarray(logits_of(whole.with_layers(range(*layers)), as_inputs(row[None])))[0].astype(np.float64)
        logits[:, MASK] = -np.inf
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        best = sorted(np.flatnonzero(row == MASK), key=lambda place: -log_p[place].max())[:count]
        row[best] = logits[best].argmax(-1)
    return row[len(prompt) :].tolist()


@pytest.mark.slow
def test_a_pass_for_each_part_leaves_the_masks_that_the_next_one_was_trained_on(whole, logits_of, as_inputs):
    """Rows whose prompts hide less begin with a later part."""
    prompts = [[3, 4, 5], [*range(10), *range(6)]]
    model = parted(whole, "suffixes")
    found = denoise_tokens(model, prompts, 9, MASK, GREEDY, DEPTH)
    for prompt, row in zip(prompts, found, strict=True):
        assert row == by_hand(whole, "suffixes", logits_of, as_inputs, prompt, 9)
        assert MASK not in row
    passes = DEPTH.plan([12, 25, 29], 9, model.traits.denoisers)
    assert passes.counts.tolist() == [[3, 0, 0], [3, 3, 2], [3, 6, 7]]
    assert DEPTH.plan([25], 9, model.traits.denoisers).counts.tolist() == [[3], [6]]


@pytest.mark.slow
def test_eight_devices_fill_in_what_one_does(whole):
    model, prompts = parted(whole, "blocks"), [[3, 4, 5], [7] * 16]
    alone = denoise_tokens(model, prompts, 8, MASK, GREEDY, DEPTH)
    with layout(model=2).use():
        assert denoise_tokens(model, prompts, 8, MASK, GREEDY, DEPTH) == alone


@pytest.mark.slow
def test_what_means_nothing_is_refused(whole, as_inputs, built, tiny_llama):
    inputs = as_inputs(np.ones((1, 4), int))
    with pytest.raises(ConfigError, match="depends on the share of its tokens that is hidden"):
        parted(whole, "blocks").hidden(inputs)
    parted(whole, "suffixes").hidden(inputs, taps=("layer_0",))  # all layers
    with pytest.raises(ConfigError, match=r"rising numbers expected"):
        DenoisersConfig([0.5, 0.5])
    with pytest.raises(ConfigError, match="4 parts given, but the model has one stack of 3 layers"):
        DenoisersConfig([0.1, 0.2, 0.3, 1.0]).apply(whole, key=None)
    with pytest.raises(ConfigError, match="this model predicts next tokens, and no hidden ones"):
        DenoisersConfig([0.5, 1.0]).apply(built(tiny_llama), key=None)
    with pytest.raises(ConfigError, match=r"3 blocks of layers.* It cannot be exported"):
        export_form(parted(whole, "blocks"), [DenoisersConfig(LIMITS, "blocks")])
    export_form(parted(whole, "suffixes"), [DenoisersConfig(LIMITS, "suffixes")])
    with pytest.raises(ConfigError, match="schedule: depth given, but no part of this model has a noise of its own"):
        denoise_tokens(whole, [[1]], 4, MASK, GREEDY, DEPTH)
    with pytest.raises(ConfigError, match="num_steps: 4 given together with schedule: depth"):
        check_fields(DenoisingConfig(num_steps=4, schedule="depth"))
