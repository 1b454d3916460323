"""`jaxlm.load(...)` against transformers: hidden states, logits, log-probabilities and texts; and its refusals."""

import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxlm
from jaxlm.core.errors import ConfigError
from tests.answers import write_model, write_tokenizer
from tests.interop.cases import FIRST, reference, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QUICK = ("gpt2", "llama-3")
# Blocks of another form, or embeddings of another scale. Of the other families, tests/interop/test_families.py has logits.
OWN_BLOCKS = ("olmo2", "granite", "glm4", "gpt_neox", "mpt", "gemma2", "mixtral")


def opened(name, folder):
    reference(name).save_pretrained(folder)
    write_tokenizer(folder)
    return jaxlm.load(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return opened("llama-3", tmp_path_factory.mktemp("llama"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow if name in OWN_BLOCKS else pytest.mark.soak)
        for name in FIRST.values()
    ],
)
def test_taps_are_transformers_hidden_states(name, tmp_path):
    """transformers returns the embedding, every layer's output but the last, and the final norm's output."""
    model = opened(name, tmp_path)
    rows = [row[:length] for row, length in zip(tokens(rows=3).tolist(), (48, 20, 3), strict=True)]
    num_layers = model.loaded.plan.config.model.num_layers
    taps = ["embedding", *(f"layer_{i}" for i in range(num_layers - 1)), "final"]
    found = model.hidden(rows, taps, batch_size=2)
    assert list(found) == taps
    for number, row in enumerate(rows):
        with torch.no_grad():
            states = reference(name)(torch.tensor([row]), output_hidden_states=True).hidden_states
        for tap, expected in zip(taps, states, strict=True):
            ours = found[tap][number]
            assert (ours.dtype, ours.shape) == (np.float32, tuple(expected[0].shape))
            np.testing.assert_allclose(
                ours, expected[0].numpy(), rtol=1e-4, atol=1e-4, err_msg=f"{tap} of row {number}"
            )


def test_the_last_layers_tap_is_the_final_norms_input(llama):
    """Llama's norm, in NumPy: x / rms(x) * weight."""
    states = llama.hidden([[5, 6, 7]], ["layer_1", "final"])
    x, norm = states["layer_1"][0].astype(np.float64), llama.model.body.final_norm
    rms = np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps)
    np.testing.assert_allclose(states["final"][0], x / rms * np.asarray(norm.weight.array), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_texts_are_tokenized_as_by_transformers_and_do_not_depend_on_their_batch(tmp_path):
    text, model = "The capital of France is Paris.", jaxlm.load(write_model(tmp_path / "model"))
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"]
    alone = model.hidden([text])["final"]
    assert len(alone) == 1
    np.testing.assert_allclose(alone[0], model.hidden([ids])["final"][0], rtol=1e-5, atol=1e-5)
    together = model.hidden(["What?", text, "a" * 90], batch_size=3)["final"]
    np.testing.assert_allclose(together[1], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_dtype_of_the_computation_is_a_key(tmp_path):
    reference("llama-3").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    exact, rounded = (jaxlm.load(tmp_path, keys={"trainer.mp": mp}) for mp in ("f32", "p=f32,c=bfloat16"))
    states = [model.hidden([[1, 2, 3]])["final"][0] for model in (exact, rounded)]
    assert [state.dtype for state in states] == [np.float32, np.float32]
    assert 1e-4 < np.abs(states[0] - states[1]).max() < 1.0


@pytest.mark.parametrize(
    ("texts", "options", "problem"),
    [
        ([[1], []], {}, r"text 1 has 0 tokens\. Expected 1 to 48"),
        ([[1] * 49], {}, r"text 0 has 49 tokens\. Expected 1 to 48"),
        ([[1, 61]], {}, r"text 0 has ids from 1 to 61. The vocabulary has 61 tokens"),
        (
            [[1]],
            {"taps": ["layer_9"]},
            r"taps: 'layer_9' given, but this model has: embedding, layer_0, layer_1, final",
        ),
        ([[1]], {"batch_size": 0}, r"batch_size: 0 given"),
        ("text", {}, r"hidden: the string 'text' given, but a list expected"),
        ([[1]], {"taps": "final"}, r"hidden: the string 'final' given, but a list expected"),
    ],
)
def test_impossible_requests_are_refused(llama, texts, options, problem):
    with pytest.raises(ConfigError, match=problem):
        llama.hidden(texts, **options)


def test_no_texts_give_no_arrays(llama):
    assert llama.hidden([]) == {"final": []}
    assert llama.logits([]) == llama.log_probs([]) == llama.generate([]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_logits_and_log_probs_are_those_of_transformers(name, tmp_path):
    model = opened(name, tmp_path)
    rows = [row[:length] for row, length in zip(tokens(rows=3).tolist(), (48, 20, 1), strict=True)]
    logits, log_probs = model.logits(rows, batch_size=2), model.log_probs(rows, batch_size=2)
    for row, ours, probabilities in zip(rows, logits, log_probs, strict=True):
        with torch.no_grad():
            expected = reference(name)(torch.tensor([row])).logits[0]
        assert (ours.dtype, ours.shape) == (np.float32, tuple(expected.shape))
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-4, atol=1e-4)
        following = torch.log_softmax(expected[:-1], -1)[range(len(row) - 1), row[1:]]
        assert (probabilities.dtype, probabilities.shape) == (np.float32, (len(row) - 1,))
        np.testing.assert_allclose(probabilities, following.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers(tmp_path):
    model = jaxlm.load(write_model(tmp_path / "model"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    prompts = ["What is the capital of France?", "Rome"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        new = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        expected.append(model.tokenizer.decode(new))
    assert model.generate(prompts, max_new_tokens=12, temperature=0.0) == expected
    stop = expected[0][2:4]
    cut = model.generate(prompts[:1], max_new_tokens=12, temperature=0.0, stop=[stop])
    assert cut == [expected[0].partition(stop)[0]]
    ids = [tokenizer(prompts[0])["input_ids"]]
    assert model.generate(ids, max_new_tokens=12, temperature=0.0) == expected[:1]
    assert model.generate(prompts[0], max_new_tokens=12, temperature=0.0) == expected[0], "a string for a string"
    long = (ids[0] * 100)[: theirs.config.max_position_embeddings - 12]
    new = theirs.generate(torch.tensor([long]), max_new_tokens=12, do_sample=False)[0, len(long) :].tolist()
    assert model.generate([long], temperature=0.0) == [model.tokenizer.decode(new)], "as many as fit"
    with pytest.raises(ConfigError, match="stop: 'x' given"):
        model.generate(["x"], stop="x")
    assert repr(model).startswith(f"InferenceModel('{tmp_path / 'model'}': llama, ")
    assert f"{theirs.num_parameters():,} parameters, " in repr(model)


def test_importing_jaxlm_does_not_import_jax():
    code = (
        "import sys, jaxlm; jaxlm.load, jaxlm.read_config;"
        " assert not {'jax', 'numpy', 'equinox'} & sys.modules.keys(), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint found"):
        jaxlm.load(tmp_path / "missing")


MESHES = {
    "tensor parallelism": {"trainer.model_axis_size": 2, "trainer.tensor_parallel_axes": ["heads", "mlp"]},
    "all parameters everywhere": {"trainer.fsdp_axis": None},
    "a mesh of its own": {
        "trainer.mesh": {"axes": {"data": 2, "model": 4}},
        "trainer.axis_resources": {"mlp": "model"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_model_lies_on_the_mesh_that_is_asked_for(name, tmp_path):
    """On eight devices: the parameters are sharded as asked, and the numbers are those of the usual layout."""
    assert jax.device_count() == 8
    usual = jaxlm.load(write_model(tmp_path / "model", num_key_value_heads=4))
    asked = jaxlm.load(tmp_path / "model", keys=MESHES[name])
    up, usual_up = (m.model.body.layers.stacked.mlp.up_proj.weight for m in (asked, usual))
    size = dict(zip((axis.name for axis in up.axes), up.array.sharding.shard_shape(up.array.shape), strict=True))
    expected = {
        "tensor parallelism": {"embed": 32 // 4, "mlp": 48 // 2},
        "all parameters everywhere": {"embed": 32, "mlp": 48},
        "a mesh of its own": {"embed": 32 // 2, "mlp": 48 // 4},
    }
    assert {axis: size[axis] for axis in ("embed", "mlp")} == expected[name]
    assert usual_up.array.sharding != up.array.sharding
    texts = ["The capital of France is", "Rome", "The"]
    for ours, theirs in zip(asked.logits(texts), usual.logits(texts), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 6, "temperature": 0.0}
    assert asked.generate(texts, **options) == usual.generate(texts, **options)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_model_lies_on_the_devices_that_are_asked_for(count, tmp_path):
    devices = jax.devices()[8 - count :]
    model = jaxlm.load(write_model(tmp_path / "model"), devices=devices)
    arrays = [leaf for leaf in jax.tree.leaves(model.model) if isinstance(leaf, jax.Array)]
    assert all(array.devices() == set(devices) for array in arrays)
    texts = ["The capital of France is", "Rome"]
    (ours, _), ids = model.logits(texts), model.tokenizer.encode(texts[0])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor([ids])).logits[0].numpy(), rtol=1e-4, atol=1e-4)
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :]
    assert model.generate(texts, max_new_tokens=6, temperature=0.0)[0] == model.tokenizer.decode(expected.tolist())
    with pytest.raises(ConfigError, match="devices: an empty list given"):
        jaxlm.load(tmp_path / "model", devices=[])
