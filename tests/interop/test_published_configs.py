"""config.json files of published models: each opens with the published number of parameters, or is refused with a reason."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.family import (
    SILENT,
    all_families,
    config_from_json,
    config_to_json,
    family_of_config,
)
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.form import edited_json, form_of_json, keys_of
from jaxlm.models.base import ModelConfig
from jaxlm.models.rope import DynamicRotary
from jaxlm.reading.choices import names_of
from tests.engine.helpers import one_device
from tests.interop.cases import abstract_of, inputs_of, logits_of
from tests.interop.published import OPENED, REFUSED
from tests.interop.scaled_down import scaled_down

OF_TRANSFORMERS = [family for family in all_families() if family.modeling is None]  # exports of others bring their code
# Attributes of transformers' classes that are no keys of config.json.
NOT_READ = {"gemma3_text": {"default_theta"}, "gemma2": {"default_theta"}}

# The older name of longrope: an error in transformers 5, but see `test_the_older_name_of_longrope_means_the_same`.
NOT_OPENED_BY_TRANSFORMERS = {"Phi-3-mini-128k-older", "Kimi-K2", "Mistral-Small-4-119B"}


def folder_of(path, content):
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", OPENED)
def test_a_published_config_opens(name, tmp_path):
    """The numbers of parameters are those of the published weights."""
    content, num_parameters, *noted = OPENED[name]
    opened = open_folder(folder_of(tmp_path, content))
    assert tree.num_parameters(abstract_of(opened.config, opened.vocab_size)) == num_parameters
    for key in noted:
        assert f"{key}: " in "".join(opened.notes), opened.notes
    assert bool(opened.notes) == bool(noted), opened.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % 4 == 0 else pytest.mark.soak)  # the families' own tests are slow tests
        for number, name in enumerate(sorted(OPENED.keys() - NOT_OPENED_BY_TRANSFORMERS))
    ],
)
def test_logits_of_a_scaled_down_published_model(name, tmp_path):
    """Random weights; transformers and jaxlm read the same config.json."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    content = scaled_down(OPENED[name][0])
    config = transformers.AutoConfig.from_pretrained(folder_of(tmp_path, content), trust_remote_code=False)
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    # Recurrent layers amplify rounding: 1e-4 of the logits with twice these weights, 1e-6 with these.
    scale = 0.1 if "linear_num_key_heads" in content else 0.2
    ids = torch.tensor(np.random.default_rng(1).integers(0, content["vocab_size"], size=(2, 48)))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        expected = theirs(ids).logits.numpy()
    theirs.save_pretrained(tmp_path)
    opened = open_folder(folder_of(tmp_path, content))
    model = load_model(tmp_path, abstract_of(opened.config, opened.vocab_size), opened.config, one_device())
    np.testing.assert_allclose(logits_of(model, inputs_of(ids.numpy())), expected, rtol=1e-4, atol=1e-4)


def test_the_older_name_of_longrope_means_the_same(tmp_path):
    (old, *_), (new, *_) = OPENED["Phi-3-mini-128k-older"], OPENED["Phi-3-mini-128k"]
    assert open_folder(folder_of(tmp_path, old)).config == open_folder(folder_of(tmp_path, new)).config


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_would_change_the_numbers_is_refused(name, tmp_path):
    content, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        open_folder(folder_of(tmp_path, content))


def test_a_whole_number_is_exported_as_transformers_reads_it(tmp_path):
    content = OPENED["mpt-7b-clipped"][0]
    content = content | {"attn_config": content["attn_config"] | {"clip_qkv": 6, "softmax_scale": 1}}
    opened = open_folder(folder_of(tmp_path, content))
    written = json.dumps(config_to_json(family_of_config(opened.config), opened.config)["attn_config"])
    assert '"softmax_scale": 1.0, "clip_qkv": 6.0' in written


def test_every_family_has_a_published_config():
    assert {kind for family in OF_TRANSFORMERS for kind in family.model_types} == {
        c["model_type"] for c, *_ in OPENED.values()
    }


def test_the_documentation_names_every_family():
    root = Path(__file__).parents[2]
    families = sorted(names_of(ModelConfig, family.config)[0] for family in OF_TRANSFORMERS)
    for page in ("README.md", "docs/which-models.md"):
        table = (root / page).read_text().partition("odels | `model.type` |")[2].partition("\n\n")[0]
        assert sorted(re.findall(r"`(\w+)`", table)) == families, page


def test_the_line_counts_in_the_documentation_are_right():
    root = Path(__file__).parents[2]
    page = (root / "docs/howto/add-a-family.md").read_text()
    named = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    for name, count in named.items():
        source = root / f"src/jaxlm/interop/hf/families/{name}.py"
        assert source.read_text().count("\n") == int(count) <= 60, name
    assert f"families/arcee.py`, {named['arcee']} lines" in page


def test_every_key_of_transformers_is_read():
    """So a key that is only noted is one that transformers does not know either."""
    transformers = pytest.importorskip("transformers")
    for family in OF_TRANSFORMERS:
        read = keys_of(family)
        own = type(transformers.AutoConfig.for_model(family.model_types[0])).__annotations__
        assert set(own) - read - SILENT <= NOT_READ.get(family.model_types[0], set()), family.model_types


def test_transformers_ignores_thekeys_of_the_notes(tmp_path):
    """A key in a note is no field of the family's class in transformers, so it cannot have an effect there."""
    transformers = pytest.importorskip("transformers")
    first = {kind: family.model_types[0] for family in OF_TRANSFORMERS for kind in family.model_types}
    for content, _, *noted in OPENED.values():
        known = transformers.AutoConfig.for_model(first[content["model_type"]]).to_dict()
        values = {key: content[key] for key in noted if key in known}
        assert not any(values.values()), values


@pytest.mark.parametrize("name", OPENED)
def test_an_export_differs_from_its_source_only_where_training_changed_it(name):
    """Trained on shorter texts, no key changes; after another change, one does."""
    source = OPENED[name][0]
    family = form_of_json(source, name).family
    config, _ = config_from_json(family, source, name)
    kind = {"architectures": [family.architecture], "model_type": family.model_types[0]}
    kept = {key: value for key, value in source.items() if key != "auto_map"} | kind
    if family.model_types[0] == "gpt2":  # it has lost the rows of the positions
        kept |= {"n_positions": 128}
    trained = dataclasses.replace(config, seq_len=128)
    assert edited_json(family, trained, source) == kept
    noisier = edited_json(family, dataclasses.replace(trained, initializer_range=0.5), source)
    assert noisier == kept | {"initializer_range": 0.5}


def test_dynamic_rotary_embeddings_of_a_model_that_trains_on_shorter_texts_can_be_exported():
    rope = DynamicRotary(factor=2.0, original_max_position_embeddings=32768)
    config = LlamaConfig(seq_len=2048, rope=rope)
    written = config_to_json(family_of_config(config), config)
    assert written["max_position_embeddings"] == 32768
