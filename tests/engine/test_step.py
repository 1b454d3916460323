"""The step: accumulation, sharding and the finite guard, against an unsharded run, bit for bit where promised."""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.values.logged import LEARNING_RATE
from jaxlm.core.values.sums import Sum
from jaxlm.data.packing import PackedSequences, pack_documents
from jaxlm.objectives.next_token import NextToken
from tests.data.helpers import cache_of
from tests.engine.helpers import EVERY_MESH, MESHES, MODEL, VOCAB, TinyRun, arrays, layout, one_device, phase
from tests.tiers import one_of

POISON = 63  # marks a poisoned batch by its first token
# Adam divides gradients by their size, so one that nearly cancels changes weights by its rounding. These batches have none.
BATCHES = range(100, 120)


def host(run: TinyRun) -> dict[str, np.ndarray]:
    return {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(run.state)}


def assert_identical(a: dict[str, np.ndarray], b: dict[str, np.ndarray], *, but: tuple[str, ...] = ()):
    assert a.keys() == b.keys()
    different = [k for k in a if k not in but and a[k].tobytes() != b[k].tobytes()]
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", one_of([8, 2]))
def test_accumulated_gradient_is_the_full_batch_gradient_with_unequal_masks(num_microbatches):
    # Adam's first moment after one step is (1 - beta1) x the clipped gradient, so comparing states compares gradients.
    whole, cut = TinyRun(one_device()), TinyRun(one_device())
    a, b = whole.step(arrays(0)), cut.step(arrays(0), num_microbatches)
    assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-6)
    assert a["grad/norm/total"] == pytest.approx(b["grad/norm/total"], rel=1e-6)
    for path, expected in host(whole).items():
        if ".mu." in path:
            np.testing.assert_allclose(host(cut)[path], expected, rtol=1e-4, atol=1e-7, err_msg=path)


@pytest.mark.slow
@pytest.mark.trap("T7")
def test_chat_gradients_do_not_depend_on_the_number_of_microbatches():
    # Answers of 1 to 10 tokens, packed: a mean of the microbatches' means would overweight the short ones.
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 11, 40)
    documents = [rng.integers(0, VOCAB, 4 + n).tolist() for n in lengths]
    asked = np.concatenate([[0] * 4 + [1] * n for n in lengths]).astype(np.uint8)
    cache = dataclasses.replace(cache_of(documents, VOCAB), target_mask=asked)
    sequences = PackedSequences(cache, MODEL.seq_len, pack_documents(cache, MODEL.seq_len, max_documents=0))
    columns = sequences.read(np.arange(16))
    assert len(set(columns["loss_mask"].sum(axis=1))) > 4
    whole, cut = TinyRun(one_device()), TinyRun(one_device())
    a, b = whole.step(columns), cut.step(columns, 8)
    assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-6)
    for path, expected in host(whole).items():
        if ".mu." in path:
            np.testing.assert_allclose(host(cut)[path], expected, rtol=1e-4, atol=1e-7, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_MESH)
def test_every_mesh_trains_the_same(name, single_device_losses):
    run = TinyRun(layout(**MESHES[name]))
    losses = [run.step(arrays(i), 2 if name == "tp 2 x fsdp 4" else 1)["train/loss"] for i in BATCHES]
    assert losses[0] - losses[-1] > 1.0
    np.testing.assert_allclose(losses, single_device_losses, rtol=1e-5)


@pytest.mark.slow
def test_shards_have_the_shape_that_the_mapping_implies():
    where = layout(model=2)
    run = TinyRun(where)
    num_shards = {"data": 4, "model": 2, "replica": 1}
    for path, leaf in tree.leaves(run.state.model):
        expected = tuple(
            axis.size // num_shards.get(where.parameter.get(axis.name), 1)  # type: ignore[arg-type]
            for axis in leaf.axes
        )
        assert {shard.data.shape for shard in leaf.array.addressable_shards} == {expected}, path


@dataclass(frozen=True)
class Poisoned(NextToken):
    """Next-token loss that is NaN on a poisoned batch: in the loss, or only in the gradient of one leaf."""

    where: str = "loss"

    def terms(self, model, batch, slot, *, key):
        bad = batch.tokens.array[0, 0] == POISON
        if self.where == "gradient":
            model = eqx.tree_at(lambda m: m.body.final_norm.weight, model, replace_fn=lambda w: _nan_gradient(w, bad))
        terms, metrics, slot = super().terms(model, batch, slot, key=key)
        if self.where == "loss":
            terms["loss"] = eqx.tree_at(
                lambda s: s.total, terms["loss"], replace_fn=lambda t: jnp.where(bad, jnp.nan, t)
            )
        return terms, metrics, slot


def _nan_gradient(weight: hax.NamedArray, bad: jax.Array) -> hax.NamedArray:
    @jax.custom_vjp
    def same(x, bad):
        return x

    def backward(bad, g):
        return g.at[3].set(jnp.where(bad, jnp.nan, g[3])), None

    same.defvjp(lambda x, bad: (x, bad), backward)
    return hax.named(same(weight.array, bad), weight.axes)


@pytest.mark.parametrize(
    ("bad_step", "where", "devices"),
    [
        (5, "gradient", one_device),
        pytest.param(1, "loss", layout, marks=pytest.mark.slow),
        *(
            pytest.param(*case, layout, marks=pytest.mark.soak)
            for case in ((20, "gradient"), (1, "gradient"), (5, "loss"), (20, "loss"))
        ),
    ],
)
def test_a_non_finite_step_skips_exactly_one_update(where, bad_step, devices):
    clean_batches = [arrays(i) for i in range(20)]
    for columns in clean_batches:
        columns["tokens"][0, 0] %= POISON
    poisoned = arrays(99)
    poisoned["tokens"][0, 0] = POISON
    with_bad = [*clean_batches[: bad_step - 1], poisoned, *clean_batches[bad_step - 1 :]]

    run, clean = (TinyRun(devices(), phase(objective=Poisoned(where=where), end=21)) for _ in range(2))
    skipped, rates = [], []
    for columns in with_bad[:20]:
        before = host(run)
        metrics = run.step(columns)
        skipped.append(metrics["train/skipped_steps"])
        if columns is poisoned:
            assert_identical(host(run), before, but=("step", "guard.skipped"))
        else:
            rates.append(metrics[LEARNING_RATE])
    assert skipped == [0.0] * (bad_step - 1) + [1.0] * (21 - bad_step)
    assert rates == [clean.step(columns)[LEARNING_RATE] for columns in with_bad[:20] if columns is not poisoned]
    assert len(set(rates)) > 2
    assert_identical(host(run), host(clean), but=("step", "guard.skipped"))
    assert all(np.isfinite(array).all() for array in host(run).values())


@dataclass(frozen=True)
class Counting(Poisoned):
    """Keeps the number of updates that the step told it last."""

    def init_slot(self, trainable):
        return jnp.int32(0)

    def update_slot(self, slot, trainable, updates):
        return updates


@pytest.mark.slow
def test_the_objective_learns_how_many_updates_the_phase_has_with_this_one():
    poisoned, told = arrays(99), []
    poisoned["tokens"][0, 0] = POISON
    run = TinyRun(one_device(), phase(objective=Counting(where="loss")))
    for columns in (arrays(0), poisoned, arrays(1)):
        run.step(columns)
        told.append(int(host(run)["slots.objective"]))
    assert told == [1, 1, 2]


@dataclass(frozen=True)
class Drawing(NextToken):
    """Measures the mean and the mean square of a random number that each microbatch draws with its key."""

    def terms(self, model, batch, slot, *, key):
        terms, metrics, slot = super().terms(model, batch, slot, key=key)
        draw = jax.random.uniform(key)
        return terms, {**metrics, "draw": Sum(draw, jnp.ones(())), "square": Sum(draw**2, jnp.ones(()))}, slot


@pytest.mark.slow
def test_every_microbatch_has_a_key_of_its_own():
    measured = TinyRun(one_device(), phase(objective=Drawing())).step(arrays(0), 4)
    assert measured["train/square"] - measured["train/draw"] ** 2 > 1e-3  # the variance


def test_a_batch_without_targets_has_a_loss_of_0_and_is_not_skipped():
    run, columns = TinyRun(one_device()), arrays(0)
    columns["loss_mask"][:] = 0
    metrics = run.step(columns)
    assert (metrics["train/loss"], metrics["grad/norm/total"], metrics["train/skipped_steps"]) == (0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def single_device_losses():
    """The losses on one device, where nothing is sharded."""
    run = TinyRun(one_device())
    return [run.step(arrays(i))["train/loss"] for i in BATCHES]
