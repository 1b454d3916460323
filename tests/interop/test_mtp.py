"""The layer that predicts the token after the next one, against transformers, and in folders as they are published."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.interop.hf.families.qwen3_5 import FAMILY, Qwen35Config
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.interop.hf.source_folder import SourceFolder
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.objectives.next_token import NextToken
from tests.engine.helpers import one_device
from tests.interop.cases import VOCAB, abstract_of, exported, inputs_of, reference

WEIGHT = 0.3
IDS = np.random.default_rng(2).integers(0, VOCAB, (2, 24))
_QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
_BEHIND = {"post_norm": "shared_head.norm"}
SOAKED = ("qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite")
KINDS = ["qwen3_5", "glm4_moe", *(pytest.param(kind, marks=pytest.mark.soak) for kind in SOAKED)]


def published(kind, tensors, num_layers):
    """The layer's tensors by the names of published folders. Args: tensors: as of transformers' `MtpLayer`."""
    is_qwen, named = kind.startswith("qwen"), {}
    for name, array in tensors.items():
        block = name.removeprefix("mtp_block.")
        if block != name:
            place = f"mtp.layers.0.{block}" if is_qwen else f"model.layers.{num_layers}.{block}"
        else:
            own, rest = name.split(".", 1)
            place = (
                f"mtp.{_QWEN[own]}.{rest}" if is_qwen else f"model.layers.{num_layers}.{_BEHIND.get(own, own)}.{rest}"
            )
        start, is_experts, last = place.partition("experts.")
        if not is_experts or start.endswith("shared_"):
            named[place] = array
            continue
        for expert, one in enumerate(array):
            parts = {"gate_proj": one[: len(one) // 2], "up_proj": one[len(one) // 2 :]}
            for part, matrix in (parts if last == "gate_up_proj" else {"down_proj": one}).items():
                named[f"{start}experts.{expert}.{part}.weight"] = np.ascontiguousarray(matrix)
    return named


class Pair:
    """transformers' model and its `MtpModel` with weights of moderate size, and a folder with both as they are published."""

    def __init__(self, kind, folder):
        import torch
        from transformers.modeling_layers import MtpModel

        self.kind, self.folder, self.main = kind, folder, reference.__wrapped__(kind)
        config = self.main.config
        config.num_mtp_layers = 1
        if getattr(config, "layer_types", None):
            config.mtp_layer_types = ["full_attention"]
        if getattr(config, "mlp_layer_types", None):
            config.mtp_mlp_layer_types = ["sparse"]
        self.mtp = MtpModel(self.main, 1)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for tensor in (*self.main.parameters(), *self.mtp.layers.parameters(), *self.mtp.layers.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.2 if tensor.ndim == 1 else 0.06))
        self.arrays = self.written(self.main, {**self.mtp.layers[0].state_dict()}, folder)
        content = json.loads((folder / "config.json").read_text())
        for key in ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
            content.pop(key, None)
        content["mtp_num_hidden_layers" if kind.startswith("qwen3_5") else "num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(content))

    def written(self, main, layer, folder):
        """Saves both models' tensors, and returns them. A layer behind the others has copies of embedding and head."""
        main.save_pretrained(folder)
        file = SafetensorsFile(folder / "model.safetensors")
        arrays = {name: np.array(file.view(name)) for name in file.tensors}
        arrays |= published(self.kind, {name: x.detach().numpy() for name, x in layer.items()}, self.num_layers)
        if not self.kind.startswith("qwen"):
            start = f"model.layers.{self.num_layers}."
            arrays[f"{start}embed_tokens.weight"] = arrays["model.embed_tokens.weight"]
            arrays[f"{start}shared_head.head.weight"] = arrays["lm_head.weight"]
        infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
        write_safetensors(folder / "model.safetensors", infos, arrays.values())
        return arrays

    @property
    def num_layers(self):
        return self.main.config.num_hidden_layers

    def losses(self):
        """Of the next token and of the one after it, with their gradients in `grad` afterwards."""
        import torch

        ids = torch.tensor(IDS)
        hidden = self.main.model(ids).last_hidden_state
        places = torch.arange(1, ids.shape[1])[None].expand(len(ids), -1)
        later = self.mtp.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[:, 1:])
        cross_entropy = torch.nn.functional.cross_entropy
        first = cross_entropy(self.main.lm_head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        second = cross_entropy(self.mtp.shared_head(later[:, :-1]).flatten(0, 1), ids[:, 2:].flatten())
        (first + WEIGHT * second).backward()
        return first.item(), second.item()

    def gradients(self, folder):
        """By the names of published folders."""
        import torch

        layer = {
            name: torch.zeros_like(x) if x.grad is None else x.grad
            for name, x in {
                **dict(self.mtp.layers[0].named_parameters()),
                **dict(self.mtp.layers[0].named_buffers()),
            }.items()
        }
        with torch.no_grad():
            for parameter in self.main.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        return self.written(self.main, layer, folder)

    def loaded(self):
        config = dataclasses.replace(open_folder(self.folder).config, mtp=True)
        content = json.loads((self.folder / "config.json").read_text())
        source = SourceFolder.read(self.folder, str(self.folder), content, config)
        source = SourceFolder.from_json(content, source.to_json())
        return load_model(self.folder, abstract_of(config), config, one_device()), config, source


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    pytest.importorskip("transformers")
    return Pair(request.param, tmp_path / "hf")


def batch_of(ids):
    inputs = inputs_of(ids)
    targets = dataclasses.replace(inputs.tokens, array=jnp.roll(inputs.tokens.array, -1, axis=1))
    mask = dataclasses.replace(inputs.tokens, array=(jnp.arange(ids.shape[1]) < ids.shape[1] - 1) * jnp.ones(ids.shape))
    return TokenBatch(inputs.tokens, targets, mask, inputs.segment_ids, inputs.positions)


@pytest.mark.slow
def test_losses_and_gradients(pair, tmp_path):
    model, config, source = pair.loaded()

    def loss(model):
        terms, metrics, _ = NextToken(mtp_weight=WEIGHT).terms(model, batch_of(IDS), None, key=None)
        return terms["loss"].mean() + terms["mtp"].mean(), (metrics["loss"].mean(), metrics["mtp_loss"].mean())

    (_, found), ours = jax.jit(jax.value_and_grad(loss, has_aux=True))(model)
    np.testing.assert_allclose(found, pair.losses(), rtol=1e-6)
    wanted = pair.gradients(tmp_path / "theirs")
    written = open_tensors(exported(tmp_path / "ours", ours, config, source=source))
    assert written.tensors.keys() == wanted.keys()
    for name, theirs in wanted.items():
        if name.endswith("e_score_correction_bias"):
            continue  # ours says how the experts' load differs
        # The gradients of decay rates are sums over all tokens, of terms that cancel.
        near = (1e-4 if name.endswith(("A_log", "dt_bias")) else 1e-5) * np.abs(theirs).max()
        np.testing.assert_allclose(written.view(name), theirs, atol=near, rtol=0, err_msg=name)


@pytest.mark.slow
def test_exports_have_the_layer_of_the_source(tmp_path):
    """Bit by bit if nothing trains; otherwise the trained one, with the copies of the trained embedding and head."""
    pytest.importorskip("transformers")
    pair = Pair("glm4_moe", tmp_path / "hf")
    model, config, source = pair.loaded()
    content = lambda folder: json.loads((folder / "config.json").read_text())  # noqa: E731
    assert not source.kept
    assert len(source.copies) == 2
    out = exported(tmp_path / "out", model, config, source=source, special_ids={})
    written = open_tensors(out)
    assert written.tensors.keys() == pair.arrays.keys()
    for name, array in pair.arrays.items():
        assert written.view(name).tobytes() == array.tobytes(), name
    assert content(out) == content(pair.folder)
    table = "model.embed_tokens.weight"
    trained = dataclasses.replace(
        model,
        tokens=jax.tree.map(lambda leaf: leaf + 1, model.tokens),
        mtp=jax.tree.map(lambda leaf: leaf + 1, model.mtp),
    )
    out = open_tensors(exported(tmp_path / "trained", trained, config, source=source, parts="text", special_ids={}))
    start = f"model.layers.{pair.num_layers}."
    for name, before in pair.arrays.items():
        moved = name == table or (name.startswith(start) and not name.endswith("head.head.weight"))
        np.testing.assert_array_equal(out.view(name), before + 1 if moved else before, err_msg=name)
    assert content(tmp_path / "trained") == content(pair.folder)
    text = exported(tmp_path / "new", trained, config)
    assert content(text)["num_mtp_layers"] == 1
    arrays = pair.arrays | {f"{start}embed_tokens.weight": pair.arrays[table] + 1}
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(pair.folder / "model.safetensors", infos, arrays.values())
    with pytest.raises(ConfigError, match=rf"{start}embed_tokens.weight differs from {table}, .*Remove model.mtp"):
        pair.loaded()


@pytest.mark.soak
def test_the_layer_may_have_a_tensor_for_each_expert_beside_others_with_all(tmp_path):
    """As Qwen3.5's folders; those of Qwen3.6 have all experts of a layer in one tensor everywhere."""
    pytest.importorskip("transformers")
    pair = Pair("qwen3_5_moe", tmp_path / "hf")
    model, config, source = pair.loaded()
    for layout, (others, of_mtp) in enumerate([(True, True), (False, False), (True, False)]):
        form = dataclasses.replace(source, layout=layout)
        out = exported(tmp_path / f"out-{layout}", model, config, source=form)
        names = open_tensors(out).tensors
        assert (
            "model.layers.1.mlp.experts.gate_up_proj" in names,
            "mtp.layers.0.mlp.experts.gate_up_proj" in names,
        ) == (
            others,
            of_mtp,
        )
        read = SourceFolder.read(out, str(out), json.loads((out / "config.json").read_text()), config)
        assert read.layout == layout
        loaded = load_model(out, abstract_of(config), config, one_device())
        jax.tree.map(np.testing.assert_array_equal, loaded, model)


def test_qwen_has_fifteen_tensors_for_the_dense_layer():
    """As many as Qwen3.5-0.8B publishes."""
    tables = [FAMILY.tensors(Qwen35Config(mtp=mtp)) for mtp in (True, False)]
    assert len(tables[0]) - len(tables[1]) == 15
