"""config.json files in which several places describe one thing: jaxlm follows the one that transformers follows."""

import json

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import config_from_json
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.form import form_of_json
from tests.engine.helpers import one_device
from tests.interop.cases import FIRST, abstract_of, inputs_of, logits_of, tokens
from tests.interop.wild import as_read, content_of, logits_of_transformers, opened

FULL, LOCAL = "full_attention", "sliding_attention"
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
TWO_TYPES = {"type": "linear", "rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BY_KIND = {FULL: {**YARN, "rope_theta": 50.0}, LOCAL: {"rope_type": "default", "rope_theta": 20.0}}
# name -> (keys, families; None means all that have rotary embeddings of one kind)
# Ministral 3 in transformers needs YaRN. Mistral 4 cannot run there with both: it loses the part of a head that is rotated.
_OTHERS = {"gpt2", "mpt", "gemma3_text", "olmo3", "phi3", "ministral3", "mistral4", "gemma4_text", "dba"}
ONE = sorted(set(FIRST) - _OTHERS)
TWO = ["gemma3_text", "olmo3"]
WILD = {
    "both": ({"rope_parameters": DEFAULT, "rope_scaling": LINEAR}, ONE),
    "both, one yarn": ({"rope_parameters": {**YARN, "rope_theta": 500.0}, "rope_scaling": LINEAR}, ONE),
    "theta outside": ({"rope_parameters": DEFAULT, "rope_theta": 77.0}, ["llama", "olmo3"]),
    "only theta outside": ({"rope_scaling": LINEAR, "rope_theta": 77.0}, ["llama", "olmo3"]),
    "other names": ({"rotary_emb_base": 77.0, "rope_theta": 33.0, "partial_rotary_factor": 0.5}, ["gpt_neox"]),
    "original length outside": ({"rope_scaling": YARN, "original_max_position_embeddings": 24}, ["qwen2", *TWO]),
    "by kind and scaling": ({"rope_parameters": {**BY_KIND, FULL: DEFAULT}, "rope_scaling": LINEAR}, TWO),
    "older type": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, TWO),
    "two types": ({"rope_scaling": TWO_TYPES}, ["llama", *TWO]),
    "truncate outside": ({"rope_parameters": {**BY_KIND, "truncate": False}}, TWO),
    "pattern": ({"sliding_window_pattern": 3}, ["gemma2", *TWO]),
    "_pattern": ({"_sliding_window_pattern": 3}, ["gemma2", *TWO]),
    "layers": ({"num_hidden_layers": 3}, ["gpt2", "mpt"]),
    "heads": ({"num_attention_heads": 2}, ["gpt2", "mpt"]),
    "experts": ({"num_local_experts": 6, "num_experts": 5}, ["mixtral", "qwen3_moe"]),
    "head size": ({"head_dim": 16}, ["phi3"]),
    "uneven": ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14, "hidden_size": 44}, ["mistral"]),
    "listed layers": (
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, FULL]},
        ["qwen3_moe"],
    ),
    "listed without window": (
        {"sliding_window": 5, "use_cache": False, "num_hidden_layers": 2, "layer_types": [LOCAL, FULL]},
        ["qwen3_moe", "smollm3"],
    ),
}
CASES = [(name, kind) for name, (_, kinds) in WILD.items() for kind in kinds]


def wild(name, kind):
    content = content_of(kind, **WILD[name][0])
    if "pattern" in name:
        content = {key: value for key, value in content.items() if key != "layer_types"}
    return content


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_was_read_means_the_same_to_transformers(name, kind, tmp_path):
    """The config.json that jaxlm writes for what it has read gives the logits of the one that it has read."""
    pytest.importorskip("transformers")
    content = wild(name, kind)
    expected = logits_of_transformers(tmp_path, content)
    read = as_read(tmp_path, content) | {"use_cache": False}
    np.testing.assert_allclose(logits_of_transformers(tmp_path, read), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("both", "qwen3"), ("truncate outside", "gemma3_text"), ("uneven", "mistral"), ("heads", "mpt")]
)
def test_logits(name, kind, tmp_path):
    pytest.importorskip("transformers")
    content = wild(name, kind)
    expected = logits_of_transformers(tmp_path, content, save=True)
    folder = opened(tmp_path, content)
    model = load_model(tmp_path, abstract_of(folder.config), folder.config, one_device())
    np.testing.assert_allclose(logits_of(model, inputs_of(tokens())), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "more", "field", "value"),
    [
        ("gemma3_text", {FULL: {**DEFAULT, "partial_rotary_factor": 0.5}}, "partial_rotary_factor", 1.0),
        ("gemma3_text", {FULL: {**YARN, "truncate": False}}, "truncate", True),
        ("olmo3", {FULL: {**YARN, "truncate": False}}, "truncate", True),
    ],
)
def test_what_transformers_ignores_within_a_kind_of_layer_is_ignored(kind, more, field, value, tmp_path):
    folder = opened(tmp_path, content_of(kind, rope_parameters=more))
    assert getattr(folder.config.rope, field) == value
    assert f"{FULL}: {field}: {more[FULL][field]}: transformers" in "".join(folder.notes)


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("llama", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR}, "transformers follows rope_scaling instead"),
        ("llama", {"rope_scaling": TWO_TYPES}, "type: linear: transformers follows rope_type, which is dynamic"),
        ("olmo3", {"rope_scaling": TWO_TYPES}, f"{FULL}: type: linear: transformers follows rope_type"),
        ("llama", {"rope_parameters": DEFAULT, "rope_theta": 7.0}, "rope_theta: 7.0: transformers follows another key"),
        ("gpt_neox", {"rotary_emb_base": 7.0, "rope_theta": 8.0}, "rope_theta: 8.0: transformers follows another key"),
        ("gemma2", {"sliding_window_pattern": 3}, "sliding_window_pattern: 3: transformers follows other layers"),
        ("gpt2", {"num_hidden_layers": 3}, "n_layer: 2: transformers follows its other name, which is 3"),
        ("qwen2", {"layer_types": [LOCAL] * 3}, "layer_types: sliding_attention: use_sliding_window is not true"),
        ("llama", {"frobnicate": 3}, "keys that jaxlm does not know for this family: frobnicate: 3"),
    ],
)
def test_what_is_not_followed_is_noted(kind, more, said, tmp_path):
    content = content_of(kind, **more)
    content["use_sliding_window"] = False if kind == "qwen2" else content.get("use_sliding_window", False)
    assert said in "".join(opened(tmp_path, content).notes)


def test_a_head_size_that_transformers_uses_only_for_rotation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"head_dim: 16 given, but hidden_size / num_attention_heads is 8"):
        opened(tmp_path, content_of("gpt_neox", head_dim=16))


def test_every_alias_of_transformers_is_one_here():
    transformers = pytest.importorskip("transformers")
    from jaxlm.interop.hf.family import all_families

    for family in (family for family in all_families() if family.modeling is None):
        config = type(transformers.AutoConfig.for_model(family.model_types[0]))
        fields = config.__annotations__
        aliases = {a: own if own in fields else a for a, own in config.attribute_map.items()}
        expected = {a if a != own else config.attribute_map[a]: own for a, own in aliases.items()}
        assert dict(family.aliases) == expected, family.model_types


def save(path, **files):
    from safetensors.numpy import save_file

    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")


def test_one_whole_file_counts_more_than_an_index(tmp_path):
    from jaxlm.interop.hf.tensor_files import open_tensors

    save(tmp_path, model={"x": np.ones(2, np.float32)}, part={"x": np.zeros(2, np.float32)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "part.safetensors"}}))
    assert open_tensors(tmp_path).view("x").tolist() == [1, 1]
    (tmp_path / "config.json").write_text(json.dumps(content_of("llama")))
    assert "index.json: ignored: transformers reads model.safetensors" in "".join(open_folder(tmp_path).notes)


@pytest.mark.slow
def test_a_tied_model_whose_file_has_only_the_head(tmp_path):
    pytest.importorskip("transformers")
    from safetensors.numpy import load_file

    content = content_of("llama", tie_word_embeddings=True)
    expected = logits_of_transformers(tmp_path, content, save=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save(tmp_path, model=tensors)
    folder = opened(tmp_path, content)
    model = load_model(tmp_path, abstract_of(folder.config), folder.config, one_device())
    np.testing.assert_allclose(logits_of(model, inputs_of(tokens())), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", ["x", [None], {"a": 1}])
def test_a_damaged_key_that_is_only_noted_is_refused(value):
    content = {
        **{"model_type": "gemma3_text", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64},
        "_sliding_window_pattern": value,
    }
    with pytest.raises(ConfigError, match=r"_sliding_window_pattern: .* which this family does not support"):
        config_from_json(form_of_json(content, "config.json").family, content, "config.json")
