"""The section `refs`: which models are opened, and which are refused, before anything is compiled."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.train_bpe import train_bpe
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.base import vocab_axis
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.init_from import import_notes
from jaxlm.session.references import check_references, flops_per_token, load_references
from jaxlm.session.resume_checks import SavedRun, check_same_run
from tests.data.helpers import some_text
from tests.engine.helpers import one_device

STUDENT = {"seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4}
TEACHER = LlamaConfig(
    seq_len=24, hidden_dim=64, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, initializer_range=0.5
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([some_text(seed) for seed in range(20)], 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A teacher in Hugging Face format, with more embedding rows than the tokenizer has tokens."""
    folder = tmp_path_factory.mktemp("teacher") / "hf"
    model = jax.jit(lambda: TEACHER.build(vocab_axis(tokenizer.vocab_size + 12), key=jax.random.key(1)))()
    files = tokenizer.files(max_length=24)
    save_folder(folder, model, TEACHER, one_device(), dtype=np.float32, files=files, special_ids={})
    return folder


def plan_of(folder, tokenizer, *, vocab=None, **sections):
    refs = {"teacher": {"type": "hf", "path": str(folder)}}
    changes = {"objective": {"type": "distill"}, "refs": refs} | sections
    config = {"model": STUDENT, "trainer": {"id": "x", "train_batch_size": 16}, **changes}
    return make_plan(decode_run(ConfigSource(config), None), "x", vocab or tokenizer.vocab_size)


def check(plan, tokenizer):
    lines = []
    check_references(plan, tokenizer, lines.append)
    return "\n".join(lines)


@pytest.mark.slow
def test_the_shapes_of_a_teacher_need_no_device(folder, tokenizer, monkeypatch):
    """The devices of a forecast cannot run anything, so everything must be traced."""
    make_key = jax.random.key

    def traced_key(seed):
        key = make_key(seed)
        assert isinstance(key, jax.core.Tracer)
        return key

    plan = plan_of(folder, tokenizer)
    monkeypatch.setattr(jax.random, "key", traced_key)
    assert tree.num_parameters(plan.refs["teacher"].abstract(plan.state_builder.Vocab)) > 0


def test_flops_count_the_forward_pass_of_a_teacher_in_the_step(folder, tokenizer):
    plan = plan_of(folder, tokenizer)
    # Weights in matrix products: 2 FLOPs each; attention: 4 per head feature and key, half of 16 keys on average.
    weights = 2 * (2 * 64 * (4 + 2) * 16 + 3 * 64 * 64) + tokenizer.vocab_size * 64
    forward = 2 * weights + 2 * 4 * 64 * 16 / 2
    alone = plan.config.model.flops_per_token(tokenizer.vocab_size).causal
    assert flops_per_token(plan, plan.phases[0]).causal == pytest.approx(alone + forward)
    cached = plan_of(folder, tokenizer, objective={"type": "distill", "top_k": 4, "cache": True})
    assert flops_per_token(cached, cached.phases[0]).causal == alone


def test_flops_do_not_count_a_teacher_that_is_no_longer_read(folder, tokenizer, tmp_path):
    plan = plan_of(folder, tokenizer, refs={"teacher": {"type": "hf", "path": str(tmp_path / "gone")}})
    left = dataclasses.replace(plan, retired_refs={"teacher": {}})
    assert flops_per_token(left, left.phases[0]) == plan.config.model.flops_per_token(tokenizer.vocab_size)


@pytest.mark.slow
def test_flops_do_not_count_the_gradients_of_frozen_matrices(folder, tokenizer):
    lora = [{"type": "lora", "target": "attn|mlp", "rank": 2}]
    layer, table = 4 * 32 * 32 + 3 * 32 * 48, tokenizer.vocab_size * 32

    def counted(trainable, **sections):
        phases = [{"name": "train", "surgery": lora, "trainable": [trainable]}]
        plan = plan_of(folder, tokenizer, **{"refs": {}, "objective": {}, "phases": phases} | sections)
        return flops_per_token(plan, plan.phases[0]).causal

    alone = plan_of(folder, tokenizer, refs={}, objective={}).config.model.flops_per_token(tokenizer.vocab_size).causal
    assert counted(".") == alone
    assert counted(r"\.[ab]$") == alone - 2 * (layer + table)
    assert counted("head") == alone - 2 * layer
    for kind in ("nf4", "int8"):  # what is stored in few bits is frozen too
        stored = [{"name": "train", "surgery": [{"type": "quantize", "kind": kind}, *lora], "trainable": [r"\.[ab]$"]}]
        assert counted("", phases=stored) == alone - 2 * (layer + table)
    tied = {"model": STUDENT | {"tie_word_embeddings": True}}
    assert counted("tokens", **tied) == alone - 2 * layer
    assert counted(r"\.[ab]$", **tied) == alone - 2 * (layer + table)
    held = {"data": {"type": "pairs"}, "objective": {"type": "dpo"}}
    forward = alone / 3  # of the model without its adapters, which is the reference
    assert counted(r"\.[ab]$", **held) == pytest.approx(alone - 2 * (layer + table) + forward)


def test_a_teacher_is_loaded_in_its_own_dtype_sharded_like_parameters(folder, tokenizer):
    plan = plan_of(folder, tokenizer)
    assert check(plan, tokenizer) == ""
    with plan.layout.use():
        teacher = load_references(plan, plan.phases[0], lambda _: None)["teacher"]
        logits = teacher.logits(states_for(teacher))
    assert {leaf.dtype for _, leaf in tree.leaves(teacher) if tree.is_inexact(leaf)} == {jnp.dtype("bfloat16")}
    assert teacher.Vocab.size == tokenizer.vocab_size
    assert logits.resolve_axis("vocab").size == tokenizer.vocab_size
    paths = {path: tree.raw(leaf) for path, leaf in tree.leaves(teacher)}
    query = next(array for path, array in paths.items() if path.endswith("q_proj.weight"))
    assert not query.sharding.is_fully_replicated


def states_for(model):
    import haliax as hax

    return hax.zeros((hax.Axis("batch", 8), hax.Axis("embed", 64)), dtype=jnp.bfloat16)


def test_the_dtype_is_a_key(folder, tokenizer):
    refs = {"teacher": {"type": "hf", "path": str(folder), "dtype": "float32"}}
    plan = plan_of(folder, tokenizer, refs=refs)
    abstract = plan.refs["teacher"].abstract(plan.state_builder.Vocab)
    assert {leaf.dtype for _, leaf in tree.leaves(abstract) if tree.is_inexact(leaf)} == {jnp.dtype("float32")}
    with pytest.raises(ConfigError, match=r"refs.teacher.dtype: 'int8' given"):
        plan_of(folder, tokenizer, refs={"teacher": {**refs["teacher"], "dtype": "int8"}})


@pytest.mark.slow
def test_a_key_of_a_teachers_config_is_skipped_on_request(folder, tokenizer, tmp_path):
    """Then it is the same teacher as without the key, with another identity than that of the folder read in full."""
    theirs = shutil.copytree(folder, tmp_path / "hf")
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(content | {"logit_scale": 0.1, "unknown": 1}))
    ref = {"type": "hf", "path": str(theirs), "dtype": "float32"}
    with pytest.raises(ConfigError, match=r"set hf_skip_keys: \[logit_scale\] \(skip_keys in refs\)"):
        check(plan_of(theirs, tokenizer, refs={"teacher": ref}), tokenizer)
    with pytest.raises(ConfigError, match=r"refs\.teacher\.skip_keys: 'logit_scales' given, but .* has no such key"):
        check(plan_of(theirs, tokenizer, refs={"teacher": {**ref, "skip_keys": ["logit_scales"]}}), tokenizer)
    plans = [
        plan_of(theirs, tokenizer, refs={"teacher": {**ref, "skip_keys": ["logit_scale"]}}),
        plan_of(folder, tokenizer, refs={"teacher": {**ref, "path": str(folder)}}),
    ]
    logits, log = [], []
    for plan in plans:
        with plan.layout.use():
            teacher = load_references(plan, plan.phases[0], log.append)["teacher"]
            logits.append(teacher.logits(states_for(teacher)).array)
    np.testing.assert_array_equal(*logits)
    assert [line for line in log if "unknown: 1" in line] == [f"note: {note}" for note in import_notes(plans[0])]
    skipping = plans[0].refs["teacher"].identity()["config"]
    (theirs / "config.json").write_text(json.dumps(content | {"logit_scale": 0, "unknown": 1}))
    assert plan_of(theirs, tokenizer, refs={"teacher": ref}).refs["teacher"].identity()["config"] != skipping


def test_weights_of_other_programs_are_renamed(folder, tokenizer, tmp_path):
    """A torch file with other names, as `weight_names` says."""
    torch = pytest.importorskip("torch")
    from safetensors.numpy import load_file

    content = load_file(folder / "model.safetensors")
    theirs = {f"net.{name}": torch.from_numpy(np.ascontiguousarray(a)) for name, a in content.items()}
    shutil.copy(folder / "config.json", tmp_path)
    torch.save(theirs, tmp_path / "pytorch_model.bin")
    refs = {"teacher": {"type": "hf", "path": str(tmp_path), "weight_names": {r"net\.(.*)": r"\1"}}}
    plan, plain = plan_of(folder, tokenizer, refs=refs), plan_of(folder, tokenizer)
    assert "has no tokenizer, so only the size of its vocabulary was checked" in check(plan, tokenizer)
    with plan.layout.use():
        found, expected = (load_references(p, p.phases[0], lambda _: None) for p in (plan, plain))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_another_tokenizer_is_refused(folder):
    other = train_bpe([some_text(seed) for seed in range(200, 220)], 300)
    with pytest.raises(ConfigError, match=r"another tokenizer: token \d+ is '.*' there, and '.*' in data.tokenizer"):
        check(plan_of(folder, other), other)


def test_a_teacher_that_does_not_fit_is_refused(folder, tokenizer):
    with pytest.raises(ConfigError, match=r"has a vocabulary of 312 tokens, but the tokenizer of this run has 400"):
        check(plan_of(folder, tokenizer, vocab=400), tokenizer)
    with pytest.raises(ConfigError, match=r"at most 24 tokens at once, but model.seq_len is 32"):
        check(plan_of(folder, tokenizer, model={**STUDENT, "seq_len": 32}), tokenizer)
    missing = {"teacher": {"type": "hf", "path": str(folder / "none")}}
    with pytest.raises(ConfigError, match=r"refs.teacher.path: .* is not a folder"):
        check(plan_of(folder, tokenizer, refs=missing), tokenizer)
    trainer = {"id": "x", "train_batch_size": 16, "model_axis_size": 4, "tensor_parallel_axes": ["heads"]}
    with pytest.raises(ConfigError, match=r"axis 'kv_heads' has 2 entries, which do not divide over the 4 devices"):
        check(plan_of(folder, tokenizer, trainer=trainer), tokenizer)


def test_names_must_match_what_the_objective_asks(folder, tokenizer):
    refs = {"big": {"type": "hf", "path": str(folder)}}
    with pytest.raises(ConfigError, match=r"phase 'train' uses the model 'teacher', but the section only has: big"):
        plan_of(folder, tokenizer, refs=refs)
    with pytest.raises(ConfigError, match=r"uses the model 'teacher', but the section is empty"):
        plan_of(folder, tokenizer, refs={})
    with pytest.raises(
        ConfigError, match=r"refs.teacher: not used, because no objective, surgery or evaluation uses one"
    ):
        plan_of(folder, tokenizer, objective={"type": "next_token"})


def test_another_teacher_on_resume_is_refused(folder, tokenizer, tmp_path, monkeypatch):
    plan = plan_of(folder, tokenizer)
    identity = {"teacher": plan.refs["teacher"].identity()}
    monkeypatch.setattr("jaxlm.session.resume_checks.data_identity", lambda plan: {})

    def resumed_with(path):
        saved = SavedRun("s", plan.config, {}, identity)
        monkeypatch.setattr("jaxlm.session.resume_checks.load_saved_run", lambda plan: saved)
        return check_same_run(plan_of(path, tokenizer)).config

    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    assert resumed_with(copied) == plan.config  # by content, not by path
    content = bytearray((copied / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copied / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"refs\.teacher\.weights: \w+ -> \w+"):
        resumed_with(copied)
    config = json.loads((folder / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    with pytest.raises(ConfigError, match=r"refs\.teacher\.config: \w+ -> \w+"):
        resumed_with(copied)
    shutil.rmtree(copied)
    with pytest.raises(ConfigError, match=r"refs.teacher.path: .* is not a folder"):
        resumed_with(copied)
