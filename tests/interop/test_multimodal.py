"""The text part of multimodal folders: read beside transformers, and exported with the other parts byte for byte."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.interop.hf.weights import fused
from tests.engine.helpers import one_device
from tests.interop.cases import abstract_of, exported, inputs_of, logits_of
from tests.interop.multimodal import CASES, reference, saved, source_of

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


@pytest.mark.parametrize("kind", CASES)
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
    theirs.save_pretrained(tmp_path / "theirs")
    for parameter in theirs.parameters():
        parameter.grad = None
    reference.cache_clear()
    found, wanted = open_tensors(gradients), open_tensors(tmp_path / "theirs")
    for name in found.tensors.keys() - source_of(folder).kept.keys():
        # The gradients of decay rates are sums over all tokens, of terms that cancel.
        near = (1e-4 if name.endswith(("A_log", "dt_bias")) else 1e-5) * np.abs(wanted.view(name)).max()
        np.testing.assert_allclose(found.view(name), wanted.view(name), atol=near, rtol=0, err_msg=name)


@pytest.mark.parametrize("kind", CASES)
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
