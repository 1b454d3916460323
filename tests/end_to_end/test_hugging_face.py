"""A run that starts from a Hugging Face folder, writes such folders, and is converted to one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.commands import convert
from jaxlm.core.errors import ConfigError
from jaxlm.core.tree import leaves
from jaxlm.interop.hf import load
from jaxlm.interop.hf.families.qwen3 import Qwen3Config
from jaxlm.interop.hf.folder import open_folder, save_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.models.base import ModelConfig, vocab_axis
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.init_from import InitFrom
from tests.engine.helpers import one_device
from tests.interop.multimodal import saved
from tests.session.test_multimodal_run import write_tokenizer
from tests.small_runs import MODELS
from tests.tiers import one_of

SIZES = {
    "seq_len": 64,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
MODEL = Qwen3Config(**SIZES)
FROM = """
initialize_from_hf: {folder}
use_hf_model_config: true
"""


def write_folder(folder, tokenizer, vocab):
    model = jax.jit(lambda: MODEL.build(vocab_axis(vocab), key=jax.random.key(7)))()
    files = tokenizer.files(max_length=64) | {"chat_template.jinja": b"{{ messages }}"}
    save_folder(folder, model, MODEL, one_device(), dtype=np.float32, files=files, special_ids={})


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder with a tokenizer of 300 tokens and an embedding of 320 rows."""
    from jaxlm.data.tokens import TokensConfig

    place = tmp_path_factory.mktemp("imported")
    (place / "text.txt").write_text("some text to make a tokenizer of " * 50)
    data = TokensConfig(train_urls=[f"{place}/text.txt"], cache_dir=f"{place}/cache", vocab_size=270)
    tokenizer = data.corpus.load_tokenizer(log=lambda _: None)
    write_folder(place / "hf", tokenizer, tokenizer.vocab_size + 20)
    return place / "hf"


@pytest.mark.slow
def test_the_model_section_overrides_the_folders_config(imported):
    tree = {
        "initialize_from_hf": True,
        "use_hf_model_config": True,
        "data": {"tokenizer": str(imported)},
        "model": {"seq_len": 16},
    }
    config = decode_run(ConfigSource(tree), None)
    assert config.model == Qwen3Config(**{**MODEL.__dict__, "seq_len": 16})
    assert not config.use_hf_model_config, "what is saved needs no other files"
    with pytest.raises(ConfigError, match=r"model\.type: llama given, but .* contains a qwen3"):
        decode_run(ConfigSource({**tree, "model": {"type": "llama"}}), None)
    with pytest.raises(ConfigError, match="without initialize_from_hf"):
        decode_run(ConfigSource({"use_hf_model_config": True}), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hf_save_steps": 0}, "hf_save_steps: 0 given"),
        ({"hf_save_dtype": "int8"}, "hf_save_dtype: 'int8' given. Allowed: bfloat16, float16, float32"),
        ({"hf_weight_names": {"a": "b"}}, "hf_weight_names: given without initialize_from_hf"),
        ({"hf_skip_keys": ["a"]}, "hf_skip_keys: given without initialize_from_hf"),
        ({"initialize_from_hf": "folder"}, "data.tokenizer trains a new one"),
        ({"initialize_from_hf": True}, "but that is 'bpe'"),
    ],
    ids=str,
)
def test_impossible_imports_are_refused_before_anything_is_done(change, message):
    model = {"seq_len": 16, "hidden_dim": 32, "intermediate_dim": 32, "num_layers": 1, "num_heads": 4}
    tree = {"model": model, "trainer": {"train_batch_size": 8}, **change}
    with pytest.raises(ConfigError, match=message):
        make_plan(decode_run(ConfigSource(tree), None), "x", 64)


def test_hf_weight_names_rename_a_files_tensors(imported, tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(imported / "model.safetensors")
    save_file({f"net.{name}": array for name, array in tensors.items()}, tmp_path / "renamed.safetensors")
    tree = {
        "initialize_from_hf": f"{tmp_path}/renamed.safetensors",
        "hf_weight_names": {r"net\.(.*)": r"\1"},
        "data": {"tokenizer": str(imported)},
        "model": {"type": "qwen3", **SIZES},
        "trainer": {"train_batch_size": 8},
    }
    plan = make_plan(decode_run(ConfigSource(tree), None), "x", open_folder(imported).vocab_size)
    with plan.layout.use():
        model, _ = InitFrom().load_weights(plan, print)
    assert model is not None
    np.testing.assert_array_equal(model.lm_head().array, tensors["model.embed_tokens.weight"])


@pytest.mark.slow
def test_weights_are_stored_layer_by_layer_when_they_are_read(imported, monkeypatch):
    """The same bits as of the whole model after the surgery, without ever holding two layers of a matrix as floats."""
    shapes: list[tuple[int, ...]] = []
    load_sharded = load._load_sharded

    def recorded(leaf, *arguments):
        shapes.append(leaf.array.shape)
        return load_sharded(leaf, *arguments)

    monkeypatch.setattr(load, "_load_sharded", recorded)
    tree = {
        "initialize_from_hf": str(imported),
        "data": {"tokenizer": str(imported)},
        "model": {"type": "qwen3", **SIZES},
        "trainer": {"train_batch_size": 8},
    }
    phases = [{"name": "p", "surgery": [{"type": "quantize"}], "trainable": ["norm"]}]
    plan, plain = (
        make_plan(decode_run(ConfigSource({**tree, **more}), None), "x", open_folder(imported).vocab_size)
        for more in ({"phases": phases}, {})
    )
    with plan.layout.use():
        model, num_applied = InitFrom().load_weights(plan, print)
        matrices = [shape for shape in shapes if len(shape) > 2]
        assert len(matrices) == 2 * 7
        assert {shape[0] for shape in matrices} == {1}
        whole, none_applied = InitFrom().load_weights(plain, print)
        expected = jax.jit(lambda model: plan.phases[0].surgeries[0].apply(model, key=jax.random.key(0)))(whole)
    assert (num_applied, none_applied) == (1, 0)
    for (path, ours), (_, theirs) in zip(leaves(model), leaves(expected), strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-6, err_msg=path)
        assert ours.array.sharding == plan.layout.parameter_sharding(ours.axes)


@pytest.mark.slow
def test_import_and_export_round_trip(imported, workplace, in_process):
    """One step with learning rate 0: the export equals the import, without embedding rows beyond the tokenizer."""
    place = workplace()
    text = place.write(FROM.format(folder=imported)).read_text()
    text = text[: text.index("model:")] + "model: {seq_len: 32}\n" + text[text.index("trainer:") :]
    text = text.replace("  vocab_size: 300\n", f"  tokenizer: {imported}\n").replace("1.0e-2, warmup: 2", "0.0")
    text = text.replace(f"cache_dir: {place.cache}\n", "cache_dir: cache\n")
    (place.folder / "run.yaml").write_text(text)
    options = ("--hf_save_path", "exports", "--hf_save_steps", "1", "--hf_save_dtype", "bfloat16")
    result = place.finish("--config_path", "run.yaml", "--trainer.num_train_steps", "2", *options)
    assert "weights: " in result.out
    exports = place.folder / "exports"
    assert sorted(p.name for p in exports.iterdir()) == ["step-1", "step-2"]
    before, after = (SafetensorsFile(f / "model.safetensors") for f in (imported, exports / "step-2"))
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        theirs, ours = before.view(name), after.view(name)
        assert (theirs.dtype.name, ours.dtype.name) == ("float32", "bfloat16")
        np.testing.assert_array_equal(ours, theirs[: len(ours)].astype(ours.dtype), err_msg=name)
    assert open_folder(exports / "step-2").vocab_size == open_folder(imported).vocab_size - 20
    assert (exports / "step-2" / "chat_template.jinja").read_text() == "{{ messages }}"
    (metrics,) = (place.folder / "logs").glob("*/metrics.jsonl")
    losses = [record["eval/loss"] for record in map(json.loads, metrics.open()) if "eval/loss" in record]
    card = (exports / "step-2" / "README.md").read_text()
    for row in ("steps | 2 of 2", "hardware | 1 x cpu", f"eval/loss | {losses[-1]:.4f}"):
        assert f"| {row} |" in card

    arguments = ("to-hf", "--checkpoint", "checkpoints/run", "--output_dir", "out", "--verify", "true")
    result = place.finish(*arguments, module="jaxlm.commands.convert")
    assert "verified with" in result.out
    converted = (place.folder / "out" / "README.md").read_text()
    assert converted == card.replace("| hardware | 1 x cpu |\n", ""), "the same run, on other hardware"
    assert json.loads((place.folder / "out" / "config.json").read_text())["max_position_embeddings"] == 64
    again = in_process(convert.main, place, *arguments)
    assert (again.code, "already exists. Choose another folder" in again.err) == (2, True)
    (place.folder / "adapters").mkdir()
    (place.folder / "adapters" / "adapter_config.json").write_text("{}")
    inside = in_process(convert.main, place, *arguments[:3], "--output_dir", "checkpoints/run/step-2/hf")
    assert (inside.code, "checkpoints/run/step-2/hf is inside the checkpoint" in inside.err) == (2, True), inside.err
    only = in_process(convert.main, place, "to-hf", "--checkpoint", "adapters", "--output_dir", "o3")
    assert (only.code, "it has only adapters. Set --checkpoint to the model" in only.err) == (2, True), only.err
    adapters = in_process(convert.main, place, *arguments[:3], "--output_dir", "o2", "--adapters", "only")
    assert (adapters.code, "has no adapters" in adapters.err) == (2, True)


def bfloat16_arrays(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(jnp.bfloat16) for name, shape in shapes.items()}


def layer_behind_the_last(layers):
    """A whole layer as GLM-4.5 has it, which predicts one token more. Args: layers: shapes of the model's tensors."""
    own = {
        "eh_proj": (32, 64),
        "enorm": (32,),
        "hnorm": (32,),
        "shared_head.norm": (32,),
        "shared_head.head": (300, 32),
    }
    shapes = {f"model.layers.2.{name}.weight": shape for name, shape in own.items()}
    shapes |= {n.replace(".layers.1.", ".layers.2."): shape for n, shape in layers.items() if ".layers.1." in n}
    arrays = bfloat16_arrays(shapes)
    (bias,) = (name for name in arrays if name.endswith("correction_bias"))
    return arrays | {bias: arrays[bias].astype(np.float32)}


def module_beside_the_model(layers):
    """The same of Qwen3.5."""
    block = {f"mtp.{n[6:].replace('.1.', '.0.')}": shape for n, shape in layers.items() if ".layers.1." in n}
    norms = dict.fromkeys(
        ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"), (32,)
    )
    return bfloat16_arrays({"mtp.fc.weight": (32, 64), **norms, **block})


SOURCES = ["gemma3", "qwen3_5"]  # with a vision tower; with one, and with layers that predict further tokens (MTP)
FURTHER = {
    # In files, the width of shared experts is a multiple of that of the others.
    "glm4_moe": ("num_nextn_predict_layers", layer_behind_the_last, {"shared_expert_intermediate_dim": 48}),
    "glm4_moe_lite": ("num_nextn_predict_layers", layer_behind_the_last, {"shared_expert_intermediate_dim": 48}),
    "qwen3_5": ("mtp_num_hidden_layers", module_beside_the_model, {}),
}


def write_further(folder, imported, kind):
    """A folder with layers that predict further tokens. Returns all of its tensors, and those of these layers."""
    key, make, keys = FURTHER[kind]
    vocab = open_folder(imported).vocab_size - 20
    config = decode(ModelConfig, ConfigSource(MODELS[kind] | keys | {"seq_len": 32}))
    model = jax.jit(lambda: config.build(vocab_axis(vocab), key=jax.random.key(7)))()
    files = {path.name: path.read_bytes() for path in imported.glob("tokenizer*.json")}
    save_folder(folder, model, config, one_device(), dtype=jnp.bfloat16, files=files, special_ids={})
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {key: 1}))
    file = SafetensorsFile(folder / "model.safetensors")
    further = make({name: info.shape for name, info in file.tensors.items()})
    arrays = {name: np.array(file.view(name)) for name in file.tensors} | further
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(folder / "model.safetensors", infos, arrays.values())
    return arrays, further


def exported_after_three_steps(place, folder, *words):
    write_start_of(place, folder)
    place.finish("--config_path", "run.yaml", "--trainer.num_train_steps", "3", "--hf_save_path", "exports", *words)
    out = place.folder / "exports" / "step-3"
    return SafetensorsFile(out / "model.safetensors"), json.loads((out / "config.json").read_text())


@pytest.mark.soak
@pytest.mark.parametrize("kind", one_of(FURTHER))
def test_layers_that_predict_further_tokens_survive_training(imported, kind, workplace):
    place = workplace()
    arrays, further = write_further(folder := place.folder / "hf", imported, kind)
    after, config = exported_after_three_steps(place, folder)
    assert after.tensors.keys() == arrays.keys()
    for name, array in further.items():
        assert after.tensors[name] == TensorInfo(array.shape, array.dtype), name
        assert after.view(name).tobytes() == array.tobytes(), name
    moved = {name for name in arrays if (np.asarray(after.view(name)) != arrays[name]).any()}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= moved
    assert config[FURTHER[kind][0]] == 1


@pytest.mark.slow
def test_a_layer_that_predicts_further_tokens_trains_with_the_model(imported, workplace):
    place = workplace()
    arrays, _ = write_further(folder := place.folder / "hf", imported, "qwen3_5")
    after, config = exported_after_three_steps(place, folder, "--model.mtp", "true", "--objective.mtp_weight", "0.3")
    assert after.tensors.keys() == arrays.keys()
    moved = {name for name in arrays if (np.asarray(after.view(name)) != arrays[name]).any()}
    assert {name for name in arrays if name.startswith("mtp.")} <= moved
    assert config["mtp_num_hidden_layers"] == 1
    metrics = [json.loads(line) for line in (place.folder / "logs/run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "train/loss" in line]
    assert all(line["train/mtp_loss"] > 0 and "train/mtp_accuracy" in line for line in steps)
    assert len(steps) == 3


def write_start_of(place, folder):
    """The YAML of a run that starts from a folder, with its tokenizer. A cache of tokens has those of one tokenizer."""
    text = place.write(FROM.format(folder=folder)).read_text()
    text = text[: text.index("model:")] + text[text.index("trainer:") :]
    text = text.replace(f"cache_dir: {place.cache}\n", "cache_dir: cache\n")
    (place.folder / "run.yaml").write_text(text.replace("  vocab_size: 300\n", f"  tokenizer: {folder}\n"))


@pytest.fixture(params=one_of([*SOURCES, "without a source"]))
def source(request, tmp_path):
    """A folder with parts that exports copy; None for a model with random weights."""
    if request.param not in SOURCES:
        return None
    pytest.importorskip("transformers")
    folder = saved(request.param, tmp_path / "hf")
    write_tokenizer(folder)
    return folder


@pytest.mark.slow
def test_two_processes_write_the_same_files_as_one(workplace, source):
    """The weights are sharded over both; process 0 writes all of them, and nothing else differs."""
    whole, halves = workplace(4), workplace(2)
    options = ("--hf_save_path", "exports", "--trainer.num_train_steps", "1", "--trainer.fsdp_axis", "[embed, mlp]")
    for place, processes in ((whole, 1), (halves, 2)):
        place.write()
        if source:
            write_start_of(place, source)
        command = ("--config_path", "run.yaml", "--optimizer.learning_rate", "0.0", *options)
        ends = place.run_all(processes, *command)
        assert [end.code for end in ends] == [0] * processes, ends[0].err
    exports = [place.folder / "exports" / "step-1" for place in (whole, halves)]
    names = [sorted(path.name for path in folder.iterdir()) for folder in exports]
    assert names[0] == names[1]
    assert "model.safetensors" in names[0]
    for name in names[0]:
        assert (exports[0] / name).read_bytes() == (exports[1] / name).read_bytes(), name
    assert sorted(path.name for path in exports[1].parent.iterdir()) == ["step-1"]
    if source:
        before, after = (SafetensorsFile(folder / "model.safetensors") for folder in (source, exports[1]))
        assert before.tensors.keys() == after.tensors.keys()
        for name in before.tensors:
            assert before.view(name).tobytes() == after.view(name).tobytes(), name
        assert json.loads((exports[1] / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.soak
def test_a_run_does_not_leave_the_exports_of_another_in_the_place_of_its_own(workplace):
    place = workplace()
    place.write()
    run = ("--config_path", "run.yaml", "--trainer.num_train_steps", "2", "--hf_save_path", "exports")
    assert place.run(*run).code == 0
    weights = (place.folder / "exports" / "step-2" / "model.safetensors").read_bytes()
    for words in ((), ("--dry_run", "true")):
        result = place.run(*run, "--trainer.id", "other", "--trainer.seed", "5", *words)
        assert result.code == 2, result.err
        assert "hf_save_path: exports/step-2 exists, and this run, which has no checkpoint" in result.err + result.out
        assert not list((place.folder / "logs").glob("other/*.json*")), "no record of a run"
        assert not (place.folder / "checkpoints" / "other").exists()
    assert (place.folder / "exports" / "step-2" / "model.safetensors").read_bytes() == weights
    assert place.run(*run).code == 0, "the run that has written them goes on"


@pytest.mark.soak
def test_an_export_that_cannot_be_written_does_not_end_the_run(workplace):
    place = workplace()
    place.write()
    (place.folder / "file").write_text("")
    run = ("--config_path", "run.yaml", "--trainer.num_train_steps", "2", "--hf_save_path", "file/exports")
    result = place.finish(*run)
    assert "step 2: not exported: cannot write file/exports/step-2 (" in result.out + result.err
    assert place.checkpoints() == ["step-2"]
    converted = ("to-hf", "--checkpoint", "checkpoints/run", "--output_dir", "file/converted")
    result = place.run(*converted, module="jaxlm.commands.convert")
    assert (result.code, result.err.startswith("error: cannot write file/converted (")) == (1, True), result.err
