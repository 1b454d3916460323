"""nanochat's checkpoint files: read as its code reads them, written as it writes them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.pretrained import load_pretrained, open_pretrained, with_hf_model
from jaxlm.models.base import vocab_axis
from jaxlm.plan.load_config import decode_run
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.dry_run import assumed_vocabulary
from jaxlm.systems.nanochat.lookup import LookupConfig
from jaxlm.systems.nanochat.model import NanoConfig
from jaxlm.systems.nanochat.torch_checkpoint import save_nanochat
from tests.engine.helpers import layout, one_device
from tests.interop.cases import inputs_of, logits_of

torch = pytest.importorskip("torch")

from tests.systems.nanochat.nano_reference import EARLY, LATE  # noqa: E402 - imports torch

ENTRIES = (3,) * 20 + (1,) * 40 + (17,)
# 61 tokens, so that tables have three rows of padding; windows as the two revisions compute them from the length.
REVISIONS = {
    "early": dataclasses.replace(EARLY, vocab=61, num_layers=3, kv_heads=1),
    "late": dataclasses.replace(LATE, vocab=61, num_layers=3),
    "lookup": dataclasses.replace(EARLY, vocab=61, num_layers=3, lookups=(0, 2), entries=ENTRIES),
    "untied lookup": dataclasses.replace(EARLY, vocab=61, num_layers=3, lookups=(1,), entries=ENTRIES, tied=False),
}


def lookup_keys(reference):
    """The keys of lookup layers in `model_config`, if the model has any."""
    if not reference.lookups:
        return {}
    keys = {"l3_after_layers": ",".join(map(str, reference.lookups)), "l3_n_emb": sum(reference.entries)}
    return keys | {"l3_d_up": 48, "l3_k_max": max(reference.entries), "l3_tie_kv": reference.tied}


def written(folder, reference, *, prefix="", step=7, changes=None):
    """The files of a run of nanochat, and its weights."""
    weights = {name: torch.tensor(array, dtype=torch.float32) for name, array in reference.weights().items()}
    weights = {
        name: tensor.bfloat16() if "wte" in name or "value_embeds" in name else tensor
        for name, tensor in weights.items()
    } | {name: torch.tensor(array) for name, array in reference.bounds.items()}
    folder.mkdir(exist_ok=True)
    torch.save({f"{prefix}{name}": tensor for name, tensor in weights.items()}, folder / f"model_{step:06d}.pt")
    sizes = {"sequence_len": reference.length, "vocab_size": reference.vocab, "n_layer": reference.num_layers}
    sizes |= {"n_head": reference.heads, "n_kv_head": reference.kv_heads, "n_embd": reference.width}
    sizes |= {"window_pattern": reference.pattern, **lookup_keys(reference)}
    meta = {"step": step, "model_config": {**sizes, **(changes or {})}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    return weights


def loaded(path, config=None, where=None, vocab=61):
    config = config or open_pretrained(path).config
    abstract = jax.eval_shape(lambda: config.build(vocab_axis(vocab), key=jax.random.key(0)))
    return load_pretrained(path, abstract, config, where or one_device())


@pytest.mark.slow
@pytest.mark.parametrize("name", REVISIONS)
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_run_of_nanochat_is_read(name, prefix, tmp_path):
    """The newest weights of the folder; those of a compiled model have a prefix."""
    reference = REVISIONS[name]
    written(tmp_path, dataclasses.replace(reference, vocab=64), step=5)
    weights = written(tmp_path, reference, prefix=prefix, step=12)
    opened = open_pretrained(tmp_path)
    assert opened.vocab_size == 61
    sections = {"initialize_from_hf": str(tmp_path), "data": {"tokenizer": "not-here-yet"}}
    assert assumed_vocabulary(decode_run(ConfigSource(sections), None))[0] == 61
    assert opened.config.window_distances == reference.config().window_distances or name == "late"
    assert (opened.config.smear_channels, opened.config.qk_scale) == ((24, 1.2) if name == "late" else (0, 1.0))
    tokens = np.random.default_rng(0).integers(0, 61, (2, 16))
    exact = dataclasses.replace(reference, rounds_rope=True)
    with torch.no_grad():
        exact_weights = {key: value.double() for key, value in weights.items()}
        expected = exact.logits(exact_weights, torch.tensor(tokens)).numpy()
    np.testing.assert_allclose(logits_of(loaded(tmp_path), inputs_of(tokens)), expected, rtol=1e-4, atol=1e-4)
    again = loaded(tmp_path / "model_000012.pt")
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(loaded(tmp_path)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_weights_that_are_not_finite_are_refused_with_their_tensor(tmp_path):
    weights = written(tmp_path, REVISIONS["late"], step=7)
    name = next(name for name in weights if "mlp" in name)
    weights[name].view(-1)[3] = torch.nan
    torch.save(weights, tmp_path / "model_000007.pt")
    with pytest.raises(ConfigError, match=rf"model_000007\.pt: '{name}' has NaN or infinity as float32\."):
        loaded(tmp_path)


@pytest.mark.parametrize("name", REVISIONS)
def test_what_is_written_is_what_was_read(name, tmp_path):
    """Every tensor of nanochat, bit by bit; the rows that pad the vocabulary are zeros."""
    reference = REVISIONS[name]
    absent = {} if reference.lookups else {"l3_after_layers": "", "l3_n_emb": 0}
    weights = written(tmp_path / "theirs", reference, changes=absent)
    config = open_pretrained(tmp_path / "theirs").config
    save_nanochat(tmp_path / "ours", loaded(tmp_path / "theirs"), config, one_device(), step=7)
    found = torch.load(tmp_path / "ours" / "model_000007.pt", weights_only=True)
    assert found.keys() == weights.keys()
    for key, tensor in found.items():
        assert tensor.shape == weights[key].shape
        is_table = tensor.shape[0] == 64 and key.startswith(("transformer.wte", "lm_head", "value_embeds"))
        rows = 61 if is_table else len(tensor)
        theirs = weights[key][:rows]
        torch.testing.assert_close(
            tensor[:rows], theirs.float() if theirs.is_floating_point() else theirs, rtol=0, atol=0
        )
        assert not tensor[rows:].any()
    meta, theirs = (json.loads((tmp_path / of / "meta_000007.json").read_text()) for of in ("ours", "theirs"))
    assert meta["model_config"].items() <= theirs["model_config"].items()
    assert meta["step"] == 7
    assert open_pretrained(tmp_path / "ours").config == config


@pytest.mark.slow
def test_a_sharded_model_reads_and_writes_the_same_files(tmp_path):
    reference = dataclasses.replace(LATE, num_layers=4)
    written(tmp_path / "theirs", reference)
    config, where = open_pretrained(tmp_path / "theirs").config, layout(model=2)
    model = loaded(tmp_path / "theirs", where=where, vocab=64)
    with where.use():
        save_nanochat(tmp_path / "ours", model, config, where, step=7)
    again = loaded(tmp_path / "ours", vocab=64)
    for (path, ours), (_, theirs) in zip(tree.leaves(again), tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours.array, theirs.array, err_msg=path)


def test_the_model_section_comes_from_the_files(tmp_path):
    written(tmp_path, REVISIONS["late"])
    given = {"use_hf_model_config": True, "initialize_from_hf": str(tmp_path), "model": {"attn_backend": "reference"}}
    section = with_hf_model({**given, "data": {"tokenizer": "mine"}})["model"]
    assert (section["type"], section["hidden_dim"], section["attn_backend"]) == ("nano", 64, "reference")
    assert section["rope"]["theta"] == 100_000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l3_after_layers": "1"}, r"integers in l3_n_emb, l3_d_up and l3_k_max expected, '1' and {'n_emb': None"),
        (
            {"l3_after_layers": "4", "l3_n_emb": 64, "l3_d_up": 0, "l3_k_max": 8},
            r"model\.lookup\.layers: \[4\] given, 0 to 3 expected",
        ),
        ({"n_embd": "wide"}, r"model_config with the integers vocab_size, .*, n_embd expected"),
        ({"window_pattern": "XL"}, r"model\.window_pattern: 'XL' given"),
    ],
)
def test_other_models_of_nanochat_are_refused(changes, message, tmp_path):
    written(tmp_path, EARLY, changes=changes)
    with pytest.raises(ConfigError, match=message):
        open_pretrained(tmp_path)


def test_a_revision_between_the_two_is_refused(tmp_path):
    written(tmp_path, dataclasses.replace(EARLY, gate_channels=12))
    with pytest.raises(ConfigError, match=r"gates with \[12\] inputs, and no smear gate\. Supported: nanochat of Feb"):
        open_pretrained(tmp_path)


def test_files_that_do_not_fit_the_run_are_refused(tmp_path):
    written(tmp_path, REVISIONS["early"])
    llama = LlamaConfig(seq_len=16, hidden_dim=64, intermediate_dim=64, num_layers=2, num_heads=2)
    with pytest.raises(ConfigError, match=r"model\.type: LlamaConfig given, but .* contains a model of nanochat"):
        loaded(tmp_path, llama)
    with pytest.raises(ConfigError, match=r"a vocabulary of 61 tokens in meta_000007\.json, but the tokenizer has 60"):
        loaded(tmp_path, vocab=60)
    deeper = dataclasses.replace(open_pretrained(tmp_path).config, num_layers=5)
    with pytest.raises(ConfigError, match=r"transformer\.h\.4\.attn\.c_q\.weight: missing"):
        loaded(tmp_path, deeper)


@pytest.mark.slow
def test_a_model_that_nanochat_cannot_compute_is_not_written(tmp_path):
    config = NanoConfig(seq_len=16, hidden_dim=64, num_layers=2, num_heads=2, qk_scale=1.1, mlp_scale=2, backout=0.1)
    model = config.build(vocab_axis(64), key=jax.random.key(0))
    message = (
        r"model\.mlp_scale: 2 given, 4 expected\n  model\.qk_scale: 1\.1 given, 1\.0 expected\n  model\.backout: 0\.1"
    )
    with pytest.raises(ConfigError, match=message):
        save_nanochat(tmp_path / "x", model, config, one_device(), step=1)
    assert not (tmp_path / "x").exists()
    config = NanoConfig(seq_len=16, hidden_dim=64, num_layers=2, num_heads=2, lookup=LookupConfig([0]))
    model = jax.eval_shape(lambda: config.build(vocab_axis(64), key=jax.random.key(0)))
    message = (
        r"model\.lookup\.key_norm: True given, False expected\n  model\.lookup\.score_scale: None given, 1\.0 expected"
    )
    with pytest.raises(ConfigError, match=message):
        save_nanochat(tmp_path / "x", model, config, one_device(), step=1)
    llama = LlamaConfig(seq_len=16, hidden_dim=64, intermediate_dim=64, num_layers=2, num_heads=2)
    with pytest.raises(ConfigError, match=r"LlamaConfig given, but nanochat has only models of type nano"):
        save_nanochat(tmp_path / "x", llama.build(vocab_axis(8), key=jax.random.key(0)), llama, one_device(), step=1)
    assert jnp.issubdtype(model.tokens.weight.dtype, jnp.floating)
