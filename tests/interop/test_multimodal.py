"""The text part of multimodal folders: read beside transformers, and exported with the other parts byte for byte."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import PublishError
from jaxlm.interop.hf import family, form
from jaxlm.interop.hf.families import qwen3
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.form import edited_json
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.interop.hf.verify import verify_folder
from jaxlm.interop.hf.weights import fused
from jaxlm.models.rope import YarnRotary
from tests.engine.helpers import one_device
from tests.interop.cases import abstract_of, exported, inputs_of, logits_of
from tests.interop.multimodal import CASES, VOCAB, reference, saved, source_of

TIERS = {"gemma3": (), "mistral3-of-2026": pytest.mark.soak}
KINDS = [pytest.param(kind, marks=TIERS.get(kind, pytest.mark.slow)) for kind in CASES]
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def load(folder):
    opened = open_folder(folder)
    return load_model(folder, abstract_of(opened.config, opened.vocab_size), opened.config, one_device()), opened.config


def export(folder, source, model, config, **options):
    return exported(folder, model, config, source=source, special_ids=IDS, **options)


def content_of(folder):
    return json.loads((folder / "config.json").read_text())


def rewritten(folder, change):
    """The folder with other tensors. Args: change: name, array -> name and array."""
    file = SafetensorsFile(folder / "model.safetensors")
    arrays = dict(change(name, np.array(file.view(name))) for name in file.tensors)
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(folder / "new", infos, arrays.values())
    (folder / "new").rename(folder / "model.safetensors")
    return folder


def edited(folder, **keys):
    (folder / "config.json").write_text(json.dumps(content_of(folder) | keys))
    return folder


def tokens():
    return np.random.default_rng(1).integers(0, 90, size=(2, 48))


def assert_same_tensors(first, second):
    ours, theirs = open_tensors(first), open_tensors(second)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, info in ours.tensors.items():
        assert theirs.tensors[name] == info, name
        assert ours.view(name).tobytes() == theirs.view(name).tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_a_bit_equal_export(kind, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder, theirs, ids = saved(kind, tmp_path / "hf"), reference(kind), tokens()
    model, config = load(folder)
    theirs.zero_grad()
    expected = theirs(input_ids=torch.tensor(ids)).logits
    expected.square().mean().backward()
    np.testing.assert_allclose(logits_of(model, inputs_of(ids)), expected.detach(), rtol=1e-4, atol=1e-4)
    ours = jax.grad(lambda m: jnp.mean(logits_of(m, inputs_of(ids)) ** 2))(model)
    out = export(tmp_path / "out", source_of(folder), model, config)
    assert_same_tensors(out, folder)
    assert content_of(out) == content_of(folder)
    assert list(content_of(out)) == list(content_of(folder))
    assert (out / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()
    gradients = export(tmp_path / "gradients", source_of(folder), ours, config)  # by the names of transformers' files
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, buffer in theirs.named_buffers():
            buffer.mul_(0 if name.endswith("layer_scalar") else 1)  # it has no gradient
    theirs.save_pretrained(tmp_path / "theirs")
    for parameter in theirs.parameters():
        parameter.grad = None
    reference.cache_clear()
    found, wanted = open_tensors(gradients), open_tensors(tmp_path / "theirs")
    for name in found.tensors.keys() - source_of(folder).kept.keys():
        # The gradients of decay rates are sums over all tokens, of terms that cancel.
        near = (1e-4 if name.endswith(("A_log", "dt_bias")) else 1e-5) * np.abs(wanted.view(name)).max()
        np.testing.assert_allclose(found.view(name), wanted.view(name), atol=near, rtol=0, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_a_trained_export(kind, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = saved(kind, tmp_path / "hf")
    model, config = load(folder)
    model = jax.tree.map(lambda leaf: leaf + 0.01 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, model)
    out = export(tmp_path / "out", source_of(folder), model, config)
    cls = type(reference(kind))
    loaded, info = cls.from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    assert not {key: names for key, names in info.items() if names}
    ids = tokens()
    with torch.no_grad():
        expected = loaded(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits_of(model, inputs_of(ids)), expected, rtol=1e-4, atol=1e-4)
    alone = export(tmp_path / "alone", source_of(folder), model, config, parts="text")
    text, info = transformers.AutoModelForCausalLM.from_pretrained(
        alone, output_loading_info=True, attn_implementation="eager"
    )
    assert not {key: names for key, names in info.items() if names}
    assert "vision_config" not in content_of(alone)
    assert not (alone / "preprocessor_config.json").exists()
    with torch.no_grad():
        np.testing.assert_allclose(text(torch.tensor(ids)).logits.numpy(), expected, rtol=1e-4, atol=1e-4)


def saved_as_published(tmp_path, *, inputs_first):
    """The experts of published folders have their inputs first; transformers 5 saves others."""

    def change(name, array):
        is_turned = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        return name, np.ascontiguousarray(array.swapaxes(1, 2)) if inputs_first and is_turned else array

    return rewritten(saved("qwen3_vl_moe", tmp_path / str(inputs_first)), change)


@pytest.mark.slow
def test_experts_are_read_and_written_with_inputs_or_outputs_first(tmp_path):
    pytest.importorskip("transformers")
    folders = {first: saved_as_published(tmp_path, inputs_first=first) for first in (True, False)}
    (first, config), (second, _) = (load(folder) for folder in folders.values())
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, two)
    for name, folder in folders.items():
        out = export(tmp_path / f"out-{name}", source_of(folder), first, config)
        assert_same_tensors(out, folder)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_follow_one_another_or_take_turns(along, interleaved):
    """With an axis of experts inside the tensor."""
    layout = "experts | mlp | embed" if along == 0 else "experts | embed | mlp"
    at = 1 + along
    table = fused("experts.gate_up", {"gate": layout, "up": layout}, along=at, interleaved=interleaved)
    sizes, rng = {"experts": 2, "mlp": 3, "embed": 4}, np.random.default_rng(0)
    gate, up = (rng.standard_normal((2, 4, 3)) for _ in range(2))  # experts, embed, mlp
    axes = ("experts", "embed", "mlp")
    whole = table.write([gate, up], [axes, axes], sizes)
    one, two = (part if along else part.swapaxes(1, 2) for part in (gate, up))
    expected = np.concatenate([one, two], axis=at)
    if interleaved:
        expected = np.empty_like(expected)
        pairs = [slice(None)] * 3
        for start, part in enumerate((one, two)):
            pairs[at] = slice(start, None, 2)
            expected[tuple(pairs)] = part
    np.testing.assert_array_equal(whole, expected)
    assert table.shape(sizes) == whole.shape
    for number, part in enumerate((gate, up)):
        np.testing.assert_array_equal(table.read(whole, number, sizes, axes), part)
        wanted = (slice(1, 2), slice(1, 3), slice(0, 2))
        found = table.read_region(whole.__getitem__, number, sizes, axes, wanted)
        np.testing.assert_array_equal(found, part[wanted])


@pytest.mark.parametrize("with_tied_names", [True, False])
@pytest.mark.parametrize(
    ("kind", "head"), [("qwen2_5_vl", "lm_head.weight"), ("gemma3", "language_model.lm_head.weight")]
)
def test_a_tied_head_in_the_files_is_written_back(kind, head, with_tied_names, tmp_path):
    """Beside the embedding, or in its place."""
    pytest.importorskip("transformers")
    folder = saved(kind, tmp_path / "hf")
    file = SafetensorsFile(folder / "model.safetensors")
    arrays = {name: np.array(file.view(name)) for name in file.tensors}
    embedding = next(name for name in arrays if name.endswith("embed_tokens.weight"))
    arrays[head] = arrays[embedding] if with_tied_names else arrays.pop(embedding)
    write_safetensors(folder / "new", {n: TensorInfo(a.shape, a.dtype) for n, a in arrays.items()}, arrays.values())
    (folder / "new").rename(folder / "model.safetensors")
    model, config = load(folder)
    assert config.tie_word_embeddings
    assert_same_tensors(out := export(tmp_path / "out", source_of(folder), model, config), folder)
    assert content_of(out) == content_of(folder)
    trained = jax.tree.map(lambda leaf: leaf * np.float32(1.5), model)
    written = open_tensors(export(tmp_path / "trained", source_of(folder), trained, config))
    for name in {head, embedding} & arrays.keys():
        np.testing.assert_array_equal(written.view(name), arrays[name] * np.float32(1.5))


def test_a_folder_of_mistral_3_without_a_text_level_has_the_text_model_of_the_older_one(tmp_path):
    """As in transformers, whose default is Mistral Small."""
    (tmp_path / "config.json").write_text('{"model_type": "mistral3", "text_config": null}')
    opened = open_folder(tmp_path)
    assert (type(opened.config).__name__, opened.config.num_layers, opened.vocab_size) == ("MistralConfig", 40, 131072)


def test_a_folder_whose_parts_are_missing_or_changed_is_not_exported(tmp_path):
    pytest.importorskip("transformers")
    folder = saved("qwen3_vl", tmp_path / "hf")
    (model, config), source = load(folder), source_of(folder)
    name = "model.visual.merger.norm.bias"
    original = (folder / "model.safetensors").read_bytes()

    def refused(change, message):
        rewritten(folder, change)
        with pytest.raises(PublishError, match=message):
            export(tmp_path / "out", source, model, config)
        assert not (tmp_path / "out").exists()
        (folder / "model.safetensors").write_bytes(original)

    refused(lambda n, a: (n, a + (n == name)), rf"cannot copy {name} .*has changed since .*hf_save_parts: text")
    refused(lambda n, a: (n.replace("visual.merger", "visual.merged"), a), "model.visual.merger.* is missing")
    refused(lambda n, a: (n, a[:1] if n == name else a), rf"{name} is \[1\] float32, \[16\] float32 expected")
    (folder / "preprocessor_config.json").write_text("{}")
    with pytest.raises(PublishError, match=r"cannot copy preprocessor_config.json .*has changed"):
        export(tmp_path / "out", source, model, config)
    shutil.rmtree(folder)
    with pytest.raises(PublishError, match=r"cannot copy model.visual.\* \(27 tensors\) from .*--parts text"):
        export(tmp_path / "out", source, model, config)
    alone = export(tmp_path / "alone", source, model, config, parts="text")
    assert content_of(alone)["model_type"] == "qwen3"
    assert open_folder(alone).config == config


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        ({"num_layers": 3}, VOCAB, r"layers.2.* was absent and is \(32,\)"),
        ({"intermediate_dim": 44}, VOCAB, r"layers.0.mlp.* was \(.*40.*\) and is \(.*44.*\)"),
        ({}, 92, r"config.json has vision_end_token_id: 93, and the vocabulary has 92 rows"),
    ],
)
def test_a_model_of_another_structure_cannot_keep_the_parts(change, rows, message, tmp_path):
    pytest.importorskip("transformers")
    folder = saved("qwen3_vl", tmp_path / "hf")
    config = dataclasses.replace(open_folder(folder).config, **change)
    with pytest.raises(
        ConfigError, match=rf"cannot keep model.visual.\* \(27 tensors\) .*{message}.*\(jaxlm convert: --parts text\)"
    ):
        source_of(folder).check_fits(config, rows)
    source_of(folder).check_fits(open_folder(folder).config, 94)  # fewer rows than the source


def test_changed_keys_are_changed_in_the_text_level_alone(tmp_path):
    pytest.importorskip("transformers")
    folder = saved("qwen3_vl", tmp_path / "hf")
    content = content_of(edited(folder, unknown={"a": [1]}))
    config = open_folder(folder).config
    rope = YarnRotary(theta=1e4, factor=2.0, original_max_position_embeddings=48)
    family = family_of_config(config)
    longer = edited_json(family, dataclasses.replace(config, seq_len=96, rope=rope), content)
    text = longer["text_config"]
    assert text["max_position_embeddings"] == 96
    assert (text["rope_scaling"]["rope_type"], text["rope_scaling"]["mrope_section"]) == ("yarn", [2, 1, 1])
    assert {**longer, "text_config": 0} == {**content, "text_config": 0}
    (folder / "config.json").write_text(json.dumps(longer))
    assert open_folder(folder).config == dataclasses.replace(config, seq_len=96, rope=rope)


@pytest.mark.slow
def test_the_names_decide_where_the_text_model_is(tmp_path):
    """Folders that claim to have text alone may have the names of multimodal ones, and the other way round."""
    pytest.importorskip("transformers")
    folder = saved("gemma3", tmp_path / "hf")
    expected, config = load(folder)
    text = content_of(folder)["text_config"]
    for start in ("language_model.model.", "model.language_model.", "model."):
        claims = tmp_path / start
        shutil.copytree(folder, claims)
        rewritten(claims, lambda name, array, start=start: (name.replace("language_model.model.", start), array))
        for content in (content_of(folder), text | {"architectures": ["Gemma3ForCausalLM"]}):
            (claims / "config.json").write_text(json.dumps(content))
            model, found = load(claims)
            assert found == config
            for one, two in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(one, two)
            out = export(tmp_path / f"out-{start}-{len(content)}", source_of(claims), model, config)
            assert_same_tensors(out, claims)
            assert content_of(out) == content


def test_a_text_tensor_named_as_in_another_kind_of_folder_is_an_error(tmp_path):
    """transformers takes it for missing, and an export would rename it."""
    pytest.importorskip("transformers")
    folder, renamed = saved("gemma3", tmp_path / "hf"), "model.norm.weight"
    rewritten(folder, lambda name, array: (renamed if name.endswith(f".{renamed}") else name, array))
    with pytest.raises(ConfigError, match=f"'{renamed}' is named unlike .*: 'language_model.{renamed}'"):
        load(folder)


def test_other_unknown_tensors_are_still_an_error(tmp_path):
    pytest.importorskip("transformers")
    folder = saved("gemma3", tmp_path / "hf")
    rewritten(folder, lambda name, array: (name.replace("multi_modal_projector", "other_projector"), array))
    with pytest.raises(ConfigError, match=r"other_projector.* in the file, but not used by the model"):
        load(folder)


def test_older_files_have_the_text_keys_beside_those_of_images(tmp_path):
    pytest.importorskip("transformers")
    folder = saved("qwen2_5_vl", tmp_path / "hf")
    expected, config = load(folder)
    content = content_of(folder)
    text = content.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    older = text | content | {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (folder / "config.json").write_text(json.dumps(older))
    model, found = load(folder)
    assert found == config
    np.testing.assert_array_equal(model.tokens.weight.array, expected.tokens.weight.array)
    out = export(tmp_path / "out", source_of(folder), model, config)
    assert content_of(out) == older
    assert open_folder(export(tmp_path / "text", source_of(folder), model, config, parts="text")).config == config
    narrower = edited_json(family_of_config(config), dataclasses.replace(config, layer_norm_epsilon=1e-3), older)
    assert narrower == older | {"rms_norm_eps": 1e-3}


@pytest.mark.slow
def test_each_tensor_keeps_its_dtype(tmp_path):
    """Most are bfloat16; a norm of the text model and one of the tower are not."""
    pytest.importorskip("transformers")
    folder = saved("mistral3", tmp_path / "hf")
    exact = ("model.norm.weight", "vision_tower.ln_pre.weight")
    rewritten(folder, lambda n, a: (n, a if n.endswith(exact) else a.astype(jnp.bfloat16)))
    edited(folder, dtype="bfloat16")
    model, config = load(folder)
    assert_same_tensors(out := export(tmp_path / "out", source_of(folder), model, config, dtype=None), folder)
    assert content_of(out) == content_of(folder)
    trained = jax.tree.map(lambda leaf: leaf * np.float32(1.001), model)
    export(tmp_path / "trained", source_of(folder), trained, config, dtype=None)
    assert "the same" in verify_folder(tmp_path / "trained", trained, config, one_device())
    out = export(tmp_path / "f16", source_of(folder), model, config, dtype=np.float16)
    assert content_of(out) == content_of(folder) | {"dtype": "float16"}
    infos = open_tensors(out).tensors
    assert {str(info.dtype) for name, info in infos.items() if "language_model" in name} == {"float16"}
    assert infos["vision_tower.ln_pre.weight"].dtype == np.float32


def test_layers_that_predict_further_tokens_are_kept_or_declared_absent(tmp_path, monkeypatch):
    """A family with names of its own for them, and with layers beyond the last."""
    pytest.importorskip("transformers")
    of_family = dataclasses.replace(qwen3.FAMILY, kept=(r"mtp\.",), further="eh_proj.weight")
    others = tuple(f for f in family.all_families() if f is not qwen3.FAMILY)
    for module in (family, form):
        monkeypatch.setattr(module, "all_families", lambda: (of_family, *others))
    folder = saved("qwen3_vl", tmp_path / "hf")
    model, config = load(folder)
    alone = export(tmp_path / "alone", source_of(folder), model, config, parts="text")
    edited(alone, num_nextn_predict_layers=1)
    more = {"model.layers.2.eh_proj.weight": np.ones((2, 4), jnp.bfloat16), "mtp.fc.weight": np.ones(3, np.float32)}
    file = SafetensorsFile(alone / "model.safetensors")
    arrays = {name: np.array(file.view(name)) for name in file.tensors} | more
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(alone / "model.safetensors", infos, arrays.values())
    model, config = load(alone)
    source = source_of(alone)
    assert source.kept.keys() == more.keys()
    assert_same_tensors(out := export(tmp_path / "out", source, model, config), alone)
    assert content_of(out) == content_of(alone)
    edited(alone, num_hidden_layers=1)  # then layer 1 is none of them
    with pytest.raises(ConfigError, match=r"model.layers.1.* in the file, but not used by the model"):
        load(alone)
    edited(alone, num_hidden_layers=2)
    out = export(tmp_path / "without", source, model, config, parts="text")
    assert content_of(out) == content_of(alone) | {"num_nextn_predict_layers": 0}
    assert not open_tensors(out).tensors.keys() & more.keys()
