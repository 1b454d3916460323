"""Safetensors files against the safetensors library, refused folders, and an import without torch."""

import dataclasses
import errno
import itertools
import json
import os
import random
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import PublishError
from jaxlm.interop.hf import weights
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.folder import ReadOptions, load_model, open_folder, parameter_dtype
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.interop.hf.tensor_files import open_tensors, renamed
from jaxlm.models.rope import Places
from jaxlm.surgery.lora import LoraConfig, save_peft
from tests.engine.helpers import layout, one_device
from tests.interop.cases import abstract_of, exported, inputs_of, logits_of

CONFIG = LlamaConfig(seq_len=16, hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=4, num_kv_heads=2)
VOCAB = 24


def built(vocab=VOCAB, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = abstract_of(CONFIG, vocab)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), dtype), shapes)


def abstract(vocab=VOCAB, dtype=jnp.float32):
    return jax.eval_shape(lambda: built(vocab, dtype))


def saved(folder, **options):
    return exported(folder, built(), CONFIG, **options)


def rewritten(folder, change):
    """Applies `change(name -> array)` to the folder's weights."""
    file = SafetensorsFile(folder / "model.safetensors")
    arrays = {name: np.array(file.view(name)) for name in file.tensors}
    arrays = change(arrays)
    infos = {name: TensorInfo(a.shape, a.dtype) for name, a in arrays.items()}
    write_safetensors(folder / "model.safetensors", infos, arrays.values())


def test_on_a_full_disk_the_process_that_writes_takes_part_in_the_rest_of_the_tensors(tmp_path, monkeypatch):
    """Each tensor is a collective: the other processes would wait for it in all of them."""
    names: list[str] = []
    convert = weights.TensorWriter.arrays

    def write(path, infos, arrays):
        next(iter(arrays))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def arrays(self, wanted):
        for name, array in zip(wanted, convert(self, wanted), strict=True):
            names.append(name)
            yield array

    monkeypatch.setattr(weights.TensorWriter, "arrays", arrays)
    monkeypatch.setattr(weights, "write_safetensors", write)
    with pytest.raises(PublishError, match=r"cannot write .*x \(\[Errno 28\] No space left on device\)"):
        saved(tmp_path / "x")
    monkeypatch.undo()
    assert names == list(SafetensorsFile(saved(tmp_path / "y") / "model.safetensors").tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool"])
def test_the_safetensors_library_reads_our_files_and_we_read_its(dtype, tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype)), "b": np.zeros((0, 4), jnp.dtype(dtype))}
    infos = {name: TensorInfo(a.shape, a.dtype) for name, a in arrays.items()}
    write_safetensors(tmp_path / "ours", infos, arrays.values())
    library.save_file(arrays, tmp_path / "theirs")
    ours, theirs = library.load_file(tmp_path / "ours"), SafetensorsFile(tmp_path / "theirs")
    assert theirs.tensors == infos
    for name, array in arrays.items():
        assert ours[name].tobytes() == array.tobytes() == theirs.view(name).tobytes()
        assert ours[name].dtype == array.dtype


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e6])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_numbers_that_are_not_finite_are_refused_with_their_tensor(value, dtype, tmp_path):
    folder, name = saved(tmp_path / "hf", largest_file=9000), "model.layers.1.mlp.up_proj.weight"
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with file.open("r+b") as opened:
        opened.seek(SafetensorsFile(file)._starts[name] + 4 * 40)
        opened.write(np.float32(value).tobytes())
    if value == 1e6 and dtype != jnp.float16:
        load_model(folder, abstract(dtype=dtype), CONFIG, one_device())
        return
    said = f"{file}: '{name}' has NaN or infinity as {np.dtype(dtype)}."
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_model(folder, abstract(dtype=dtype), CONFIG, layout(model=2))


def test_many_files_and_an_index(tmp_path):
    folder = saved(tmp_path / "hf", largest_file=9000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(p.name for p in folder.glob("*.safetensors"))
    where = layout(model=2)
    loaded = load_model(folder, abstract(), CONFIG, where)
    for (path, leaf), (_, expected) in zip(tree.leaves(loaded), tree.leaves(built()), strict=True):
        np.testing.assert_array_equal(leaf.array, expected.array, err_msg=path)
        assert leaf.array.sharding.is_equivalent_to(where.parameter_sharding(leaf.axes), leaf.array.ndim)
    (folder / files[0]).unlink()
    with pytest.raises(ConfigError, match=f"missing files: {files[0]}"):
        open_tensors(folder)


def test_missing_renamed_and_reshaped_tensors_and_integers_are_all_named(tmp_path):
    folder = saved(tmp_path / "hf")

    def spoil(arrays):
        arrays.pop("model.layers.1.mlp.up_proj.weight")
        arrays["model.layers.0.mlp.upward.weight"] = arrays.pop("model.layers.0.mlp.up_proj.weight")
        arrays["model.norm.weight"] = arrays["model.norm.weight"].reshape(4, 8)
        arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.int8)  # quantized, without a word in config.json
        return arrays

    rewritten(folder, spoil)
    with pytest.raises(ConfigError) as caught:
        load_model(folder, abstract(), CONFIG, one_device())
    for line in (
        "model.layers.1.mlp.up_proj.weight: missing; [48, 32] expected",
        "model.layers.0.mlp.up_proj.weight: missing; [48, 32] expected",
        "model.layers.0.mlp.upward.weight: [48, 32] in the file, but not used by the model",
        "model.norm.weight: [4, 8] in the file, [32] expected",
        "lm_head.weight: int8 in the file, a floating-point dtype expected",
        "Nothing was loaded",
    ):
        assert line in str(caught.value)


def test_rows_beyond_the_tokenizer_are_dropped(tmp_path):
    folder = saved(tmp_path / "hf")
    loaded = load_model(folder, abstract(vocab=20), CONFIG, one_device())
    np.testing.assert_array_equal(loaded.lm_head().array, built().lm_head().array[:20])
    with pytest.raises(ConfigError, match=r"embed_tokens.weight: \[24, 32\] in the file, \[30, 32\] expected"):
        load_model(folder, abstract(vocab=30), CONFIG, one_device())


def test_bfloat16_is_exact_in_both_directions(tmp_path):
    folder = saved(tmp_path / "hf", dtype=jnp.bfloat16)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), built())
    for dtype in (jnp.bfloat16, jnp.float32):
        loaded = load_model(folder, abstract(dtype=dtype), CONFIG, one_device())
        for (path, leaf), (_, expected) in zip(tree.leaves(loaded), tree.leaves(rounded), strict=True):
            np.testing.assert_array_equal(leaf.array.astype(jnp.bfloat16), expected.array, err_msg=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_dropout": 0.5}, "attention_dropout: 0.5 given, which is not supported; 0.0 expected"),
        ({"logit_scale": 0.1}, "logit_scale: 0.1 given, which is not supported for this family: it scales"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_scaling: unknown type 'ntk'"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' given"),
        (
            {"hidden_size": None, "quantization_config": {"b": 4}},
            "hidden_size: missing\n  quantization_config: {'b': 4}",
        ),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor: missing; type 'yarn' requires it"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: missing; type 'linear' requires it"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, r"rope_scaling\.low_freq_factor: missing"),
        ({"model_type": "bert"}, "unknown model_type 'bert'. Its keys are those of 'llama'.* Known: .*llama"),
        ({"model_type": ["bert"]}, "unknown model_type"),
        ({"model_type": "mamba2", "state_size": 128}, r"It has state-space layers \(state_size\), which"),
        ({"model_type": "rwkv7", "decay_low_rank_dim": 64}, "It has the recurrence of RWKV"),
        ({"model_type": "lfm3", "layer_types": ["conv", "conv"]}, r"short convolutions \(layer_types.conv\), which"),
        (
            {"model_type": "x", "hidden_size": None, "layer_types": ["hybrid", "full_attention"], "router_width": 2},
            "unknown model_type 'x'. No family of jaxlm has its keys layer_types.hybrid, router_width. Known",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            "'llama' in a folder with model_type 'llava'. jaxlm reads this text model alone: save it in a folder of its own",
        ),
        (
            {"model_type": "x", "text_config": {"model_type": "y", "hidden_size": 8, "vocab_size": 9}},
            "unknown text_config.model_type 'y' in a folder with model_type 'x'",
        ),
    ],
    ids=str,
)
def test_unsupported_config_keys_are_named(change, message, tmp_path):
    folder = saved(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ConfigError, match=message):
        open_folder(folder)


def test_a_folder_of_exports_names_the_newest_of_them(tmp_path):
    for step in (1000, 200):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "config.json").write_text("{}")
        os.utime(tmp_path / f"step-{step}" / "config.json", (step, step))
    with pytest.raises(ConfigError, match=r"config.json not found.*Did you mean .*step-1000\?"):
        open_folder(tmp_path)


def changed(folder, **change):
    """Changes keys of config.json."""
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_yarn_factor_of_null_is_the_ratio_of_the_lengths(tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2, "rope_theta": 100.0}
    folder = changed(saved(tmp_path / "hf"), rope_scaling=scaling)
    rope = open_folder(folder).config.rope
    theirs = transformers.AutoConfig.from_pretrained(folder)
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    row = inputs_of(np.zeros((1, 1), int))
    ours = rope.frequencies(8, Places(row.positions, row.segment_ids))
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)
    assert rope.amplitude == pytest.approx(amplitude)


def test_a_vocabulary_smaller_than_the_files_rows_is_refused(tmp_path):
    folder = changed(saved(tmp_path / "hf"), vocab_size=20)
    message = rf"embed_tokens\.weight: {VOCAB} rows in the file, but vocab_size is 20 in config\.json"
    with pytest.raises(ConfigError, match=message):
        load_model(folder, abstract(vocab=20), CONFIG, one_device())


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_with_another_head_is_computed_as_in_transformers(same, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = changed(saved(tmp_path / "hf"), tie_word_embeddings=True)
    if same:
        rewritten(folder, lambda arrays: arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]})
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 12))
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(ids)).logits.numpy()
    opened, notes = open_folder(folder), []
    assert opened.config.tie_word_embeddings == same
    shapes = abstract_of(opened.config, VOCAB)
    model = load_model(folder, shapes, opened.config, one_device(), ReadOptions(log=notes.append))
    np.testing.assert_allclose(logits_of(model, inputs_of(ids)), expected, rtol=1e-4, atol=1e-4)
    assert ["lm_head.weight differs from the token embedding" in note for note in notes] == [True] * (not same)
    if not same:
        tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
        shapes = abstract_of(tied, VOCAB)
        with pytest.raises(ConfigError, match=r"lm_head\.weight: differs from the token embedding"):
            load_model(folder, shapes, tied, one_device())


@pytest.mark.parametrize(
    ("keys", "arrays", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, {}, "bfloat16"),
        ({"dtype": "torch.bfloat16", "torch_dtype": "float32"}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {}, "float32"),
        ({"torch_dtype": None}, {"a.inv_freq": np.ones(4, np.float16)}, "float32"),
        ({"torch_dtype": "auto"}, {"a.masked": np.ones((99, 99), bool)}, "float32"),
        ({"torch_dtype": None}, {"a.inv_freq": np.ones((199, 199), jnp.bfloat16)}, "bfloat16"),
        ({"torch_dtype": None}, {"a.inv_freq": np.ones((199, 199), np.float16)}, "float32"),
    ],
    ids=["bf16", "dtype first", "float16", "small first", "mask first", "mostly bf16", "mostly float16"],
)
def test_the_dtype_is_that_of_config_json_or_of_most_weights(keys, arrays, expected, tmp_path):
    folder = changed(saved(tmp_path / "hf"), **keys)
    rewritten(folder, lambda own: arrays | own)
    name, note = parameter_dtype(folder)
    assert name == expected
    needs_note = keys["torch_dtype"] == "float16" or any(a.dtype == np.float16 and a.size > 99 for a in arrays.values())
    assert (note is not None) == needs_note


def test_a_folder_is_complete_or_does_not_exist(tmp_path):
    folder = saved(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"already exists\. Choose another folder"):
        saved(folder)
    windowed = dataclasses.replace(CONFIG, sliding_window=4)
    with pytest.raises(ConfigError, match=r"cannot represent this model:\n  model\.sliding_window: 4"):
        exported(tmp_path / "x", built(), windowed)
    with pytest.raises(RuntimeError, match="on the way"):
        saved(tmp_path / "y", files=Breaks({"a": b""}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_token_ids_without_a_row_become_null(tmp_path):
    special_ids = {"bos_token_id": VOCAB, "eos_token_id": [1, VOCAB - 1, VOCAB, "x"], "pad_token_id": -1}
    written = json.loads((saved(tmp_path / "hf", special_ids=special_ids) / "config.json").read_text())
    ids = {key: written[key] for key in special_ids}
    assert ids == {"bos_token_id": None, "eos_token_id": [1, VOCAB - 1], "pad_token_id": -1}


class Breaks(dict):
    def items(self):
        raise RuntimeError("on the way")


def test_torch_files_and_weight_name_rules(tmp_path):
    torch = pytest.importorskip("torch")
    folder = saved(tmp_path / "hf", dtype=jnp.bfloat16)
    file = SafetensorsFile(folder / "model.safetensors")
    own = {
        "net." + name.removeprefix("model."): torch.from_numpy(file.view(name).view(np.int16).copy()).view(
            torch.bfloat16
        )
        for name in file.tensors
    }
    torch.save({"state_dict": {**own, "extra": torch.zeros(2)}}, tmp_path / "teacher.pt")
    rules = {r"net\.(lm_head\..*)": r"\1", r"net\.(.*)": r"model.\1"}
    source = renamed(open_tensors(tmp_path / "teacher.pt"), rules)
    assert source.tensors == file.tensors
    for name in file.tensors:
        np.testing.assert_array_equal(source.view(name), file.view(name))
    loaded = load_model(tmp_path / "teacher.pt", abstract(dtype=jnp.bfloat16), CONFIG, one_device(), ReadOptions(rules))
    np.testing.assert_array_equal(loaded.lm_head().array, built(dtype=jnp.bfloat16).lm_head().array)
    with pytest.raises(ConfigError, match=r"the rule 'no such\.\*' matches no tensor"):
        renamed(open_tensors(tmp_path / "teacher.pt"), {"no such.*": ""})
    own = {"weight": torch.ones(2)}
    torch.save(own, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(
        ConfigError, match=r"before version 1\.6\. .*weights = (torch\.load\(.*\)); (torch\.save\(.*\))"
    ) as old:
        open_tensors(tmp_path / "old.bin")
    program = str(old.value).partition("these lines of Python: ")[2].replace("'old.bin'", f"'{tmp_path}/old.bin'")
    exec(program, {"torch": torch})  # what the message advises
    np.testing.assert_array_equal(open_tensors(tmp_path / "old.bin").view("weight"), [1, 1])
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(ConfigError, match="cannot be loaded with weights_only"):
        open_tensors(tmp_path / "module.pt")


def test_float8_in_torch_files_is_read_and_other_dtypes_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    values = torch.tensor([[0.5, -3.25, 448.0], [0.0, 1 / 64, -1.0]])
    kinds = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16}
    stored = {name: values.to(kind).T for name, kind in kinds.items()}  # not contiguous
    stored["float8_e8m0fnu"] = torch.tensor([0.5, 4.0]).to(torch.float8_e8m0fnu)
    torch.save(stored, tmp_path / "a.pt")
    source = open_tensors(tmp_path / "a.pt")
    for name, tensor in stored.items():
        assert source.tensors[name].dtype.name == name
        np.testing.assert_array_equal(source.view(name).astype(np.float32), tensor.float().numpy())
    others = {
        "the dtype complex64": values.to(torch.complex64),
        "the dtype qint8": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
        "the layout sparse_coo": values.to_sparse(),
    }
    for given, tensor in others.items():
        torch.save({"a": values, "b": tensor}, tmp_path / "b.bin")
        with pytest.raises(
            ConfigError, match=rf"b\.bin: 'b' has {given}\. Known: dense tensors of float64, .*Convert it"
        ):
            open_tensors(tmp_path / "b.bin")


def test_a_folder_of_float8_torch_weights_is_read_as_float32_with_a_note(tmp_path):
    torch = pytest.importorskip("torch")
    folder = saved(tmp_path / "hf")
    file = SafetensorsFile(folder / "model.safetensors")
    own = {name: torch.from_numpy(file.view(name).copy()).to(torch.float8_e4m3fn) for name in file.tensors}
    torch.save(own, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    dtype, note = parameter_dtype(changed(folder, torch_dtype="float8_e4m3fn"))
    assert dtype == "float32"
    assert "the weights are float8_e4m3fn, in which parameters cannot be stored, so they are read as float32" in note
    loaded = load_model(folder, abstract(), CONFIG, one_device())
    expected = own["lm_head.weight"].float().numpy()
    np.testing.assert_array_equal(loaded.lm_head().array, expected)


LORA = LoraConfig(target="q_proj|down_proj", rank=4)


def adapted():
    """A model whose adapters have an effect."""
    model = LORA.apply(built(), key=jax.random.key(1))
    return tree.map_leaves(lambda path, leaf: leaf + 0.1 if path.endswith(".b") else leaf, model)


def saved_adapters(folder, model):
    save_peft(folder, model, CONFIG, one_device(), dtype=np.float32, base="x")
    return folder


def test_peft_adapters(tmp_path):
    model = adapted()
    saved_adapters(tmp_path / "peft", model)
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["down_proj", "q_proj"]
    file = SafetensorsFile(tmp_path / "peft" / "adapter_model.safetensors")
    before, after = saved(tmp_path / "before"), tmp_path / "after"
    exported(after, LORA.merge(model), CONFIG)
    base, merged = (SafetensorsFile(folder / "model.safetensors") for folder in (before, after))
    for name in base.tensors:
        stem = "base_model.model." + name.removesuffix(".weight")
        expected = base.view(name)
        if f"{stem}.lora_A.weight" in file.tensors:
            change = file.view(f"{stem}.lora_B.weight") @ file.view(f"{stem}.lora_A.weight")
            expected = expected + change * described["lora_alpha"] / described["r"]
        np.testing.assert_allclose(merged.view(name), expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_peft_computes_the_same(tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = adapted()
    base = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path / "base"))
    adapted_ = peft.PeftModel.from_pretrained(base, saved_adapters(tmp_path / "peft", model)).eval()
    exported(tmp_path / "m", LORA.merge(model), CONFIG)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = torch.tensor(np.random.default_rng(0).integers(0, VOCAB, (2, 12)))
    with torch.no_grad():
        torch.testing.assert_close(adapted_(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(
            merged(ids).logits,
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits,
            atol=1e-2,
        )


@pytest.mark.slow
def test_safetensors_are_imported_without_torch(tmp_path):
    """In a process where importing torch, transformers or the safetensors library fails."""
    folder = saved(tmp_path / "hf")
    program = f"""
        import sys
        for name in ("torch", "transformers", "safetensors", "huggingface_hub"):
            sys.modules[name] = None
        import jax
        from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
        from jaxlm.interop.hf.folder import load_model, open_folder
        from jaxlm.models.base import vocab_axis
        folder = __import__("pathlib").Path({str(folder)!r})
        opened = open_folder(folder)
        abstract = jax.eval_shape(lambda: opened.config.build(vocab_axis({VOCAB}), key=jax.random.key(0)))
        axes = dict(embed=32, mlp=48, heads=4, kv_heads=2, head_size=8, vocab={VOCAB}, layers=2)
        where = make_layout(mesh_shape(1, replica=1, model=1), AxisMappings("batch", ("embed",), (), {{}}, {{}}), axes)
        print(float(abs(load_model(folder, abstract, opened.config, where).lm_head().array).sum()))
    """
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == pytest.approx(float(jnp.abs(built().lm_head().array).sum()), rel=1e-5)


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def entry(dtype: str, shape: str, offsets: str) -> bytes:
    return header(f'{{"a": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}}}'.encode())


def two(*offsets: str) -> bytes:
    """Two numbers of four bytes."""
    a, b = (f'{{"dtype": "F32", "shape": [1], "data_offsets": {one}}}' for one in offsets)
    return header(f'{{"a": {a}, "b": {b}}}'.encode()) + bytes(max(json.loads(one)[1] for one in offsets))


def test_what_the_safetensors_library_refuses_is_refused(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    starts = [(0, 4), (2, 6), (4, 8), (5, 9), (0, 8)]
    for a, b, more in itertools.product(starts, starts, (b"", b"x")):
        content = two(str([*a]), str([*b])) + more
        (tmp_path / "a.safetensors").write_bytes(content)
        try:
            library.load(content)
        except Exception:
            with pytest.raises(ConfigError, match=r"a\.safetensors"):
                SafetensorsFile(tmp_path / "a.safetensors")
        else:
            assert [*SafetensorsFile(tmp_path / "a.safetensors").tensors] == ["a", "b"]


@pytest.mark.parametrize("kind", ["bytes", "pickle"])
def test_a_damaged_torch_file_is_one_message(tmp_path, kind):
    torch = pytest.importorskip("torch")
    state = {
        "a": torch.ones(8, 16),
        "b": torch.ones(7).bfloat16(),
        "c": torch.ones(8, 4).T,
        "d": torch.ones(100)[10:20],
    }
    torch.save(state, tmp_path / "whole.bin")
    unread = 0
    for seed in range(200):
        chooser = random.Random(seed)
        content = bytearray((tmp_path / "whole.bin").read_bytes())
        first = content.index(b"\x80\x02") if kind == "pickle" else 0
        last = content.index(b"PK", first + 1) if kind == "pickle" else len(content)
        for _ in range(chooser.choice([1, 3, 9])):
            content[chooser.randrange(first, last)] = chooser.randrange(256)
        (tmp_path / "a.bin").write_bytes(content)
        try:
            source = open_tensors(tmp_path / "a.bin")
            _ = [source.view(name) for name in source.tensors]
        except ConfigError:
            unread += 1
    assert unread > 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda whole: whole[:-1],
            r"the file is truncated: it has [\d,]+ bytes, but '.*' ends at byte [\d,]+\. Download",
        ),
        (lambda whole: whole[:-9000], "the file is truncated"),
        (lambda whole: b"", "not a safetensors file: it has no valid header"),
        (lambda whole: entry('"F32"', "[3]", "[0, 4]") + bytes(4), r"'a' has 4 bytes, but its shape \[3\] needs 12"),
        (lambda whole: b"{}", "not a safetensors"),
        (lambda whole: whole[:40], "not a saf"),
        (lambda whole: header(b'{"a": 5}'), "the header entry of 'a' is damaged: 5"),
        (lambda whole: header(b'{"a": {"dtype": "F32"}}'), "the header entry of 'a' is damaged"),
        (lambda whole: entry('"F32"', "[1]", "[-4, 0]"), "the header entry of 'a' is damaged"),
        (lambda whole: entry('"F32"', '["x"]', "[0, 4]"), "the header entry of 'a' is damaged"),
        (lambda whole: entry("[1]", "[1]", "[0, 4]"), r"'a' has the dtype \[1\]"),
        (lambda whole: header(b'{"a": ' + b"[" * 100_000), "no valid header"),
        (lambda whole: header(b"[]"), "no valid header"),
        (lambda whole: two("[4, 8]", "[4, 8]"), "'a' is at byte .* expected: tensors overlap"),
        (lambda whole: two("[0, 4]", "[2, 6]"), "'b' is at byte .* tensors overlap"),
        (lambda whole: two("[0, 4]", "[5, 9]"), "'b' is at byte .* bytes belong to none"),
        (lambda whole: two("[0, 4]", "[4, 8]") + b"x", "'the end of the file' is at byte .* bytes belong to none"),
    ],
)
def test_a_damaged_file_is_one_message(tmp_path, content, message):
    path = saved(tmp_path / "hf") / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        SafetensorsFile(path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "[" * 100_000, "{"])
def test_damaged_indices_are_one_message(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("name", ["{outside}/model.safetensors", "../outside/model.safetensors", "", "a\0"])
def test_an_index_names_no_file_outside_of_its_folder(tmp_path, name):
    saved(tmp_path / "outside")
    name = name.format(outside=tmp_path / "outside")
    (tmp_path / "hf").mkdir()
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is listed, the name of a file in this folder expected"):
        open_tensors(tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ({"hidden_size": "x"}, r"model\.hidden_dim: 'x' given, an integer of 1 or more expected"),
        ({"hidden_size": None}, r"model\.hidden_dim: null given, an integer of 1 or more expected"),
        ({"num_hidden_layers": -1}, r"model\.num_layers: -1 given, an integer of 1 or more and at most 10000 expected"),
        ({"rms_norm_eps": None}, r"model\.layer_norm_epsilon: null given"),
        ({"rope_theta": "big"}, "'big'"),
        ({"rope_scaling": 5}, "rope_scaling: 5"),
        ({"vocab_size": "x"}, "vocab_size: 'x' given, an integer of 1 or more expected"),
        ({"vocab_size": 0}, "vocab_size: 0 given"),
    ],
)
def test_damaged_config_files_are_one_message(tmp_path, change, message):
    usual = {
        **{"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 16},
    }
    text = change if isinstance(change, str) else json.dumps(usual | change if isinstance(change, dict) else change)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_folder(tmp_path)
