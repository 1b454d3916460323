"""Rows for tokens that are added to a pretrained model's tokenizer."""

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.safe_io import read_json_object
from jaxlm.data.tokenizer.tokenizer import open_tokenizer
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.source_folder import SourceFolder
from jaxlm.models.base import vocab_axis
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.export import Exporter, model_card
from jaxlm.session.init_from import InitFrom
from tests.answers import write_model, write_tokenizer
from tests.interop.cases import exported

NEW = ["<|im_start|>", "<|im_end|>", "<|tool|>"]
MODEL = LlamaConfig(
    seq_len=32, hidden_dim=32, intermediate_dim=48, num_layers=1, num_heads=4, num_kv_heads=2, initializer_range=0.3
)


def started(folder, num_tokens, **trainer):
    """The plan and the model of a run that starts from a folder with new tokens."""
    tree_ = {
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "data": {"tokenizer": str(folder), "added_tokens": NEW},
        "model": {"seq_len": 32},
        "trainer": {"train_batch_size": 8, **trainer},
    }
    plan = make_plan(decode_run(ConfigSource(tree_), None), "x", num_tokens + len(NEW))
    said: list[str] = []
    with plan.layout.use():
        model, _ = InitFrom().load_weights(plan, said.append)
    return plan, model, said


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bfloat16"])
def test_new_rows_are_the_mean_of_the_others(tmp_path, dtype):
    num_tokens = write_tokenizer(tmp_path)
    made = jax.jit(lambda: MODEL.build(vocab_axis(num_tokens + 40), key=jax.random.key(0)))()  # rows of no token
    exported(tmp_path / "hf", made, MODEL)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / "hf" / name).read_bytes())
    plan, model, said = started(tmp_path, num_tokens, mp=f"p={dtype},c=f32")
    before = {path: np.asarray(tree.raw(leaf), np.float64) for path, leaf in tree.leaves(made)}
    exact, places = dtype == "f32", plan.state_builder.abstract_initial_model
    for (path, leaf), (_, place) in zip(tree.leaves(model), tree.leaves(places), strict=True):
        found = np.asarray(tree.raw(leaf), np.float64)
        assert (tree.raw(leaf).shape, tree.raw(leaf).dtype) == (tree.raw(place).shape, tree.raw(place).dtype)
        assert tree.raw(leaf).sharding.is_equivalent_to(plan.layout.parameter_sharding(leaf.axes), found.ndim)
        old = before[path][:num_tokens] if path in ("tokens.weight", "head.weight") else before[path]
        np.testing.assert_allclose(found[: len(old)], old, rtol=0 if exact else 1e-2)
        if path in ("tokens.weight", "head.weight"):
            mean = np.broadcast_to(old.mean(axis=0), (len(NEW), 32))
            np.testing.assert_allclose(found[num_tokens:], mean, atol=1e-6 if exact else 1e-3)
    assert said[-1] == f"the 3 rows for data.added_tokens are the mean of the {num_tokens} others"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_resizes_to_the_same_model_and_reads_the_export(tmp_path, tied):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write_model(tmp_path / "model", tie_word_embeddings=tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    num_tokens = theirs.get_input_embeddings().num_embeddings
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": NEW})
    theirs.resize_token_embeddings(len(tokenizer), mean_resizing=True)
    plan, model, _ = started(folder, num_tokens)
    grown = open_tokenizer(str(folder), NEW, None)
    assert grown.vocab_size == len(tokenizer)
    exporter = Exporter(plan, grown, SourceFolder(read_json_object(folder / "config.json")), np.float32)
    exporter.write(tmp_path / "export", model, plan.model, model_card(plan, plan.model, None, {}))
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert ours.config.vocab_size == len(tokenizer)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        # transformers draws the new rows around the mean, with a billionth of the rows' covariance.
        rows = slice(0, num_tokens) if array.shape[0] == len(tokenizer) else slice(None)
        torch.testing.assert_close(found[name][rows], array[rows], rtol=0, atol=0)
        torch.testing.assert_close(found[name], array, rtol=0, atol=5e-5)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    text = "<|im_start|>user\nWhat is the capital?<|im_end|><|tool|>"
    assert exported.encode(text) == tokenizer.encode(text)
    ids = torch.tensor([exported.encode(text)])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=5e-3)
