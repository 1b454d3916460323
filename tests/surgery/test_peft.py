"""LoRA on instructions: merging, and export to and import from PEFT."""

import importlib.util
import json
import math
import shutil
from pathlib import Path
from unittest import mock

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.commands import convert
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.engine.entry import enter_phase
from jaxlm.engine.state import place_state
from jaxlm.interop.hf.families.gpt_neox import GptNeoxConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.interop.peft.names import Arrays, AxisSizes, BaseRows, FusedMatrix
from jaxlm.interop.peft.read import lora_keys, read_adapters
from jaxlm.models.base import Inputs
from jaxlm.observe.trackers import read_jsonl
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.inference_model import load
from jaxlm.session.load_model import open_model
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.lora import add_adapters, save_peft
from jaxlm.train import train
from tests.answers import LLAMA, write_instructions, write_model, write_tokenizer
from tests.processes import together
from tests.tiers import one_of

SIZES = {"seq_len": 64, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
LORA = {"type": "lora", "target": "q_proj|v_proj|mlp", "rank": 4, "alpha": 8.0, "dropout": 0.1}
PHASE = {"name": "lora", "surgery": [LORA], "trainable": [r"\.[ab]$"]}
DOLLY = Path(__file__).parents[3] / "shared" / "data" / "dolly_instructions_700.jsonl"


def busy(model):
    """Makes adapters that have an effect."""

    def fill(path, leaf):
        if not path.endswith((".a", ".b")):
            return leaf
        drawn = np.random.default_rng(len(path)).normal(0, 0.1, leaf.array.shape)
        return hax.named(jnp.asarray(drawn, jnp.float32), leaf.axes)

    return tree.map_leaves(fill, model)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A plan, its model with random adapters, and the folder to which they were exported."""
    config = {"model": {"type": "llama", **SIZES}, "phases": [PHASE], "trainer": {"train_batch_size": 8}}
    plan = make_plan(decode_run(ConfigSource(config), None), "x", 61)
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    with plan.layout.use():
        plain = place_state(plan.state_builder.initial_model, plan.state_builder.abstract_initial_model, plan.layout)
        change = lambda model: busy(lora_of(plan).apply(model, key=jax.random.key(1)))  # noqa: E731
        model = jax.jit(change)(plain)
        save_adapters_of(model, folder, plan)
    return plan, plain, model, folder


def lora_of(plan):
    return plan.phases[0].surgeries[0]


def save_adapters_of(model, folder, plan):
    save_peft(folder, model, plan.config.model, plan.layout, dtype=jnp.float32, base="base")


@pytest.mark.slow
def test_a_base_that_cannot_be_read_ends_every_process(adapted, tmp_path):
    """Process 0 alone reads it; the others must not take the adapters for written."""
    plan, _, model, _ = adapted
    rows = BaseRows("base", 10**6, mock.Mock(side_effect=ConfigError("base: gone")))

    def write() -> None:
        saved, options = ["^tokens"], {"dtype": jnp.float32, "base": "base"}
        with plan.layout.use():
            save_peft(tmp_path / "adapter", model, plan.config.model, plan.layout, saved=saved, rows=rows, **options)

    ends = together(write, write)
    assert [(type(end), str(end)) for end in ends] == [
        (ConfigError, "base: gone"),
        (ConfigError, "process 0: base: gone"),
    ]
    assert rows.open.call_count == 1
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_adapters_come_back_from_peft_bit_for_bit(adapted):
    plan, plain, model, folder = adapted
    with plan.layout.use():
        again = add_adapters(plain, folder, plan.config.model, plan.layout)
    for (path, ours), (same_path, expected) in zip(tree.leaves(again), tree.leaves(model), strict=True):
        assert path == same_path
        np.testing.assert_array_equal(ours.array, expected.array, err_msg=path)
    a = next(leaf for path, leaf in tree.leaves(again) if path.endswith("mlp.up_proj.a"))
    assert not a.array.sharding.is_fully_replicated, "it rests as its axes say"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3' given, 'LORA' expected"),
        ({"bias": "some"}, "bias: 'some' given, 'none' expected"),
        ({"lora_bias": True}, "lora_bias: True given, null expected"),
        ({"use_dora": True}, r"missing: .*q_proj\.lora_magnitude_vector"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj.*in the file, but .* rank 2 expected"),
        ({"rank_pattern": {"(q_proj": 2}}, "rank_pattern: '.q_proj' is not a valid regular expression"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern.q_proj: 0 given, a positive number expected"),
        ({"init_lora_weights": "pissa_niter_4"}, "also changes the base model"),
        ({"r": None}, "r: None given, a positive integer expected"),
        ({"r": True}, "r: True given, a positive integer expected"),
        ({"rank_pattern": {"q_proj": 2.0}}, "rank_pattern.q_proj: 2.0 given, a positive integer expected"),
        ({"target_parameters": 5}, "target_parameters: 5 given, a list of names or null expected"),
        ({"lora_dropout": math.nan}, r"lora_dropout: nan given, a number in \[0, 1\) expected"),
        ({"r": 3}, r"\[4, .*\] in the file, but .* rank 3 expected"),
    ],
    ids=str,
)
def test_unsupported_lora_variants_are_refused(adapted, tmp_path, settings, message):
    plan, plain, _, folder = adapted
    written = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(written | settings))
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    with plan.layout.use(), pytest.raises(ConfigError, match=message):
        add_adapters(plain, tmp_path, plan.config.model, plan.layout)


@pytest.mark.slow
def test_adapters_of_another_model_are_refused(adapted, tmp_path):
    plan, plain, _, folder = adapted
    config = type(plan.config.model)(**{**SIZES, "num_layers": 1})
    with pytest.raises(ConfigError, match="belong to no layer"):
        read_adapters(folder, config, AxisSizes({"layers": 1}, {}))
    with plan.layout.use(), pytest.raises(ConfigError, match=r"adapter_config\.json not found"):
        add_adapters(plain, tmp_path, plan.config.model, plan.layout)


def save_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(folder / "adapter_model.safetensors", infos, arrays.values())


Q_PROJ = "base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight"


@pytest.mark.parametrize(
    ("layer", "side", "damage", "message"),
    [
        (0, "A", lambda array: array.astype(np.int32), r"q_proj\.lora_A\.weight: int32 \[3, 32\] in the file"),
        (
            0,
            "B",
            lambda array: array[:, :1],
            r"q_proj\.lora_B\.weight: float32 \[32, 1\] in the file, .* rank 3 expected",
        ),
        (0, "B", lambda array: array[0, 0], r"q_proj\.lora_B\.weight: float32 \[\] in the file"),
        (1, "A", lambda array: array[:, :1], r"q_proj\.lora_A\.weight': shape \[3, 1\], but \[3, 32\] expected"),
        (1, "B", lambda array: array[:1], r"q_proj\.lora_B\.weight': shape \[1, 3\], but \[32, 3\] expected"),
        (1, "A", lambda array: array * np.float32("nan"), r"layers\.1.*q_proj\.lora_A\.weight' has NaN or infinity"),
    ],
    ids=range(6),
)
def test_damaged_arrays_are_refused(tmp_path, layer, side, damage, message):
    """None is broadcast, or filled up with zeros."""
    arrays = write_adapter(tmp_path / "a", [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)])
    name = Q_PROJ.format(layer=layer, side=side)
    save_arrays(tmp_path / "a", arrays | {name: damage(arrays[name])})
    with pytest.raises(ConfigError, match=message):
        read_adapters(tmp_path / "a", LlamaConfig(**SIZES), AxisSizes({"layers": 2}, {}))


def write_adapter(folder: Path, modules: list[str], rank: int = 3) -> dict[str, np.ndarray]:
    """Writes square PEFT adapters for these modules. Returns the file's contents."""
    names = [f"base_model.model.{module}.lora_{side}.weight" for module in modules for side in "AB"]
    shapes = {"A": (rank, 32), "B": (32, rank)}
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shapes[name[-8]]).astype(np.float32) for name in names}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "bias": "none", "r": rank, "lora_alpha": 6})
    )
    save_arrays(folder, arrays)
    return arrays


@pytest.mark.parametrize("config", [MixtralConfig(**SIZES), Qwen3MoeConfig(**SIZES)], ids=lambda c: type(c).__name__)
def test_adapters_of_a_model_with_experts(tmp_path, config):
    attention = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    arrays = write_adapter(tmp_path / "attention", attention)
    read = read_adapters(tmp_path / "attention", config, AxisSizes({"layers": 2}, {}))
    path = "body.layers.stacked.attn.q_proj"
    assert list(read.adapters) == [path]
    for side, found in (("A", read.adapters[path].a), ("B", read.adapters[path].b)):
        expected = [arrays[f"base_model.model.{module}.lora_{side}.weight"] for module in attention]
        np.testing.assert_array_equal(found, np.stack(expected))
    assert lora_keys(tmp_path / "attention", config) == read.keys
    write_adapter(tmp_path / "experts", [*attention, "model.layers.0.mlp.experts.999.w1"])
    with pytest.raises(ConfigError, match=r"experts\.999\.w1\.lora_A\.weight.* belong to no layer"):
        read_adapters(tmp_path / "experts", config, AxisSizes({"layers": 2}, {}))


def test_rows_of_trained_tokens_that_the_model_lacks_are_refused(tmp_path):
    """PEFT makes the rows of an embedding's A zero; those of tokens that are in no text stay so. A head's rows change."""
    attention = write_adapter(tmp_path / "adapter", ["model.layers.0.self_attn.q_proj"])
    prefix, table = "base_model.model", np.zeros((3, 60), np.float32)
    ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
    tokens, head = f"{prefix}.model.embed_tokens.lora_embedding", f"{prefix}.lm_head.lora"
    of_table = {f"{tokens}_A": table, f"{tokens}_B": ones(32, 3)}
    of_head = {f"{head}_A.weight": ones(3, 32), f"{head}_B.weight": ones(60, 3)}
    saved = {f"{prefix}.lm_head.weight": ones(60, 32)}

    def read(arrays):
        infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
        write_safetensors(tmp_path / "adapter" / "adapter_model.safetensors", infos, arrays.values())
        return read_adapters(
            tmp_path / "adapter", LlamaConfig(**SIZES), AxisSizes({"vocab": 50, "embed": 32, "layers": 2}, {})
        ).adapters

    table[:, :50] = 1.0
    adapters = read(attention | of_table | of_head)
    assert (adapters["tokens"].a.shape, adapters["head"].b.shape) == ((3, 50), (50, 3))
    read(attention | saved)
    table[1, 57:59] = 0.5
    with pytest.raises(
        ConfigError, match="the embeddings of 2 tokens that are not among this model's 50: 57 is the first"
    ):
        read(attention | of_table)
    table[1, 57:59] = 0.0
    added = [{"id": 3, "content": "<s>"}, {"id": 51, "content": "<|im_start|>"}]
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    for more in (of_table, of_head, saved):
        with pytest.raises(ConfigError, match=r"tokenizer\.json: '<\|im_start\|>': tokens beyond the 50 of the model"):
            read(attention | more)
    read(attention)


LATENTS = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
EXPERTS = {
    "Mixtral": ({}, ["q_proj", "o_proj"]),
    "Glm4MoeLite": (
        {"num_key_value_heads": LLAMA["num_attention_heads"], "num_experts_per_tok": 2, **LATENTS},
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERTS)
def test_peft_adapters_beside_experts_compute_the_same(tmp_path, kind):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    num_tokens = write_tokenizer(tmp_path / "hf")
    torch.manual_seed(0)
    keys, targets = EXPERTS[kind]
    config = getattr(transformers, f"{kind}Config")(
        **{**LLAMA, "initializer_range": 0.2, "num_local_experts": 4, **keys}, vocab_size=num_tokens, pad_token_id=None
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False)
    theirs = peft.get_peft_model(base, settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    named = open_model(str(tmp_path / "hf"), {}, adapter=str(tmp_path / "adapter"))
    ids = np.random.default_rng(0).integers(0, num_tokens, size=(8, 24))
    with named.plan.layout.use():
        ours = logits_of(named.load(), ids)
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor(ids)).logits.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_peft_adapters_of_layers_with_and_without_experts_compute_the_same(tmp_path):
    """Both ways: PEFT's adapters in jaxlm, and what jaxlm exports in PEFT. The MLP of dense layers and the shared expert of
    the others have modules of the same name."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    num_tokens = write_tokenizer(tmp_path / "hf")
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        **{**LLAMA, "num_hidden_layers": 5, "decoder_sparse_step": 2, "moe_intermediate_size": 24, "num_experts": 4},
        **{"num_experts_per_tok": 2, "shared_expert_intermediate_size": 20, "vocab_size": num_tokens},
        **{"initializer_range": 0.2, "pad_token_id": None},
    )
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "hf")

    def base():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)

    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "gate_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base(), settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    named = open_model(str(tmp_path / "hf"), {}, adapter=str(tmp_path / "adapter"))
    ids = np.random.default_rng(0).integers(0, num_tokens, size=(8, 24))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    with named.plan.layout.use():
        model = named.load()
        np.testing.assert_allclose(logits_of(model, ids), expected, rtol=1e-4, atol=1e-4)
        save_adapters_of(model, tmp_path / "again", named.plan)
    described = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert "layers_to_transform" not in described
    before, after = (SafetensorsFile(tmp_path / side / "adapter_model.safetensors") for side in ("adapter", "again"))
    assert before.tensors == after.tensors
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "again").eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(ids)).logits.numpy(), expected, rtol=1e-5, atol=1e-5)


def begun_from(folder: Path, **keys):
    """A plan of the same model with the adapters of a folder."""
    lora = {"type": "lora", "from_peft": str(folder), **keys}
    config = {
        "model": {"type": "llama", **SIZES},
        "phases": [{**PHASE, "surgery": [lora]}],
        "trainer": {"train_batch_size": 8},
    }
    return make_plan(decode_run(ConfigSource(config), None), "x", 61)


@pytest.mark.slow
def test_a_run_starts_from_peft_adapters_bit_for_bit(adapted, tmp_path):
    _, _, model, folder = adapted
    moved = tmp_path / "adapter"
    shutil.copytree(folder, moved)
    plan = begun_from(moved, rank=4)
    lora = lora_of(plan)
    assert (lora.rank, lora.alpha, lora.dropout, lora.rslora) == (4, 8.0, 0.1, False)
    assert len(plan.state_builder.initial_leaves(plan.phases[0])) == 1
    with plan.layout.use():
        weights = place_state(plan.state_builder.initial_model, plan.state_builder.abstract_initial_model, plan.layout)
        state = enter_phase(plan.state_builder, plan.phases[0], plan.layout, None, weights)()
        for (path, ours), (_, expected) in zip(tree.leaves(state.model), tree.leaves(model), strict=True):
            np.testing.assert_array_equal(ours.array, expected.array, err_msg=path)
        save_adapters_of(state.model, tmp_path / "again", plan)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    shutil.rmtree(moved)
    assert decode_run(ConfigSource(encode(plan.config)), None) == plan.config, "what is saved needs no other files"
    with pytest.raises(ConfigError, match="surgery lora: from_peft: "):
        begun_from(moved)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"alpha": 16.0}, "alpha: 16.0 given, but the folder has 8.0"),
        ({"dropout": 0.0}, "dropout: 0.0 given, but the folder has 0.1"),
        (
            {"target": "q_proj|k_proj|mlp"},
            r"k_proj, which has no adapter in the folder\n.*does not match .*v_proj, which has an adapter",
        ),
    ],
    ids=str,
)
def test_keys_beside_from_peft_must_agree_with_the_folder(adapted, keys, message):
    plan = begun_from(adapted[3], **keys)
    with pytest.raises(ConfigError, match=f"(?s){message}.*Remove these keys"):
        plan.state_builder.initial_leaves(plan.phases[0])


@pytest.mark.slow
def test_training_continues_from_peft(tmp_path):
    """The first step's loss equals that of PEFT's model."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    theirs = peft.get_peft_model(base, settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    instructions = write_instructions(tmp_path / "train.jsonl")
    (record,) = (
        r
        for r in tuned(tmp_path, instructions, 1, {"type": "lora", "from_peft": str(tmp_path / "adapter")})
        if "train/loss" in r
    )
    trained = open_model(str(tmp_path / "checkpoints" / "lora"), {})
    plan = trained.plan
    data = plan.data[0].open(trained.tokenizer, plan.config.model.seq_len, log=lambda _: None)
    sizes = plan.batches.train
    batches = data.batches(sizes, plan.layout, start=0, first_step=0, seed=plan.config.trainer.seed)
    batch = jax.tree.map(np.asarray, next(batches))
    batches.close()
    columns = (batch.tokens, batch.targets, batch.loss_mask, batch.segment_ids)
    rows = zip(*(c.array.reshape(-1, plan.config.model.seq_len) for c in columns), strict=True)
    total = count = 0.0
    for tokens, targets, mask, segments in rows:
        for segment in set(segments[segments != 0].tolist()):
            own = segments == segment
            with torch.no_grad():
                logits = theirs(torch.tensor(tokens[own][None]).long()).logits[0]
            nll = torch.nn.functional.cross_entropy(logits, torch.tensor(targets[own]).long(), reduction="none")
            total += float((nll.numpy() * mask[own]).sum(dtype=np.float64))
            count += mask[own].sum()
    assert count > 50
    assert record["train/loss"] == pytest.approx(total / count, rel=1e-5)


def tuned(
    place: Path, instructions: Path, steps: int, *surgeries: dict, also: str | None = None, learning_rate: float = 1e-2
):
    """Trains as the command does: import, LoRA, loss on answers only, a checkpoint. Args: also: trains too."""
    config = {
        "initialize_from_hf": str(place / "hf"),
        "use_hf_model_config": True,
        "model": {"seq_len": 256},
        "data": {
            "train_urls": [str(instructions)],
            "cache_dir": str(place / "cache"),
            "tokenizer": str(place / "hf"),
            "format": {"type": "supervised"},
        },
        "trainer": {
            "id": "lora",
            "num_train_steps": steps,
            "train_batch_size": 8,
            "log_dir": str(place / "logs"),
            "compilation_cache_dir": None,
            "checkpointer": {"base_path": str(place / "checkpoints")},
        },
        "optimizer": {"learning_rate": learning_rate, "warmup": 0, "weight_decay": 0.0},
        "phases": [
            {
                **PHASE,
                "surgery": list(surgeries or (LORA,)),
                "trainable": [*PHASE["trainable"], *([also] if also else [])],
            }
        ],
        "evals": [],
    }
    train(decode_run(ConfigSource(config), None))
    return read_jsonl(place / "logs" / "lora" / "metrics.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, and the losses of its 30 steps."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "hf")
    records = tuned(folder, write_instructions(folder / "train.jsonl"), 30)
    return folder, [r["train/loss"] for r in records if "train/loss" in r]


@pytest.mark.slow
def test_lora_on_instructions(run, tmp_path):
    folder, losses = run
    assert np.mean(losses[-3:]) < losses[0] - 1.0
    check_trained_adapters(folder, tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(not DOLLY.exists(), reason="data")
def test_lora_on_real_instructions(tmp_path):
    write_model(tmp_path / "hf")
    losses = [r["train/loss"] for r in tuned(tmp_path, DOLLY, 8) if "train/loss" in r]
    assert np.mean(losses[-3:]) < losses[0] - 0.1
    check_trained_adapters(tmp_path, tmp_path)


def check_trained_adapters(folder, tmp_path):
    """The base is bit-equal, the adapters have changed; merged and in PEFT, the model is the same."""
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    trained = open_model(str(folder / "checkpoints" / "lora"), {})
    plan = trained.plan
    with plan.layout.use():
        model = trained.load()
        before = dict(tree.leaves(plan_base(folder / "hf", plan)))
        for path, leaf in tree.leaves(model):
            if path.endswith((".a", ".b")):
                assert np.abs(leaf.array).max() > 0, f"{path} has not moved"
            else:
                expected = before[path.replace(".base.", ".")].array
                np.testing.assert_array_equal(leaf.array, expected, err_msg=path)
        ids = np.random.default_rng(0).integers(0, plan.state_builder.Vocab.size, size=(8, 24))
        ours = logits_of(model, ids)
        np.testing.assert_allclose(logits_of(merge_surgeries(model, trained.surgeries), ids), ours, atol=1e-5)
        save_adapters_of(model, tmp_path / "adapter", plan)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor(ids)).logits.numpy(), rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "resaved")
    with plan.layout.use():
        again = add_adapters(plan_base(folder / "hf", plan), tmp_path / "resaved", plan.config.model, plan.layout)
        np.testing.assert_array_equal(logits_of(again, ids), ours)


@pytest.mark.soak
def test_a_run_with_dora_ranks_by_layer_and_a_trained_head_is_exported(tmp_path, capsys):
    """From its checkpoint: verified against the base, merged and not, and the base model is bit-equal."""
    pytest.importorskip("transformers")
    write_model(tmp_path / "hf", num_hidden_layers=3, attention_bias=True)
    dora = {**LORA, "use_dora": True, "layers_to_transform": [1, 2], "rank_pattern": {r"layers\.2\.mlp": 6}}
    dora |= {"embeddings": "tokens", "modules_to_save": ["^head", r"v_proj\.base\.bias"]}
    also = r"magnitude$|^head\.weight$|v_proj\.base\.bias$"
    records = tuned(tmp_path, write_instructions(tmp_path / "train.jsonl"), 12, dora, also=also)
    losses = [r["train/loss"] for r in records if "train/loss" in r]
    assert losses[-1] < losses[0] - 0.5
    checkpoint = str(tmp_path / "checkpoints" / "lora")
    trained = open_model(str(tmp_path / "checkpoints" / "lora"), {})
    with trained.plan.layout.use():
        before = dict(tree.leaves(plan_base(tmp_path / "hf", trained.plan)))
        for path, leaf in tree.leaves(trained.load()):
            if ".base." in path and "v_proj" not in path:
                np.testing.assert_array_equal(leaf.array, before[path.replace(".base.", ".")].array, err_msg=path)
    for adapters in ("only", "merge"):
        options = ["--checkpoint", checkpoint, "--adapters", adapters, "--verify", "true", "--dtype", "float32"]
        assert convert.main(["to-hf", *options, "--output_dir", str(tmp_path / adapters)]) == 0, capsys.readouterr()
    assert "with the adapters has the checkpoint's logits" in capsys.readouterr().out
    described = json.loads((tmp_path / "only" / "adapter_config.json").read_text())
    # Layer 0 has no adapter, but its bias is trained too: the layers' biases are one parameter.
    assert (described["use_dora"], described["bias"], described["modules_to_save"]) == (True, "all", ["lm_head"])
    assert described["layers_to_transform"] == [1, 2]


@pytest.mark.soak
@pytest.mark.parametrize(
    "lora",
    one_of(
        [
            {"embeddings": "tokens", "modules_to_save": ["^head"]},
            {"target": "q_proj|head", "modules_to_save": ["^tokens"], "dropout": 0.0},
        ]
    ),
)
def test_adapters_have_the_rows_of_the_base(lora, tmp_path, capsys):
    """The run's tokenizer has fewer tokens than the base has rows, as most published ones. PEFT loads both together."""
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))
    write_model(tmp_path / "hf", more_rows=52, max_position_embeddings=1024)
    tuned(tmp_path, write_instructions(tmp_path / "train.jsonl"), 3, {**LORA, **lora}, also=r"^(head|tokens)\.weight$")
    checkpoint = tmp_path / "checkpoints" / "lora"
    options = ["--checkpoint", str(checkpoint), "--adapters", "only", "--verify", "true", "--dtype", "float32"]
    assert convert.main(["to-hf", *options, "--output_dir", str(tmp_path / "only")]) == 0, capsys.readouterr()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = list(range(3, 40))
    with torch.no_grad():
        before = base(torch.tensor([ids])).logits[0].numpy()
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "only").eval()(torch.tensor([ids])).logits[0].numpy()
    ours = load(str(checkpoint)).logits([ids])[0]
    np.testing.assert_allclose(theirs[:, : ours.shape[1]], ours, rtol=1e-4, atol=1e-4)
    assert theirs.shape == before.shape == (len(ids), ours.shape[1] + 52)
    again = tmp_path / "again"
    again.mkdir()
    for name in ("hf", "only", "train.jsonl"):
        (again / name).symlink_to(tmp_path / name)
    surgery = {"type": "lora", "from_peft": str(again / "only")}
    tuned(again, again / "train.jsonl", 1, surgery, learning_rate=0.0)
    np.testing.assert_allclose(load(str(again / "checkpoints" / "lora")).logits([ids])[0], ours, rtol=1e-6, atol=1e-6)
    assert convert.main(["to-hf", *options[:2], "--dtype", "float32", "--output_dir", str(tmp_path / "whole")]) == 0
    source, whole = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "whole"))
    assert {key for key in {**source, **whole} if source.get(key) != whole.get(key)} == {"vocab_size"}
    settings = [(tmp_path / name / "tokenizer_config.json").read_text() for name in ("hf", "whole")]
    assert settings[0] == settings[1] or "tokenizer_class" not in settings[0]


@pytest.mark.slow
def test_exported_adapters_are_verified_against_the_base(run, tmp_path, capsys):
    folder, _ = run
    base = folder / "hf"
    of_run = ["to-hf", "--checkpoint", str(folder / "checkpoints" / "lora"), "--adapters", "only", "--verify", "true"]
    for name, dtype in (("exact", "float32"), ("rounded", "bfloat16")):
        assert convert.main([*of_run, "--output_dir", str(tmp_path / name), "--dtype", dtype]) == 0
        assert f"verified: {base} with the adapters has the checkpoint's logits" in capsys.readouterr().out
    base.rename(folder / "right")
    try:
        write_model(base, seed=1)
        assert convert.main([*of_run, "--output_dir", str(tmp_path / "wrong")]) == 2
    finally:
        shutil.rmtree(base)
        (folder / "right").rename(base)
    assert "differs from" in capsys.readouterr().err


@pytest.mark.slow
def test_a_peft_folder_is_merged_into_its_base_on_disk(tmp_path, capsys):
    """Each weight is W + alpha / rank * B A, in NumPy, and all others are those of the base."""
    pytest.importorskip("transformers")
    from safetensors.numpy import load_file

    base = write_model(tmp_path / "hf")
    modules = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("q_proj", "o_proj")]
    arrays = write_adapter(tmp_path / "adapter", modules)
    command = ["to-hf", "--checkpoint", str(base), "--adapter", str(tmp_path / "adapter")]
    assert convert.main([*command, "--output_dir", str(tmp_path / "merged"), "--verify", "true"]) == 0
    assert "verified with transformers" in capsys.readouterr().out
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        a, b = (arrays.get(f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight") for side in "AB")
        expected = weight if a is None else weight + 6 / 3 * (b @ a)
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert sum(f"base_model.model.{name.removesuffix('weight')}lora_A.weight" in arrays for name in before) == 4
    again = ["to-hf", "--checkpoint", str(tmp_path / "merged"), "--adapter"]
    assert convert.main([*again, str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "twice")]) == 2
    assert f"--adapter {tmp_path}/adapter: {tmp_path}/merged contains these adapters already. Remove --adapter" in (
        capsys.readouterr().err
    )
    write_adapter(tmp_path / "other", modules, rank=2)
    assert convert.main([*again, str(tmp_path / "other"), "--output_dir", str(tmp_path / "both")]) == 0
    assert f"note: {tmp_path}/merged contains the adapters of adapter. Those of" in capsys.readouterr().err
    for name in ("adapter", "other"):
        with pytest.raises(ConfigError, match=rf"adapter=.*{name}: .*both contains these adapters already"):
            load(tmp_path / "both", adapter=str(tmp_path / name))
    assert convert.main([*command, "--output_dir", str(tmp_path / "x"), "--adapters", "only"]) == 2
    assert "--adapters only writes no model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_adapters_of_a_run_are_not_added_to_it_again(run, tmp_path, capsys):
    """Its checkpoint has them, as bfloat16 too; a later export of the run has others."""
    checkpoint = str(run[0] / "checkpoints" / "lora")
    for dtype in ("float32", "bfloat16"):
        options = ["--adapters", "only", "--dtype", dtype, "--output_dir", str(tmp_path / dtype)]
        assert convert.main(["to-hf", "--checkpoint", checkpoint, *options]) == 0
        capsys.readouterr()
        with pytest.raises(ConfigError, match=rf"adapter=.*{dtype}: .*step-30 contains these adapters already"):
            load(checkpoint, adapter=str(tmp_path / dtype))
        assert "contains the adapters of lora/step-30" in capsys.readouterr().err
    modules = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)]
    write_adapter(tmp_path / "other", modules)
    load(checkpoint, adapter=str(tmp_path / "other"))
    assert "note: " in capsys.readouterr().err
    assert convert.main(["to-hf", "--checkpoint", checkpoint, "--output_dir", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    load(tmp_path / "merged", adapter=str(tmp_path / "other"))
    assert "merged contains the adapters of lora/step-30. Those of" in capsys.readouterr().err


FUSED = {
    "gpt2": ({"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "seq_len": 64}, "q_proj|v_proj|o_proj"),
    "gpt_neox": ({**SIZES, "num_kv_heads": 4}, "q_proj|k_proj|v_proj|up_proj"),
    "phi3": (SIZES, "k_proj|gate_proj|up_proj|o_proj"),
    "qwen3_5": (
        {
            **SIZES,
            "attention_interval": 2,
            "num_state_heads": 2,
            "num_value_heads": 4,
            "state_key_dim": 8,
            "state_value_dim": 12,
        },
        "q_proj|v_proj|gate_proj|decay_proj|o_proj",
    ),
    "mpt": (
        {"hidden_dim": 32, "intermediate_dim": 128, "num_layers": 2, "num_heads": 4, "seq_len": 64},
        "q_proj|v_proj|down_proj",
    ),
    "gemma4": (
        {
            **SIZES,
            "num_layers": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_kv_heads": 1,
            "sliding_window_pattern": 2,
            "num_kv_shared_layers": 2,
            "layer_input_dim": 6,
        },
        ".*",
    ),
}


def of_family(folder: Path, family: str):
    """A plan, its model with random adapters, and a folder with the base model for transformers."""
    sizes, target = FUSED[family]
    lora = {**LORA, "target": target, "dropout": 0.0}
    phases = [{**PHASE, "surgery": [lora]}]
    model = {"type": family, **sizes, "initializer_range": 0.2}
    config = {"model": model, "phases": phases, "trainer": {"train_batch_size": 8}}
    plan = make_plan(decode_run(ConfigSource(config), None), "x", 61)
    with plan.layout.use():
        plain = place_state(plan.state_builder.initial_model, plan.state_builder.abstract_initial_model, plan.layout)
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        options = {"dtype": np.float32, "files": {}, "special_ids": ids}
        save_folder(folder, plain, plan.config.model, plan.layout, **options)
        change = lambda model: busy(lora_of(plan).apply(model, key=jax.random.key(1)))  # noqa: E731
        return plan, plain, jax.jit(change)(plain)


def with_adapters(torch, base, folder: Path):
    """What PEFT does: W + alpha / r * B A at each module, transposed for GPT-2's Conv1D."""
    peft_config = json.loads((folder / "adapter_config.json").read_text())
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    tensors = {name: np.array(file.view(name)) for name in file.tensors}
    names = {name.rpartition(".lora_")[0] for name in tensors}
    for name in names:
        module = base.get_submodule(name.removeprefix("base_model.model."))
        last = name.rpartition(".")[2]
        rank = peft_config.get("rank_pattern", {}).get(last, peft_config["r"])
        alpha = peft_config.get("alpha_pattern", {}).get(last, peft_config["lora_alpha"])
        a, b = (torch.tensor(tensors[f"{name}.lora_{side}.weight"]) for side in "AB")
        assert (a.shape[0], b.shape[1]) == (rank, rank)
        delta = alpha / rank * (b @ a)
        with torch.no_grad():
            module.weight += delta.T if type(module).__name__ == "Conv1D" else delta
    ends = peft_config["target_modules"]
    found = {name for name, _ in base.named_modules() if any(name.endswith(f".{end}") for end in ends)}
    assert {name.removeprefix("base_model.model.") for name in names} == found
    return base


@pytest.mark.slow
# MPT lays its matrices out as Phi-3 does.
@pytest.mark.parametrize("family", one_of(FUSED, but=4))
def test_adapters_of_parts_of_a_matrix_are_those_of_the_whole_in_peft(tmp_path, family):
    """The logits of transformers with them, merged by hand and, if it is installed, in peft; and they are read again."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    plan, plain, model = of_family(tmp_path / "base", family)
    ids = np.random.default_rng(0).integers(0, 61, size=(8, 24))
    with plan.layout.use():
        save_adapters_of(model, tmp_path / "adapter", plan)
        ours = logits_of(model, ids)
        assert np.abs(ours - logits_of(plain, ids)).max() > 0.1
        again = add_adapters(plain, tmp_path / "adapter", plan.config.model, plan.layout)
        np.testing.assert_allclose(logits_of(again, ids), ours, rtol=1e-5, atol=1e-5)
    found = dict(tree.leaves(again))
    for path, leaf in tree.leaves(model):
        if path.endswith((".a", ".b")):
            np.testing.assert_array_equal(found[path].array, leaf.array, err_msg=path)
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)  # noqa: E731
    models = [with_adapters(torch, load(), tmp_path / "adapter")]
    if importlib.util.find_spec("peft"):
        import peft

        models.append(peft.PeftModel.from_pretrained(load(), tmp_path / "adapter"))
    for theirs in models:
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor(ids)).logits.numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_whole_matrix_becomes_one_of_each_part():
    """As PEFT makes them: every rank changes every part. b_part a = the part's rows of B A, in NumPy."""
    (qkv,) = (t for t in family_of_config(GptNeoxConfig()).tensors(GptNeoxConfig()) if t.name.endswith("value.weight"))
    sizes = {"layers": 2, "embed": 6, "heads": 2, "kv_heads": 2, "head_size": 3}
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 4, 6)), rng.normal(size=(2, 18, 4))
    matrix = FusedMatrix(qkv, sizes)
    magnitude = rng.normal(size=(2, 18))
    parts = {path: (rank, arrays) for path, rank, arrays in matrix.split(Arrays(a, b, magnitude), 4)}
    whole = (b @ a).reshape(2, 2, 3, 3, 6)  # layer, head, query or key or value, feature, input
    for number, name in enumerate("qkv"):
        rank, part = parts[f"body.layers.stacked.attn.{name}_proj"]
        assert rank is None, "all"
        np.testing.assert_allclose(part.b @ part.a, whole[:, :, number].reshape(2, 6, 6), rtol=1e-12)
        np.testing.assert_array_equal(part.magnitude, magnitude.reshape(2, 2, 3, 3)[:, :, number].reshape(2, 6))
    joined = matrix.fuse({path: Arrays(*(each[0] for each in part)) for path, (_, part) in parts.items()})
    np.testing.assert_allclose(joined.b @ joined.a, (b @ a)[0], rtol=1e-12)
    np.testing.assert_array_equal(joined.magnitude, magnitude[0])
    for rank in (2, 3):  # not blocks of these sizes, so each parameter has all ranks
        assert all(len(arrays.a[0]) == 4 for _, _, arrays in matrix.split(Arrays(a, b), rank))
    with pytest.raises(ConfigError, match=r"lora_B \[12, 4\], but .* \[18, 4\] expected"):
        dict(matrix.split(Arrays(a, b[:, :12]), 4))
    del parts["body.layers.stacked.attn.v_proj"]
    with pytest.raises(ConfigError, match="with DoRA, all parameters of this matrix must have adapters"):
        matrix.fuse({path: Arrays(*(each[0] for each in part)) for path, (_, part) in parts.items()})


def plan_base(folder, plan):
    """The imported model before training."""
    from jaxlm.interop.hf.folder import load_model

    return load_model(folder, jax.eval_shape(plan.state_builder.initial_model), plan.config.model, plan.layout)


@jax.jit
def _logits(model, inputs):
    return model.logits(model.hidden(inputs).final).array


def logits_of(model, ids):
    axes = (hax.Axis("batch", ids.shape[0]), hax.Axis("position", ids.shape[1]))
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    columns = (ids, positions, np.ones_like(ids))
    return np.asarray(_logits(model, Inputs(*(hax.named(jnp.asarray(c, jnp.int32), axes) for c in columns))))
