"""Reward models as sequence classifiers of transformers: the same rewards after import and export."""

import json
from dataclasses import replace

import haliax as hax
import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.classifier import classifier_keys, read_score
from jaxlm.interop.hf.families.granite import GraniteConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.interop.hf.verify import verify_folder
from jaxlm.models.base import reward_head, vocab_axis
from jaxlm.surgery.base import export_form
from jaxlm.surgery.lora import LoraConfig
from jaxlm.surgery.reward_head import RewardHeadConfig
from tests.engine.helpers import one_device
from tests.interop.cases import FIRST, VOCAB, abstract_of, config_of, exported, inputs_of, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# An untied head, which a classifier does not have; fused weights; the other families.
UNTIED = "llama-own-heads"
OTHERS = [name for kind, name in FIRST.items() if kind not in ("gpt2", "granite")]
NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in (UNTIED, "gpt2")]
NAMES += [pytest.param(name, marks=pytest.mark.soak) for name in OTHERS]
LENGTHS = (1, 5, 9)


@jax.jit
def scores_of(model, inputs):
    """Rewards at every token [batch, position]."""
    return hax.dot(model.hidden(inputs).final, reward_head(model), axis="embed").array


def rewards(model):
    """After the first tokens of a sequence."""
    every = scores_of(model, inputs_of(tokens(1, LENGTHS[-1])))
    return [float(every[0, length - 1]) for length in LENGTHS]


def their_rewards(model):
    with torch.no_grad():
        return [float(model(torch.tensor(tokens(1, LENGTHS[-1])[:, :length])).logits[0, 0]) for length in LENGTHS]


def theirs(name):
    config = config_of(name)
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def imported(folder):
    """The model in a folder, with its reward head, and its config."""
    opened = open_folder(folder)
    surgery = RewardHeadConfig(from_hf=str(folder))
    plain = load_model(folder, abstract_of(opened.config), opened.config, one_device())
    model = surgery.apply(plain, key=jax.random.key(1))
    leaf = surgery.wants.leaves(model, opened.config)["reward"]
    return replace(model, reward=replace(model.reward, array=jax.numpy.asarray(leaf))), opened


@pytest.mark.parametrize("name", NAMES)
def test_rewards_are_those_of_transformers_in_both_directions(name, tmp_path):
    reference = theirs(name)
    expected = their_rewards(reference)
    reference.save_pretrained(tmp_path / "theirs")
    model, opened = imported(tmp_path / "theirs")
    np.testing.assert_allclose(rewards(model), expected, rtol=1e-4, atol=1e-4)
    exported(tmp_path / "ours", model, opened.config, special_ids={"pad_token_id": 3, "eos_token_id": 0})
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(reference)
    assert again.config.num_labels == 1
    np.testing.assert_allclose(their_rewards(again), expected, rtol=1e-5, atol=1e-5)
    said = verify_folder(tmp_path / "ours", model, opened.config, one_device())
    assert said.startswith(f"verified with transformers {transformers.__version__}: rewards within ")
    if name == UNTIED:
        assert any("for sequence classification. It has no head for tokens" in note for note in opened.notes)
        _check_batches(again, model)
        wrong = replace(model, reward=model.reward * 1.01)
        with pytest.raises(ConfigError, match=r"loaded with transformers .*, rewards differ by up to"):
            verify_folder(tmp_path / "ours", wrong, opened.config, one_device())


def _check_batches(loaded, model):
    """A batch whose second sequence is padded."""
    ids = tokens(2, 9) % (VOCAB - 4) + 4  # without special tokens
    ids[1, 5:] = loaded.config.pad_token_id
    with torch.no_grad():
        found = loaded(torch.tensor(ids), attention_mask=torch.tensor(ids != 3).long()).logits[:, 0].numpy()
    expected = [float(scores_of(model, inputs_of(row[None]))[0, last]) for row, last in zip(ids, (8, 4), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_without_transformers_the_folder_is_read_by_jaxlm(tmp_path, monkeypatch):
    config = LlamaConfig(seq_len=8, hidden_dim=16, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=1)
    plain = jax.jit(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))()
    model = RewardHeadConfig().apply(plain, key=jax.random.key(1))
    exported(tmp_path / "ours", model, config)
    monkeypatch.setattr("jaxlm.interop.hf.verify._has_transformers", lambda: False)
    said = verify_folder(tmp_path / "ours", model, config, one_device())
    assert said == "verified with jaxlm (transformers is not installed): rewards within 0.0e+00"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["adapters first", "head first"])
def test_adapters_are_merged_below_the_head(order, tmp_path):
    theirs("llama-own-heads").save_pretrained(tmp_path)
    plain, _ = imported(tmp_path)
    surgeries = [LoraConfig(target="attn|mlp", rank=2), RewardHeadConfig()]
    surgeries = surgeries if order == "adapters first" else surgeries[::-1]
    model = plain.base
    for number, surgery in enumerate(surgeries):
        model = surgery.apply(model, key=jax.random.key(number))
    trained = jax.tree.map(lambda leaf: leaf + 0.03, model)
    written = export_form(trained, surgeries)
    assert jax.tree.structure(written) == jax.tree.structure(plain)
    np.testing.assert_allclose(rewards(written), rewards(trained), rtol=1e-4, atol=1e-4)


def test_padding_that_may_be_the_end_of_a_text_is_not_named():
    keys = lambda **ids: classifier_keys("Qwen3ForCausalLM", ids)  # noqa: E731
    assert keys(pad_token_id=3, eos_token_id=0) == {
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": 3,
    }
    assert keys(pad_token_id=3, eos_token_id=3)["pad_token_id"] is None
    assert keys(pad_token_id=3, eos_token_id=[0, 3])["pad_token_id"] is None
    assert keys(eos_token_id=3)["pad_token_id"] is None
    assert classifier_keys("GPT2LMHeadModel", {})["architectures"] == ["GPT2ForSequenceClassification"]
    assert classifier_keys("Gemma3ForCausalLM", {})["architectures"] == ["Gemma3TextForSequenceClassification"]


@pytest.mark.slow
def test_folders_without_a_reward_head_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"from_hf: .* has no config\.json"):
        RewardHeadConfig(from_hf=str(tmp_path)).wants.leaves(None, None)
    config = GraniteConfig(seq_len=8, hidden_dim=8, intermediate_dim=8, num_layers=1, num_heads=2, num_kv_heads=1)
    model = jax.jit(lambda: config.build(vocab_axis(9), key=jax.random.key(0)))()
    exported(tmp_path / "plain", model, config)
    with pytest.raises(ConfigError, match=r"\(GraniteForCausalLM\) has no score\.weight"):
        read_score(tmp_path / "plain", "x")
    with_head = RewardHeadConfig().apply(model, key=jax.random.key(1))
    with pytest.raises(ConfigError, match=r"transformers has no GraniteForSequenceClassification"):
        exported(tmp_path / "rewards", with_head, config)


@pytest.mark.slow
def test_several_labels_are_refused_and_the_files_have_no_head_for_tokens(tmp_path):
    config = config_of("llama-own-heads")
    config.num_labels = 3
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"x: score\.weight in .* \[3, 32\], but a reward model has one label"):
        read_score(tmp_path / "three", "x")
    theirs("llama-own-heads").save_pretrained(tmp_path / "one")
    model, opened = imported(tmp_path / "one")
    exported(tmp_path / "ours", model, opened.config)
    names = set(SafetensorsFile(tmp_path / "ours" / "model.safetensors").tensors)
    assert names == set(SafetensorsFile(tmp_path / "one" / "model.safetensors").tensors)
    content = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert content["architectures"] == ["LlamaForSequenceClassification"]
