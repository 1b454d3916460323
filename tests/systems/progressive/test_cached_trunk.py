"""Training on the stored output of a frozen trunk is training on the model, and what would make it another is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import array_digest
from jaxlm.core.sharding import Layout
from jaxlm.models.flops import matrix_operations
from jaxlm.objectives.base import ITSELF
from jaxlm.objectives.next_token import NextToken
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.references import annotations_of, flops_per_token
from jaxlm.systems.progressive.cached_trunk import CachedTrunk
from jaxlm.systems.progressive.surgery import GrowConfig
from tests.engine.helpers import TinyRun, arrays, batch, layout, one_device, phase
from tests.tiers import one_of

GROWN = {
    "surgeries": (GrowConfig(2, init="random"),),
    "trainable": ("new_stack", "final_norm", "^head"),
}


def cached(**keys) -> CachedTrunk:
    return CachedTrunk(NextToken(z_loss_weight=1e-4), **keys)


@dataclasses.dataclass
class Stored:
    """Batches with the stored output of a trunk. What a model says is asked once for each batch."""

    model: object = None
    objective: CachedTrunk = dataclasses.field(default_factory=cached)

    def __call__(self, columns, where: Layout, num_microbatches: int):
        plain = batch(columns, where, num_microbatches)
        ask = jax.jit(lambda model: annotations_of(phase(objective=self.objective), {ITSELF: model}, plain))
        with where.use():
            return dataclasses.replace(plain, annotations=ask(self.model))


def trained(where, objective, make=None):
    run = TinyRun(where, phase(objective=objective, **GROWN))
    if make is not None:
        make.model = jax.tree.map(lambda a: a.copy(), run.state.model)
        run.batch = make
    losses = [run.step(arrays(number % 2), 2)["train/loss"] for number in range(4)]
    return losses, {path: np.asarray(leaf.array) for path, leaf in tree.leaves(run.state.model)}


@pytest.fixture(scope="module")
def whole():
    return trained(one_device(), cached().objective)


@pytest.mark.slow
@pytest.mark.parametrize("where", one_of([layout, one_device]), ids=["eight", "one"])
def test_stored_streams_train_the_same_stack(where, whole):
    losses, leaves = trained(where(), cached(), Stored())
    np.testing.assert_allclose(losses, whole[0], rtol=1e-6 if where is one_device else 1e-5)
    for path, leaf in leaves.items():
        np.testing.assert_allclose(leaf, whole[1][path], atol=1e-6 if where is one_device else 1e-5, err_msg=path)


@pytest.mark.slow
def test_eight_bits_are_near(whole):
    losses, _ = trained(one_device(), cached(int8=True), Stored(objective=cached(int8=True)))
    np.testing.assert_allclose(losses, whole[0], rtol=2e-3)
    assert losses != whole[0]


@pytest.mark.slow
def test_what_is_stored_is_what_the_trunk_computes():
    """Bit for bit, from the same program; and the step does not compute the trunk."""
    run, stored = TinyRun(one_device(), phase(objective=cached(), **GROWN)), Stored()
    stored.model = run.state.model
    first, second = (stored(arrays(0), one_device(), 2).annotations["stream"].array for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.dtype == np.float32
    products = {}
    for name, objective, make in (("whole", cached().objective, batch), ("stored", cached(), stored)):
        some = TinyRun(one_device(), phase(objective=objective, **GROWN), batch=make)
        inputs = make(arrays(0), one_device(), 2)
        with one_device().use():
            products[name] = matrix_operations(some._step.trace(some.state, {}, inputs, some._blank).jaxpr.jaxpr)
    c = run.model
    weights = 2 * (2 * c.hidden_dim * 6 * c.HeadSize.size + 3 * c.hidden_dim * c.intermediate_dim)
    attention = 2 * 2 * 2 * 16 * 16 * 16 * c.hidden_dim
    assert products["whole"] - products["stored"] == 2 * 256 * weights + attention


def test_digests_are_those_of_the_content():
    whole = {"a": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.arange(8).astype(jax.numpy.bfloat16)}
    place = jax.sharding.NamedSharding(layout().mesh, jax.sharding.PartitionSpec("data"))
    expected = array_digest(jax.tree.map(jax.numpy.asarray, whole))
    assert array_digest(jax.tree.map(lambda a: jax.device_put(a, place), whole)) == expected
    seen = {expected}
    for change in (lambda a: a[0].__setitem__(3, 1e-30), lambda a: a[[0, 1]].sort(), lambda a: a.T.copy()):
        other = {"a": whole["a"].copy(), "b": whole["b"]}
        result = change(other["a"])
        other["a"] = other["a"] if result is None else result
        seen.add(array_digest(jax.tree.map(jax.numpy.asarray, other)))
    swapped = {**whole, "a": whole["a"][[1, 0, *range(2, 8)]]}
    seen.add(array_digest(jax.tree.map(jax.numpy.asarray, swapped)))
    assert len(seen) == 4, "one of the changes changes nothing"


MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4}
GPT2 = {"type": "gpt2", "seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "tie_word_embeddings": False}
GROW = {"type": "grow", "num_layers": 1}
TOP = ["new_stack", "final_norm", "^head"]
FP8 = {"type": "fp8", "min_features": 16}
LORA = {"type": "lora", "target": r"body\.0", "rank": 2}


BOTH = {**MODEL, "use_bidirectional_attention": True}
TIMED = {**BOTH, "time_embedding": {"dim": 8}}
PARTS = {"type": "denoisers", "mask_fractions": [0.5, 1.0]}
MASKED = {"masking": {"mask_replicas": 2}}


def planned(surgery, trainable=TOP, model=MODEL, refs=None, data=None, **objective):
    upper = {
        "name": "p",
        "surgery": surgery,
        "trainable": trainable,
        "objective": {"type": "cached_trunk", **objective},
    }
    trainer = {"train_batch_size": 8, "num_train_steps": 1}
    source = {"model": model, "phases": [upper], "trainer": trainer, "data": data or {}}
    return make_plan(decode_run(ConfigSource({**source, "refs": refs or {}}), None), "x", 40)


REFUSED = {
    "prepended": (
        ([{**GROW, "at": "prepend"}], ["new_stack"]),
        {},
        "come first .at: prepend., so that there is no trunk",
    ),
    "adapters": (
        ([GROW, LORA], [*TOP, r"\.[ab]$"]),
        {},
        r"trainable matches body\.0\..*_proj\.[ab], on which it depends",
    ),
    "parts with a noise of their own": (
        ([{"type": "split_at", "layer": 1}, PARTS], [r"^body\.1\.", "^head"], BOTH, None, MASKED),
        {"num_layers": 1, "objective": {"type": "mlm"}},
        "which layers of this model compute a text depends on the share .* grow the model in this phase",
    ),
    "embeddings": (([GROW], [*TOP, "^tokens"]), {}, r"trainable matches tokens\.weight, on which it depends"),
    "adapters on stored weights": (
        ([{"type": "quantize", "kind": "nf4"}, {**LORA, "target": "attn"}, GROW], [*TOP, r"\.[ab]$"]),
        {},
        r"trainable matches body\.0\..*_proj\.[ab], on which it depends",
    ),
    "the embedding of the time": (
        ([GROW], [*TOP, "^time"], TIMED),
        {"data": MASKED, "objective": {"type": "diffusion"}},
        r"trainable matches time\..*, on which it depends",
    ),
    "masks anew in every epoch": (
        ([GROW], TOP, BOTH),
        {"data": {"masking": {}}, "objective": {"type": "mlm"}},
        r"phase 'p': objective.type: cached_trunk stores .* hides other tokens in every epoch.* data.masking.mask_replicas",
    ),
    "rows that never end": (
        ([GROW],),
        {"data": {"packing": {"type": "best_fit"}, "shuffle": False}},
        r"data.packing makes other rows in every pass. Set data.packing.wrap: false.*, or use the objective inside of it",
    ),
    "rows that never end, for a teacher": (
        ([], [".*"]),
        {
            "data": {"packing": {"type": "best_fit"}, "shuffle": False},
            "refs": {"teacher": {"type": "hf", "path": "anywhere"}},
            **{"type": "distill", "cache": True, "top_k": 4},
        },
        r"distill stores .* other rows in every pass. Set data.packing.wrap: false.*, or set objective.cache: false",
    ),
    "nothing is hidden": (
        ([GROW], TOP, BOTH),
        {"objective": {"type": "diffusion"}},
        "objective.type: diffusion cannot train on data.type: tokens.* Set data.masking",
    ),
    "something is hidden": (
        ([GROW],),
        {"data": MASKED},
        "objective.type: next_token cannot train on .* it reads TokenBatch or PairBatch, and.* Remove data.masking",
    ),
    "pairs": (([GROW],), {"data": {"type": "pairs"}}, "objective.type: cached_trunk cannot train on data.type: pairs"),
    "a causal model": (
        ([GROW],),
        {"data": MASKED, "objective": {"type": "mlm"}},
        "objective.type: mlm predicts hidden tokens from those on both sides",
    ),
    "no bound": (
        ([GROW], TOP, BOTH),
        {"data": {"masking": {"mask_replicas": 2, "mode": "fixed_count"}}, "objective": {"type": "diffusion"}},
        "objective.type: diffusion is a bound only for masks",
    ),
    "dropout": (([GROW], TOP, {**GPT2, "resid_pdrop": 0.1}), {}, "it is random in training"),
    "dropped embeddings": (([GROW], TOP, {**GPT2, "embed_pdrop": 0.1}), {}, "it is random in training"),
    "dropout of adapters": (([{**LORA, "target": "q_proj", "dropout": 0.1}, GROW],), {}, "it is random in training"),
    "scales of a microbatch": (
        ([FP8, GROW],),
        {},
        r"body\.0\.[a-z_.]+ multiplies in fp8 with one scale for all sequences .* Set recipe: rowwise",
    ),
    "twice": (([GROW],), {"objective": {"type": "cached_trunk"}}, "cached_trunk given, which has a trunk of its own"),
    "noise": (([GROW],), {"objective": {"neftune_alpha": 5.0}}, "may not read the same each time"),
    "unknown inputs": (([GROW],), {"objective": {"type": "reward"}}, "does not train on sequences"),
    "references": (([GROW],), {"objective": {"type": "distill"}}, "asks another model in every step"),
    "not grown": (([], ["head"]), {}, "this model has not grown. Set it to the number of layers"),
    "too many": (([GROW],), {"num_layers": 3}, "num_layers: 3 given, but the model has 3 layers"),
}


@pytest.mark.parametrize(("arguments", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused(arguments, keys, message):
    with pytest.raises(ConfigError, match=message):
        planned(*arguments, **keys)


@pytest.mark.parametrize(
    ("model", "data", "objective"),
    [(TIMED, MASKED, "diffusion"), (BOTH, MASKED, "mlm"), (BOTH, {"type": "labeled"}, "custom"), (MODEL, {}, "clm")],
)
def test_what_is_read_alike_each_time_is_stored(model, data, objective):
    (upper,) = planned([GROW], model=model, data=data, objective={"type": objective}).phases
    assert upper.objective.facts.annotation_key["inputs"] == {}


def test_dropout_above_the_trunk_is_allowed():
    lora = {"type": "lora", "target": r"body\.1.*q_proj", "rank": 2, "dropout": 0.1}
    (upper,) = planned([GROW, lora], [r"\.[ab]$"]).phases
    assert upper.objective.facts.asks_itself


@pytest.mark.parametrize("keys", [{"recipe": "rowwise"}, {"exclude": r"^body\.0"}])
def test_fp8_is_allowed_where_no_sequence_scales_another(keys):
    surgery = [{**FP8, **keys}, GROW] if "recipe" in keys else [GROW, {**FP8, **keys}]
    (upper,) = planned(surgery).phases
    assert upper.objective.facts.asks_itself


def test_stored_layers_cost_nothing():
    plan = planned([GROW])
    (upper,) = plan.phases
    alone = dataclasses.replace(upper.model, num_layers=1)
    assert flops_per_token(plan, upper).causal == alone.flops_per_token(40).causal
