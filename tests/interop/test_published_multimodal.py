"""Published multimodal folders by shapes: the keys of the text model, and the names of its tensors and of those kept."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.interop.hf.family import all_families, config_from_json
from jaxlm.interop.hf.folder import open_folder
from jaxlm.interop.hf.form import edited_json, form_of_json
from jaxlm.interop.hf.load import misfits
from jaxlm.interop.hf.safetensors_file import TensorInfo
from jaxlm.interop.hf.weights import expanded
from tests.interop.cases import abstract_of
from tests.interop.published_multimodal import FOLDERS


class Shapes:
    """A source that has shapes alone."""

    def __init__(self, shapes):
        self.tensors = {name: TensorInfo(tuple(shape), np.dtype(np.float16)) for name, shape in shapes.items()}

    def where(self, name):
        return name


def in_files(folder, theirs):
    """Names and shapes of a published folder, from the parameters of transformers' model."""
    tied = not folder.has_head and theirs.config.tie_word_embeddings
    shapes = {}
    for name, parameter in theirs.state_dict().items():
        start = next((start for start in folder.names if name.startswith(start)), "")
        shape = tuple(parameter.shape)
        if folder.inputs_first and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            shape = (shape[0], shape[2], shape[1])
        if not (tied and name == "lm_head.weight"):
            shapes[folder.names.get(start, "") + name.removeprefix(start)] = shape
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_published_folder_by_shapes(name, tmp_path):
    """The other library counts and names them on the device meta."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = FOLDERS[name]
    (tmp_path / "config.json").write_text(json.dumps(folder.config))
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    shapes = in_files(folder, theirs)
    assert sum(map(math.prod, shapes.values())) == folder.num_parameters

    opened = open_folder(tmp_path)
    for key in folder.noted:
        assert f"{key}: " in "".join(opened.notes), opened.notes
    assert bool(opened.notes) == bool(folder.noted), opened.notes
    assert opened.vocab_size == theirs.config.get_text_config().vocab_size
    config, form = opened.config, opened.form
    if folder.has_head:  # as `open_folder` does if the files have one that differs
        config = dataclasses.replace(config, tie_word_embeddings=False)
    source = Shapes(shapes | dict.fromkeys(folder.further, (1,)))
    kept = {name for name in source.tensors if form.kept(source, config)(name)}
    assert (len(shapes) - len(kept & shapes.keys()), len(kept & shapes.keys())) == folder.num_tensors
    assert kept >= {*folder.further}
    ours, leaves = form.tensors(source, config), dict(tree.leaves(abstract_of(config, opened.vocab_size)))
    assert tree.num_parameters(abstract_of(config, opened.vocab_size)) == sum(
        math.prod(info.shape) for info in ours.tensors.values()
    )
    table = form.table(config, form.layout(ours, config, leaves))
    assert not misfits(table, ours, leaves, prefix=form.family.prefix)
    exported = form.names(source).of_table(table)
    names = {name for name, *_ in expanded(exported, lambda tensor: tensor.sizes(leaves))}
    assert names == source.tensors.keys() - kept


@pytest.mark.parametrize("name", FOLDERS)
def test_an_export_differs_from_a_published_folder_only_where_training_changed_it(name):
    """Trained on shorter texts, no key changes; after another change, the text level has it."""
    source = FOLDERS[name].config
    form = form_of_json(source, name)
    config, _ = config_from_json(form.family, form.level(source), name)
    trained = dataclasses.replace(config, seq_len=128)
    assert edited_json(form.family, trained, source) == source
    noisier = edited_json(form.family, dataclasses.replace(trained, initializer_range=0.5), source)
    text = source.get("text_config", {})
    assert noisier == (
        source | {"text_config": text | {"initializer_range": 0.5}} if text else source | {"initializer_range": 0.5}
    )


def test_every_kind_of_multimodal_folder_is_among_the_published_ones():
    """With every family of text models that it may have."""
    pairs = [(kind, family) for family in all_families() for part in family.text for kind in part.model_types]
    forms = [form_of_json(folder.config, name) for name, folder in FOLDERS.items()]
    found = {
        (folder.config["model_type"], form.family.model_types)
        for folder, form in zip(FOLDERS.values(), forms, strict=True)
    }
    assert found == {(kind, family.model_types) for kind, family in pairs}
