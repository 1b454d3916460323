"""Lookup layers against the paper's algorithm, a transcription in torch, nanochat's counts, one device, and a full pass."""

import dataclasses
import functools
import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.commands.prepare import prepare
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.tracing import tracing
from jaxlm.models.base import token_leaves, vocab_axis
from jaxlm.models.inference.unstacked import unstack
from jaxlm.observe.console import Console
from jaxlm.plan.load_config import read_config
from jaxlm.plan.plan import make_plan
from jaxlm.session.leaves_from_tokens import leaves_from_tokens
from jaxlm.systems.nanochat.lookup import LookupConfig, Scores, allocate, attend_to_entries, codeword_ends
from jaxlm.systems.nanochat.model import NanoConfig, nanochat_flops_per_token, num_lookup_entries, parameter_counts
from tests.data.helpers import write_corpus
from tests.engine import helpers
from tests.systems.nanochat.test_nano import (
    LAYOUTS,
    TINY,
    ids,
    imported,
    layout_of,
    loss_of,
    whole_and_part,
    with_random_weights,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "nanochat_lookup.json").read_text())
VOCAB = 64


def uniform(tensor: int, size: int) -> np.ndarray:
    """The numbers in [0, 1) of the vectors: a hash of their index."""
    z = (np.arange(size, dtype=np.uint64) + np.uint64(tensor << 32)) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def sequences_of(name: str) -> list[np.ndarray]:
    if name == "small":
        return [np.array(sequence) for sequence in VECTORS["small"]["seqs"]]
    return [np.floor(64 * uniform(tensor, 256) ** 2).astype(int) for tensor in range(30, 34)]


@pytest.mark.parametrize("name", ["small", "large"])
def test_allocations_are_those_of_the_paper_and_of_nanochat(name):
    want = VECTORS[name]
    sizes = want["vocab"], want["n_emb"], want["k_max"]
    assert allocate("lzw", sequences_of(name), *sizes).tolist() == want["paper_lzw"]
    assert allocate("nanochat", sequences_of(name), *sizes).tolist() == want["seed"]
    even = allocate("uniform", [], *sizes)
    assert (even.sum(), even.max() - even.min()) == (want["n_emb"], int(want["n_emb"] % want["vocab"] > 0))


def scanned(sequences: list[list[int]], vocab_size: int) -> list[int]:
    """The last tokens of the codewords, by a scan that looks up every codeword as a whole."""
    counts = {(token,): 0 for token in range(vocab_size)}
    for tokens in sequences:
        begin = 0
        while begin + 1 < len(tokens):
            end = begin + 1
            while end < len(tokens) and tuple(tokens[begin:end]) in counts:
                end += 1
            counts[tuple(tokens[begin : end - 1])] += 1
            counts[tuple(tokens[begin:end])] = 1
            begin = end
    return [word[-1] for word in sorted(counts, key=lambda word: -counts[word])]


def test_the_scan_is_that_of_whole_codewords():
    rng = np.random.default_rng(0)
    lengths = [0, 1, 2, 3, 700, 5, 700]
    sequences = [np.minimum(rng.geometric(0.4, size) - 1, 4) for size in lengths]
    assert codeword_ends(sequences, 5).tolist() == scanned([s.tolist() for s in sequences], 5)


def test_uniform_tables_may_be_of_any_size():
    config = dataclasses.replace(TINY, lookup=LookupConfig(layers=[1], allocation="uniform", num_entries=300 * 600 + 1))
    config.check()
    assert token_leaves(config, 300) is None
    model = jax.eval_shape(lambda: config.build(vocab_axis(300), key=jax.random.key(0)))
    assert model.body.lookups[0].scores.max_entries == 601  # more than the default of max_entries


def test_no_token_gets_more_than_allowed():
    """A small sample has too few codewords: the list is gone through again, until the table is full."""
    sample = [np.zeros(500, int)]  # one token only
    assert allocate("lzw", sample, 4, 20, 16).tolist() == [16, 2, 1, 1]
    entries = allocate("lzw", sequences_of("small"), 16, 16 * 30 - 3, 30)
    assert (entries.sum(), entries.max()) == (16 * 30 - 3, 30)
    assert allocate("lzw", [], 16, 16 * 30, 30).tolist() == [30] * 16


def model_of(depth: int, **changes) -> NanoConfig:
    width = 128 * -(-depth * 64 // 128)
    lookup = LookupConfig([depth // 2], **changes)
    return NanoConfig(hidden_dim=width, num_layers=depth, num_heads=width // 128, lookup=lookup)


@pytest.mark.parametrize("name", VECTORS["models"])
def test_counts_are_nanochats(name):
    want, config = VECTORS["models"][name], model_of(int(name[1:]))
    counts = parameter_counts(config, 32_768)
    assert num_lookup_entries(config, 32_768) == want["l3_n_emb_auto"]
    assert dataclasses.asdict(counts) | {"total": counts.total} == want["param_counts"]
    assert counts.scaling == want["scaling_params"]
    assert nanochat_flops_per_token(config, 32_768) == want["flops_per_token_seed"]
    model = jax.eval_shape(lambda: config.build(vocab_axis(32_768), key=jax.random.key(0)))
    assert tree.num_parameters(model) == counts.total
    plain = dataclasses.replace(config, lookup=None).flops_per_token(32_768)
    reads = 12 * config.hidden_dim * want["l3_n_emb_auto"] / 32_768
    more = 6 * want["param_counts"]["l3_matrices"] + reads
    assert config.flops_per_token(32_768).causal - plain.causal == pytest.approx(more, rel=1e-9)
    untied = model_of(int(name[1:]), tied=False, num_entries=40_000)
    assert parameter_counts(untied, 32_768).l3_embeds == 2 * 40_000 * config.hidden_dim


@pytest.mark.parametrize(
    ("lookup", "message"),
    [
        ({"layers": []}, r"model\.lookup\.layers: \[\] given, different numbers of layers expected, such as \[4\]"),
        ({"layers": [1, 1]}, r"model\.lookup\.layers: \[1, 1\] given, different numbers"),
        ({"layers": [8]}, r"model\.lookup\.layers: \[8\] given, 0 to 7 expected \(num_layers - 1\)"),
        ({"layers": [-1]}, r"model\.lookup\.layers\.0: -1 given, an integer of 0 or more expected"),
        (
            {"layers": [1], "allocation": "lz77"},
            r"model\.lookup\.allocation: 'lz77' given, 'lzw' or 'nanochat' or 'uniform'",
        ),
        (
            {"layers": [1], "num_entries": 299},
            r"model\.lookup\.num_entries: 299 given, but each of the 300 tokens needs",
        ),
        (
            {"layers": [1], "num_entries": 701, "max_entries": 2},
            r"model\.lookup\.max_entries: 2 given, so 300 tokens have at most 600 entries, but the table has 701\. Raise",
        ),
        (
            {"layers": [1], "allocation": "uniform", "max_entries": 2},
            r"model\.lookup\.max_entries: 2 given without allocation: lzw or nanochat, but allocation is uniform\.",
        ),
        (
            {"layers": [1], "allocation": "uniform", "sample_tokens": 160},
            r"model\.lookup\.sample_tokens: 160 given without allocation: lzw or nanochat, but allocation is uniform",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(lookup, message):
    config = dataclasses.replace(TINY, lookup=LookupConfig(**lookup))

    def checked():
        config.check()
        token_leaves(config, 300)

    with pytest.raises(ConfigError, match=message):
        checked()


# --- What a token reads ----------------------------------------------------------------------------------------------


def read_in_torch(torch, scores: Scores, q, tokens, entries, keys, values):
    """Token by token."""
    bounds, read = np.cumsum([0, *entries]), []
    for token, query in zip(tokens.tolist(), q, strict=True):
        own = slice(int(bounds[token]), int(bounds[token + 1]))
        k = keys[own]
        if scores.key_epsilon is not None:
            k = k / torch.sqrt((k * k).mean(-1, keepdim=True) + scores.key_epsilon)
        read.append((scores.scale * k @ query).softmax(0) @ values[own])
    return torch.stack(read)


CASES = {"tied": (True, None, 1.0), "untied": (False, 1e-6, 0.3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_tokens_read_and_every_gradient_are_those_of_a_loop(name):
    """Several chunks of tokens, several blocks of entries, tokens with no entry; float64 against float32."""
    torch = pytest.importorskip("torch")
    tied, epsilon, scale = CASES[name]
    rng = np.random.default_rng(0)
    entries = rng.integers(1, 41, 50)
    entries[[3, 30]] = 0, 40
    scores, tokens = Scores(scale, epsilon, 40), np.minimum(rng.geometric(0.06, 600) - 1, 49)
    q, out = rng.normal(0, 1, (600, 12)), rng.normal(0, 1, (600, 12))
    tables = [rng.normal(0, 1, (entries.sum(), 12)) for _ in range(1 if tied else 2)]
    exact = [torch.tensor(array, requires_grad=True) for array in (q, *tables)]
    theirs = read_in_torch(torch, scores, exact[0], tokens, entries, exact[1], exact[-1])
    assert not theirs[tokens == 3].any()
    (theirs * torch.tensor(out)).sum().backward()

    bounds = jnp.asarray(np.cumsum([0, *entries]), jnp.int32)
    arrays = [jnp.asarray(array, jnp.float32) for array in (q, *tables)]

    def read(q, keys, values=None):
        return attend_to_entries(scores, q, jnp.asarray(tokens), bounds, keys, values)

    def gradients(*arrays):
        found, pull = jax.vjp(read, *arrays)
        return found, *pull(jnp.asarray(out, jnp.float32))

    expected = [theirs.detach(), *(array.grad for array in exact)]
    for found, want in zip(jax.jit(gradients)(*arrays), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=2e-5)
    with tracing(twice_differentiable=True):
        for found, want in zip(jax.jit(gradients)(*arrays), expected, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_most_entries_of_a_token():
    """Padding all tokens to 512 entries would take 512 MiB. The gradient of the table is 4 MiB."""
    scores, axes = Scores(1.0, None, 512), {"q": (4096, 64), "table": (16_384, 64)}
    q, table = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in axes.values())
    ints = jax.ShapeDtypeStruct((4096,), jnp.int32), jax.ShapeDtypeStruct((1001,), jnp.int32)
    loss = lambda q, table, ids, bounds: attend_to_entries(scores, q, ids, bounds, table, None).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(q, table, *ints).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 32 * 2**20


# --- In the model -----------------------------------------------------------------------------------------------------

ENTRIES = tuple(np.random.default_rng(7).integers(1, 24, VOCAB).tolist())


def split(model):
    """What is trained, and the rest."""
    return tree.partition(model, tree.map_leaves(lambda _, leaf: tree.is_inexact(leaf), model))


def references():
    from tests.systems.nanochat.nano_reference import EARLY, LATE

    changed = functools.partial(dataclasses.replace, entries=ENTRIES)
    return {
        "as in nanochat": changed(EARLY, lookups=(1,)),
        "untied": changed(EARLY, lookups=(0, 3), tied=False),
        "normalized keys, with backout": changed(LATE, lookups=(2,), key_norm=True, lookup_scale=0.125),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "as in nanochat",
        "normalized keys, with backout",
        pytest.param("untied", marks=pytest.mark.soak),
    ],
)
def test_logits_loss_and_every_gradient_are_those_of_torch(name, as_inputs, logits_of):
    torch = pytest.importorskip("torch")
    reference = references()[name]
    config, arrays = reference.config(), reference.weights()
    tokens = ids(vocab=VOCAB)
    targets = np.where(ids(1, vocab=VOCAB) < 3, -1, np.roll(tokens, -1, 1))
    weights = {key: torch.tensor(array, requires_grad=True) for key, array in arrays.items()}
    logits = reference.logits(weights, torch.tensor(tokens))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-1)
    expected.backward()
    model = imported(config, arrays | reference.bounds)
    np.testing.assert_allclose(logits_of(model, as_inputs(tokens)), logits.detach(), rtol=1e-4, atol=2e-5)
    trained, rest = split(model)
    loss = loss_of(config, lambda part: eqx.combine(part, rest, is_leaf=tree.is_named))
    value, gradient = loss(trained, as_inputs(tokens), jnp.asarray(targets))
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    grads = imported(config, {key: np.asarray(weight.grad) for key, weight in weights.items()} | reference.bounds)
    for (path, ours), (_, theirs) in zip(tree.leaves(gradient), tree.leaves(split(grads)[0]), strict=True):
        scale = float(jnp.abs(theirs.array).max())
        assert scale > 0, path
        np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-4, atol=1e-4 * scale, err_msg=path)


LOOKUP = LookupConfig([1, 5], num_entries=200, mlp_dim=48, tied=False)


def with_bounds(model, vocab: int = 40):
    """The same model, whose random numbers are no bounds: entries by the order of the tokens."""
    bounds = np.cumsum([0, *([200 - 2 * (vocab - 1)] + [2] * (vocab - 1))]).astype(np.int32)
    given = lambda path, leaf: hax.named(jnp.asarray(bounds), leaf.axes) if path.endswith("bounds") else leaf  # noqa: E731
    return tree.map_leaves(given, model)


@pytest.mark.slow
def test_decoding_with_a_cache_is_the_full_forward_pass(built, as_inputs):
    """Token by token after a prompt, in the stacked and in the unstacked form."""
    config = dataclasses.replace(TINY, num_layers=6, short_window_fraction=3 / 16, lookup=LOOKUP)
    model, (whole, part) = with_bounds(built(config)), whole_and_part(as_inputs)
    step = jax.jit(lambda model, inputs, cache: model.hidden(inputs, cache=cache))
    expected = step(model, whole, None).final
    prompt = step(model, part(slice(0, 8)), model.init_cache(Axis("batch", 2), 16, jnp.float32))
    np.testing.assert_allclose(prompt.final["position", 5:8].array, expected["position", 5:8].array, atol=2e-5)
    unstacked, apart = unstack((model, prompt.cache))
    stacked = prompt.cache
    for at in range(8, 14):
        later = expected["position", at : at + 1].array
        one = part(slice(at, at + 1))
        found = step(model, one, stacked), step(unstacked, one, apart)
        for each in found:
            np.testing.assert_allclose(each.final.array, later, rtol=2e-5, atol=2e-5)
        stacked, apart = (each.cache for each in found)


@pytest.mark.slow
def test_taps_after_a_lookup_layer_contain_what_it_adds(built, as_inputs):
    """Backout also subtracts it with the middle layer, with or without a tap there."""
    config = dataclasses.replace(TINY, num_layers=4, lookup=dataclasses.replace(LOOKUP, layers=[2]))
    model, inputs = with_bounds(built(config)), as_inputs(ids())
    run = jax.jit(lambda model, taps: model.hidden(inputs, taps=taps), static_argnums=1)
    every, none = run(model, ("layer_1", "layer_2", "layer_3", "final")), run(model, ())
    np.testing.assert_allclose(every.final.array, none.final.array, rtol=1e-5, atol=1e-5)
    last = every.taps["layer_3"] - model.backout_lambda * every.taps["layer_2"]
    normalized = last.array / np.sqrt(np.mean(np.square(last.array), -1, keepdims=True) + 1.1920929e-7)
    np.testing.assert_allclose(every.final.array, normalized, rtol=1e-4, atol=1e-5)
    silent = eqx.tree_at(lambda m: m.body.lookups[0].mix_proj.weight, model, replace_fn=lambda w: w * 0)
    without = run(silent, ("layer_2",)).taps["layer_2"]
    added = model.body.lookups[0](without, inputs.tokens)
    np.testing.assert_allclose((without + added).array, every.taps["layer_2"].array, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_new_lookup_layer_changes_nothing():
    """Its last matrix is zero, and all other parameters are as without it."""
    config = dataclasses.replace(TINY, num_layers=1)
    build = jax.jit(lambda key, config: config.build(vocab_axis(40), key=key), static_argnums=1)
    plain, with_lookup = (
        build(jax.random.key(3), dataclasses.replace(config, lookup=lookup))
        for lookup in (None, dataclasses.replace(LOOKUP, layers=[0]))
    )
    layer, others = with_lookup.body.lookups[0], dict(tree.leaves(with_lookup))
    for path, leaf in tree.leaves(plain):
        np.testing.assert_array_equal(leaf.array, others[path].array, err_msg=path)
    assert not jnp.any(layer.mix_proj.weight.array)
    assert float(jnp.std(layer.keys_embedding.array)) == pytest.approx(1, rel=0.05)
    assert float(jnp.abs(layer.up_proj.weight.array).max()) == pytest.approx((3 / 32) ** 0.5, rel=0.02)
    assert not jnp.any(layer.keys_embedding.array == layer.values_embedding.array)


EIGHT = dataclasses.replace(
    TINY, hidden_dim=64, num_layers=4, window_pattern="SL", lookup=LookupConfig([1], num_entries=400, tied=False)
)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tp 2 x fsdp 4", "fsdp 8"])
def test_training_on_eight_devices_is_the_training_of_one(name):
    bounds = {"body.lookups.0.bounds": np.cumsum([0, 400 - 3 * (VOCAB - 1), *[3] * (VOCAB - 1)]).astype(np.int32)}
    runs = []
    for place in (helpers.one_device(), layout_of(EIGHT, LAYOUTS[name])):
        run = with_random_weights(helpers.TinyRun(place, model=EIGHT))
        runs.append(run)
        given = run.state_builder.with_token_leaves(bounds).token_leaves
        put = lambda path, leaf, given=given: (  # noqa: E731
            hax.named(jax.device_put(given[path], leaf.array.sharding), leaf.axes) if path in given else leaf
        )
        run.state = dataclasses.replace(run.state, model=tree.map_leaves(put, run.state.model))
    for step in range(3):
        found = [run.step(helpers.arrays(step)) for run in runs]
        for metric in ("train/loss", "grad/norm/total"):
            assert found[1][metric] == pytest.approx(found[0][metric], rel=2e-5), (step, metric)
    table = runs[1].state.model.body.lookups[0].keys_embedding
    assert table.array.addressable_shards[0].data.size * (4 if LAYOUTS[name] else 8) == table.array.size
    for (path, ours), (_, theirs) in zip(*(tree.leaves(run.state.model) for run in runs), strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-3, atol=1e-4, err_msg=path)
        assert not path.endswith("bounds") or np.array_equal(ours.array, bounds[path])


# --- From the training tokens -----------------------------------------------------------------------------------------

RUN = """
data: {{train_urls: [{text}], validation_urls: [{text}/b0.txt], cache_dir: {cache}, vocab_size: 300}}
model:
  {{type: nano, seq_len: 16, hidden_dim: 32, num_layers: 2, num_heads: 2, lookup: {{layers: [0, 1], num_entries: 900}}}}
trainer: {{train_batch_size: 8, num_train_steps: 2, log_dir: {cache}/logs}}
"""


@pytest.mark.slow
def test_prepare_computes_the_tables_once(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(text=tmp_path / "text", cache=tmp_path / "cache"))
    config, lines = read_config(path), []
    monkeypatch.setattr(Console, "log", lambda _, text: lines.append(text))
    tokenizer, prepared = prepare(config, Console())
    assert sum("computing body.lookups.0.bounds, body.lookups.1.bounds from" in line for line in lines) == 1
    (file,) = (tmp_path / "cache" / "derived").glob("*/body.lookups.0.bounds.npy")
    plan = make_plan(config, "x", tokenizer.vocab_size)
    lines.clear()
    bounds = leaves_from_tokens(plan, tokenizer, lines.append)
    assert not any("computing" in line for line in lines)

    # The whole training split is less than the sample: every sequence of the cache is in it.
    cache = prepared[0].data.train[""].cache
    tokens = cache.read(np.array([0]), cache.num_tokens)[0]
    size = len(prepared[0].data.train[""])
    entries = allocate("lzw", [tokens[16 * n : 16 * n + 16] for n in range(size)], tokenizer.vocab_size, 900, 512)
    assert set(bounds) == {"body.lookups.0.bounds", "body.lookups.1.bounds"}
    for array in bounds.values():
        assert (array.dtype, array[0], array[-1]) == (np.int32, 0, 900)
        np.testing.assert_array_equal(np.diff(array), entries)
    assert entries.max() > 3 * np.median(entries)
    model = plan.with_token_leaves(bounds).state_builder.initial_model()
    np.testing.assert_array_equal(model.body.lookups[1].bounds.array, bounds["body.lookups.1.bounds"])

    file.write_bytes(file.read_bytes()[:200])  # damaged: computed again, from the same tokens
    again = leaves_from_tokens(plan, tokenizer, lines.append)
    assert any("computing" in line for line in lines)
    np.testing.assert_array_equal(again["body.lookups.0.bounds"], bounds["body.lookups.0.bounds"])

    lookup = dataclasses.replace(config.model.lookup, sample_tokens=160)
    fewer = dataclasses.replace(config, model=dataclasses.replace(config.model, lookup=lookup))
    small = leaves_from_tokens(make_plan(fewer, "x", tokenizer.vocab_size), tokenizer, lines.append)
    assert any("from 160 training tokens" in line for line in lines)
    starts = np.arange(10) * size // 10 * 16
    entries = allocate("lzw", list(cache.read(starts, 16)), tokenizer.vocab_size, 900, 512)
    np.testing.assert_array_equal(np.diff(small["body.lookups.0.bounds"]), entries)

    # Only the first sequences are trained on: two batches of eight.
    data = dataclasses.replace(config.data, max_train_batches=2)
    first = dataclasses.replace(config, data=data)
    few = leaves_from_tokens(make_plan(first, "x", tokenizer.vocab_size), tokenizer, lines.append)
    assert any("from 256 training tokens" in line for line in lines)
    entries = allocate("lzw", list(cache.read(np.arange(16) * 16, 16)), tokenizer.vocab_size, 900, 512)
    np.testing.assert_array_equal(np.diff(few["body.lookups.0.bounds"]), entries)

    lines.clear()  # a run that loads its weights reads none of this
    (tmp_path / "cache" / "derived").rename(tmp_path / "away")
    prepare(dataclasses.replace(config, initialize_from_hf="someone/model"), Console())
    assert not any("computing" in line for line in lines)
