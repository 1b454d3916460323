"""Folders in MXFP4 and fp8, read as views: against closed forms, transformers' own decoders and the decoded folders."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.interop.hf.families.gpt_oss import GptOssConfig
from jaxlm.interop.hf.folder import ReadOptions, load_model, open_folder
from jaxlm.interop.hf.safetensors_file import TensorInfo, write_safetensors
from jaxlm.interop.hf.source_folder import SourceFolder
from jaxlm.interop.hf.stored_formats import open_weights, unreadable
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.models.base import vocab_axis
from jaxlm.surgery.quantize import QuantizeConfig
from tests.engine.helpers import layout, one_device
from tests.interop.cases import FIRST, VOCAB, abstract_of, exported, inputs_of, logits_of, reference, tokens
from tests.interop.multimodal import saved as saved_parts
from tests.interop.multimodal import source_of
from tests.interop.stored import LUT, as_fp8, as_mxfp4, in_fp8, rewritten, saved_gpt_oss
from tests.interop.test_multimodal import assert_same_tensors, content_of
from tests.tiers import one_of

BLOCKS = (128, 128)
KEY = jax.random.key(0)


def folder_of(place, quantization, **arrays):
    """A folder with these tensors."""
    place.mkdir(exist_ok=True)
    arrays = {name.replace("__", "."): array for name, array in arrays.items()}
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(place / "model.safetensors", infos, arrays.values())
    (place / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return place


def fp8(block=BLOCKS, **keys):
    return {"quant_method": "fp8", "weight_block_size": block and list(block), **keys}


def mxfp4_of_all_codes():
    """One expert: output s has the scale s, and inputs with each code, in an order that tells low from high bits."""
    codes = np.random.default_rng(0).permuted(np.tile(np.arange(16), (256, 2)), axis=1)
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return codes, blocks.reshape(1, 256, 1, 16), np.arange(256, dtype=np.uint8).reshape(1, 256, 1)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_all_codes_and_scales_of_mxfp4_are_exact(dtype, tmp_path):
    codes, blocks, scales = mxfp4_of_all_codes()
    folder = folder_of(tmp_path, {"quant_method": "mxfp4"}, x_blocks=blocks, x_scales=scales)
    found = open_weights(folder, dtype).view("x")
    with np.errstate(over="ignore"):
        expected = (np.array(LUT)[codes] * 2.0 ** (np.arange(256.0)[:, None] - 127)).astype(np.float32)
    assert found.shape == (1, 32, 256)
    np.testing.assert_array_equal(found[0].T.astype(np.float32), expected)


@pytest.mark.slow
def test_mxfp4_is_read_as_transformers_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (3, 10, 2, 16), np.uint8)
    scales = random.integers(100, 140, (3, 10, 2), np.uint8)
    plain = random.normal(size=(4,)).astype(jnp.bfloat16)
    arrays = {"m__gate_up_proj_blocks": blocks, "m__gate_up_proj_scales": scales, "m__bias": plain}
    source = open_weights(folder_of(tmp_path, {"quant_method": "mxfp4"}, **arrays))
    theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    assert dict(source.tensors) == {
        "m.bias": TensorInfo((4,), np.dtype(jnp.bfloat16)),
        "m.gate_up_proj": TensorInfo((3, 64, 10), np.dtype(jnp.bfloat16)),
    }
    np.testing.assert_array_equal(source.view("m.gate_up_proj").astype(np.float32), theirs)
    part = (slice(1, 3), slice(17, 50), slice(1, None, 2))
    np.testing.assert_array_equal(source.view("m.gate_up_proj", part).astype(np.float32), theirs[part])


@pytest.mark.parametrize("kind", ["F32", "BF16", "E8M0", "U8"])
@pytest.mark.parametrize("scale", ["__weight_scale_inv", "__scale", "__qscale_weight"])
def test_fp8_with_partial_blocks_is_exact(kind, scale, tmp_path):
    matrix = np.random.default_rng(2).normal(size=(576, 320)).astype(np.float32)
    codes, scales, exact = in_fp8(matrix, BLOCKS, kind)
    assert scales.shape == (5, 3)
    source = open_weights(folder_of(tmp_path, fp8(), x__weight=codes, **{f"x{scale}": scales}), np.float32)
    assert list(source.tensors) == ["x.weight"]
    np.testing.assert_array_equal(source.view("x.weight"), exact)
    part = (slice(120, 576, 3), slice(127, 129))
    np.testing.assert_array_equal(source.view("x.weight", part), exact[part])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_matrix_and_that_of_its_inputs(shape, tmp_path):
    matrix = np.random.default_rng(2).normal(size=(24, 20)).astype(np.float32)
    codes, scales, exact = in_fp8(matrix, None, "BF16")
    others = {"x__weight_scale_inv": scales.reshape(shape), "x__activation_scale": np.float32(3).reshape(())}
    source = open_weights(folder_of(tmp_path, fp8(None), x__weight=codes, **others), np.float32)
    assert list(source.tensors) == ["x.weight"]
    np.testing.assert_array_equal(source.view("x.weight"), exact)


@pytest.mark.parametrize("block", [None, (4, 8)])
def test_a_vector_is_a_row(block, tmp_path):
    codes, scales, exact = in_fp8(np.random.default_rng(2).normal(size=(1, 20)).astype(np.float32), block, "BF16")
    arrays = {"x__weight": codes[0], "x__weight_scale_inv": scales[0]}
    source = open_weights(folder_of(tmp_path, fp8(block), **arrays), np.float32)
    np.testing.assert_array_equal(source.view("x.weight"), exact[0])


def test_experts_in_one_tensor_have_scales_of_their_own(tmp_path):
    experts = np.random.default_rng(2).normal(size=(3, 40, 20)).astype(np.float32)
    for block, shape in (((16, 16), (3, 3, 2)), (None, (3, 1, 1)), (None, (3,))):
        codes, scales, exact = in_fp8(experts, block)
        config = fp8(block, modules_to_not_convert=["gate"])
        arrays = {"e__down_proj": codes, "e__down_proj_scale_inv": scales.reshape(shape)}
        arrays |= {"e__down_proj_activation_scale": np.ones(3, np.float32), "e__scale": np.ones(3, np.float32)}
        source = open_weights(folder_of(tmp_path, config, **arrays), np.float32)
        assert list(source.tensors) == ["e.scale", "e.down_proj"]
        np.testing.assert_array_equal(source.view("e.down_proj"), exact)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x__weight": (4, 6)}, r"x.weight' is float8_e4m3fn without a scale. Expected one of: x.weight_scale_inv"),
        (
            {"x__weight": (4, 6), "x__weight_scale_inv": (2, 2)},
            r"\[2, 2\] in the file, numbers \[1, 1\] expected for \[4, 6\] with blocks of \[128, 128\]",
        ),
        ({"x__weight": (256, 6), "x__weight_scale_inv": ()}, r"\[\] in the file, numbers \[2, 1\] expected"),
    ],
)
def test_incomplete_fp8_is_refused(arrays, message, tmp_path):
    dtypes = {"x__weight": jnp.float8_e4m3fn}
    made = {name: np.ones(shape, dtypes.get(name, np.float32)) for name, shape in arrays.items()}
    with pytest.raises(ConfigError, match=message):
        open_weights(folder_of(tmp_path, fp8(), **made))


@pytest.mark.parametrize("config", ["x", [1], {"bits": 4}, {"quant_method": ["fp8"]}, fp8((0, 128))], ids=str)
def test_a_format_that_cannot_be_read_has_a_reason(config):
    assert unreadable(config)


def test_a_format_that_is_read_cannot_be_skipped(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": fp8()}))
    with pytest.raises(
        ConfigError, match=r"^hf_skip_keys: quantization_config given, but .* are decoded by it\. Remove it"
    ):
        open_folder(tmp_path, ReadOptions(skip_keys=["quantization_config"]))


def test_incomplete_mxfp4_is_refused(tmp_path):
    blocks = np.zeros((2, 4, 1, 16), np.uint8)
    for others in ({}, {"x_scales": np.zeros((2, 4, 2), np.uint8)}):
        with pytest.raises(ConfigError, match=r"x_blocks'.*_scales.*expected. Download the folder again"):
            open_weights(folder_of(tmp_path, {"quant_method": "mxfp4"}, x_blocks=blocks, **others))
    both = {"x_scales": np.zeros((2, 4, 1), np.uint8), "x": np.zeros(2, np.float32)}
    with pytest.raises(ConfigError, match=r"but 'x' is there too\. Remove one of them"):
        open_weights(folder_of(tmp_path, {"quant_method": "mxfp4"}, x_blocks=blocks, **both))


def loaded(folder, where=None, vocab=VOCAB):
    config = open_folder(folder).config
    return load_model(folder, abstract_of(config, vocab), config, where or one_device())


def saved(name, place, **keys):
    reference(name).save_pretrained(place)
    content = json.loads((place / "config.json").read_text()) | keys
    (place / "config.json").write_text(json.dumps(content))
    return place


# With one tensor for each expert and with one for all of them; the names of Conv1D and of joined projections.
FEW = ("deepseek_v3", "qwen3_5_moe_text", "gpt2", "phi3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_of([*FEW, *(kind for kind in FIRST if kind not in FEW)], but=len(FEW)))
def test_every_family_reads_fp8(kind, tmp_path):
    pytest.importorskip("transformers")
    folder, decoded = as_fp8(saved(FIRST[kind], tmp_path / "hf"))
    assert any(name.endswith("_scale_inv") for name in open_tensors(folder).tensors)
    ours, theirs = (dict(tree.leaves(loaded(one))) for one in (folder, decoded))
    for path, leaf in theirs.items():
        np.testing.assert_array_equal(ours[path].array, leaf.array, err_msg=path)


@pytest.mark.slow
def test_experts_in_mxfp4_are_read_on_eight_devices_and_keep_their_values_in_four_bits(tmp_path):
    folder, decoded = as_mxfp4(saved_gpt_oss(tmp_path / "hf", VOCAB))
    expected = dict(tree.leaves(loaded(decoded)))
    for where in (one_device(), layout(model=2), layout()):
        for path, leaf in tree.leaves(loaded(folder, where)):
            np.testing.assert_array_equal(leaf.array, expected[path].array, err_msg=path)
    model = QuantizeConfig(kind="mxfp4", modules="mlp.*proj").apply(loaded(folder), key=KEY)
    stored = dict(tree.modules_by_path(model, StoredWeight))
    assert {path.split(".")[-2] for path in stored} == {"gate_proj", "up_proj", "down_proj"}
    for path, weight in stored.items():
        exact = expected[path]
        found = weight.floats(exact.dtype).rearrange(exact.axes)
        np.testing.assert_array_equal(found.array, exact.array, err_msg=path)


def test_gpt_oss_20b_in_four_bits_takes_13_gib():
    """By shapes: 24 layers of 32 experts, and the rest in bfloat16."""
    config, surgery = GptOssConfig(), QuantizeConfig(kind="mxfp4", modules="mlp.*proj")
    model = jax.eval_shape(lambda: surgery.apply(config.build(vocab_axis(201088), key=KEY), key=KEY))
    ends = jax.tree.leaves(model)
    packed = sum(leaf.size for leaf in ends if leaf.dtype == np.uint8)
    rest = sum(2 * leaf.size for leaf in ends if leaf.dtype != np.uint8)
    assert packed == 24 * 3 * 32 * 2880**2 * 17 // 32
    assert 12.5 < (packed + rest) / 2**30 < 13


@pytest.mark.slow
def test_transformers_decodes_the_same_experts(tmp_path):
    """Its function for blocks and scales, and the logits of the model that it makes of the folder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    decode = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    folder, _ = as_mxfp4(saved_gpt_oss(tmp_path / "hf", VOCAB))
    codes, view = open_tensors(folder), open_weights(folder)
    for layer, name in itertools.product(range(2), ("gate_up_proj", "down_proj")):
        name = f"model.layers.{layer}.mlp.experts.{name}"
        blocks, scales = (torch.tensor(codes.view(f"{name}_{part}").copy()) for part in ("blocks", "scales"))
        theirs = decode(blocks, scales, dtype=torch.float32)
        np.testing.assert_array_equal(view.view(name).astype(np.float32), theirs.numpy())
    ids = tokens()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits_of(loaded(folder), inputs_of(ids)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_kept_tensors_are_decoded_too(tmp_path):
    """Layers that predict further tokens; the vision tower has other names."""
    folder, decoded = as_fp8(saved_parts("qwen3_5", tmp_path / "hf"), skipped="visual|linear_attn")
    stored = {name for name in open_tensors(folder).tensors if name.endswith("_scale_inv")}
    assert any(name.startswith("mtp.") for name in stored)
    opened = open_folder(folder)
    model = loaded(folder, vocab=opened.vocab_size)
    options = {"source": source_of(folder), "dtype": None, "special_ids": {}}
    assert_same_tensors(exported(tmp_path / "out", model, opened.config, **options), decoded)
    kept = exported(tmp_path / "kept", model, opened.config, stored_format="keep", **options)
    assert_same_tensors(kept, folder)
    assert content_of(kept) == content_of(folder)


@pytest.mark.slow
def test_an_export_is_decoded(tmp_path):
    """With a layer that predicts one token more, which exports keep."""

    def with_further_layer(name, array):
        yield name, array
        if ".layers.1." in name:
            yield name.replace(".1.", ".2."), array[::-1]
        if name == "lm_head.weight":
            yield "model.layers.2.eh_proj.weight", np.tile(array, 2)

    source = rewritten(saved("deepseek_v3", tmp_path / "hf", num_nextn_predict_layers=1), with_further_layer)
    folder, decoded = as_fp8(source)
    opened = open_folder(folder)
    assert [note for note in opened.notes if "the weights are stored as fp8, and decoded as they are read" in note]
    text = SourceFolder.read(folder, str(folder), content_of(folder), opened.config)
    out = exported(tmp_path / "out", loaded(folder), opened.config, source=text, dtype=None, special_ids={})
    assert_same_tensors(out, decoded)
    assert content_of(out) == content_of(decoded)


# transformers reads no partial blocks.
@pytest.mark.slow
@pytest.mark.parametrize("block", one_of([(8, 8), None]))
def test_logits_are_those_of_transformers(block, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder, decoded = as_fp8(saved("llama-3", tmp_path / "hf"), block)
    ids = tokens()
    ours = logits_of(loaded(folder), inputs_of(ids))
    np.testing.assert_array_equal(ours, logits_of(loaded(decoded), inputs_of(ids)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor(ids)).logits.numpy(), rtol=1e-4, atol=1e-4)
