"""Folders from the Hub as their authors wrote them: dtype, end tokens, special tokens, and the same settings in an export."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import train
from jaxlm.commands import convert, evaluate, sample
from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.chat import ChatFormat
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.evals import batches, samples
from jaxlm.evals.base import EvalContext
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.interop.pretrained import check_pretrained
from jaxlm.models.base import vocab_axis
from jaxlm.objectives.next_token import score_batch
from jaxlm.plan.load_config import decode_run
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.export import Exporter, model_card
from jaxlm.session.inference_model import load
from jaxlm.session.init_from import InitFrom
from jaxlm.session.load_model import open_model
from tests.answers import write_tokenizer
from tests.data.helpers import small_tokenizer
from tests.engine.helpers import one_device
from tests.interop.cases import inputs_of, logits_of

MODEL = LlamaConfig(
    seq_len=64, hidden_dim=32, intermediate_dim=48, num_layers=1, num_heads=4, num_kv_heads=2, initializer_range=0.3
)
GENERATION = {"bos_token_id": 0, "eos_token_id": [0, 4, 9], "pad_token_id": 3, "temperature": 0.6, "top_p": 0.95}
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": [0, 7], "pad_token_id": 3}


@pytest.fixture
def folder(original, tmp_path):
    """A copy of `original`, which the test may change."""
    return shutil.copytree(original, tmp_path / "model")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A float16 folder whose first tensors are a mask and float32 frequencies, with an unknown key."""
    tmp_path = tmp_path_factory.mktemp("hf")
    num_tokens = write_tokenizer(tmp_path / "tokenizer")
    model = jax.jit(lambda: MODEL.build(vocab_axis(num_tokens), key=jax.random.key(0)))()
    files = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    files["generation_config.json"] = json.dumps(GENERATION).encode()
    place = tmp_path / "model"
    save_folder(place, model, MODEL, one_device(), dtype=np.float16, files=files, special_ids=SPECIAL_IDS)
    source = SafetensorsFile(place / "model.safetensors")
    layer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    arrays = {layer: np.ones(4, np.float32)} | {name: np.array(source.view(name)) for name in source.tensors}
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(place / "model.safetensors", infos, arrays.values())
    config = json.loads((place / "config.json").read_text()) | {"use_mrope": False}
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.slow
def test_a_float16_folder_is_sampled_from_and_its_notes_are_printed(folder, capsys):
    arguments = ["--checkpoint", str(folder), "--prompt", "The", "--max_new_tokens", "4", "--temperature", "0"]
    assert sample.main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("The")
    assert "the weights are float16, in which parameters cannot be stored, so they are read as float32" in shown.err
    assert "ignored: keys that jaxlm does not know for this family: use_mrope: False" in shown.err


@pytest.mark.slow
def test_float16_weights_are_computed_as_in_transformers_in_float32(folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ours = load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(ours.model) if hasattr(leaf, "dtype")} == {jnp.dtype(jnp.float32)}
    ids = np.random.default_rng(0).integers(0, ours.model.Vocab.size, (2, 12))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits_of(ours.model, inputs_of(ids)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_generation_settings_are_exported_and_all_end_tokens_stop(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    opened = open_model(str(folder), {})
    assert opened.tokenizer.stop_ids == (0, 4, 9, 7)
    opened.tokenizer.save(tmp_path / "run")  # as in a checkpoint
    tokenizer = load_tokenizer(str(tmp_path / "run"))
    with opened.plan.layout.use():
        card = model_card(opened.plan, opened.model, None, {})
        exporter = Exporter(opened.plan, tokenizer, opened.source(), np.float32)
        exporter.write(tmp_path / "out", opened.load(), opened.model, card)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == GENERATION
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in SPECIAL_IDS} == SPECIAL_IDS
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.eos_token_id, settings.pad_token_id, settings.temperature) == ([0, 4, 9], 3, 0.6)


def test_an_evaluation_may_read_another_format(folder):
    opened, urls = open_model(str(folder), {}), {"data.validation_urls": ["a.jsonl"]}
    for keys in ({"data.format.type": "chat"}, {"data.format": {"type": "chat"}}):
        assert evaluate.data_with(opened, {**urls, **keys}).format == ChatFormat()
    with pytest.raises(ConfigError, match=r"format\.text_key: no such key in format \(type chat\)"):
        evaluate.data_with(opened, {**urls, "data.format": {"type": "chat", "text_key": "text"}})


@pytest.mark.slow
@pytest.mark.parametrize("adds", [True, False])
def test_prompts_begin_as_the_tokenizer_says(adds, folder):
    """As in transformers: with BOS if the post-processor adds it."""
    transformers = pytest.importorskip("transformers")
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    if adds:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = [("<|endoftext|>", 0)]
        backend.post_processor = TemplateProcessing(single=["<|endoftext|>", "$A"], special_tokens=special)
        backend.save(str(folder / "tokenizer.json"))
    opened = open_model(str(folder), {})
    plain = opened.tokenizer.encode_batch(["The"])[0]
    assert opened.prompt_ids("The") == ([0, *plain] if adds else plain)
    assert opened.prompt_ids("The") == transformers.AutoTokenizer.from_pretrained(folder)("The")["input_ids"]
    assert opened.prompt_ids("") == [0], "a model needs something to continue"


@pytest.mark.parametrize("enforce_bos", [True, False])
def test_samples_of_a_run_begin_as_its_documents(enforce_bos, folder, monkeypatch):
    """`adds_bos` is what a checkpoint's data section says."""
    opened, prompts = open_model(str(folder), {}), []
    plain = opened.tokenizer.encode_batch(["The"])[0]
    monkeypatch.setattr(batches, "generate_tokens", lambda _model, given, *_: prompts.extend(given) or [[], []])
    plan = opened.plan
    context = EvalContext(
        *(plan.layout, plan.precision, opened.tokenizer, np.zeros(1), (), print, 64, score_batch),
        enforce_bos=enforce_bos,
    )
    with plan.layout.use():
        samples.SamplesEvalConfig(prompts=["The", ""], max_new_tokens=4).open(context).run(opened.load())
    assert prompts == [[0, *plain] if enforce_bos else plain, [0]]
    assert dataclasses.replace(opened, adds_bos=enforce_bos).prompt_ids("The") == prompts[0]


@pytest.mark.slow
def test_a_key_is_skipped_on_request(folder, capsys):
    """The model is then computed as without the key, in training and in the other commands."""
    before = load(folder)
    content = json.loads((folder / "config.json").read_text()) | {"logit_scale": 0.1}
    (folder / "config.json").write_text(json.dumps(content))
    arguments = ["--checkpoint", str(folder), "--prompt", "The", "--max_new_tokens", "4"]
    assert sample.main(arguments) == 2
    assert (
        "it scales activations or logits. To compute without it, set hf_skip_keys: [logit_scale]"
        in capsys.readouterr().err
    )
    assert sample.main([*arguments, "--hf_skip_keys", "[logit_scale]"]) == 0
    after = load(folder, keys={"hf_skip_keys": ["logit_scale"]})
    ids = inputs_of(np.arange(12)[None])
    np.testing.assert_array_equal(logits_of(before.model, ids), logits_of(after.model, ids))
    with after.loaded.plan.layout.use():
        trained, _ = InitFrom().load_weights(after.loaded.plan, print)
    np.testing.assert_array_equal(logits_of(trained, ids), logits_of(before.model, ids))
    assert sample.main([*arguments, "--hf_skip_keys", "[logit_scales]"]) == 2
    assert "hf_skip_keys: 'logit_scales' given, but" in capsys.readouterr().err


def test_a_training_run_logs_the_notes(folder):
    plan, lines = open_model(str(folder), {}).plan, []
    with plan.layout.use():
        InitFrom().load_weights(plan, lines.append)
    assert lines[0] == f"weights: {folder}"
    assert lines[1].startswith("note: ")
    assert "use_mrope: False" in lines[1]


@pytest.mark.slow
def test_a_dry_run_prints_the_notes_of_a_start(folder, capsys):
    config = {
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "data": {"tokenizer": str(folder), "train_urls": ["stdlib:train"]},
        "trainer": {"id": "x", "train_batch_size": 8, "num_train_steps": 2, "log_dir": str(folder.parent)},
        "dry_run": True,
    }
    config["model"] = {"seq_len": 16}
    train.train(decode_run(ConfigSource(config), None))
    printed = capsys.readouterr()
    notes = [line for line in (printed.out + printed.err).splitlines() if "note: " in line]
    assert len(notes) == 1
    assert "use_mrope: False" in notes[0]


@pytest.mark.parametrize("direction", [("to-hf",), ("to-hf", "--adapters", "only")])
def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_opened(direction, folder, monkeypatch, capsys):
    check_folder(direction, folder, monkeypatch, capsys)


def check_folder(direction, folder, monkeypatch, capsys):
    monkeypatch.setattr(convert, "open_model", lambda *_: pytest.fail("it opens the model"))
    for output, code, message in (
        (folder, 2, f"{folder} already exists. Choose another folder"),
        (folder / "config.json" / "out", 1, f"cannot write {folder}/config.json/out ("),
    ):
        assert convert.main([*direction, "--checkpoint", "anything", "--output_dir", str(output)]) == code
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_vocabulary_that_does_not_fit_ends_a_start_before_anything_is_tokenized(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = small_tokenizer(400)
    tokenizer.save(tmp_path / "tokenizer")
    config = {
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "model": {"seq_len": 16},
        "data": {"tokenizer": "tokenizer", "train_urls": ["stdlib:train"], "cache_dir": "cache"},
        "trainer": {"id": "x", "train_batch_size": 8, "num_train_steps": 2},
    }
    said = rf"the embedding has {rows} rows, but the tokenizer has {tokenizer.vocab_size} tokens\. Set data\.tokenizer"
    with pytest.raises(ConfigError, match=said):
        train.train(decode_run(ConfigSource(config), None))
    assert not (tmp_path / "cache").exists()


DAMAGED = {
    "truncated": (lambda whole: whole[:-9], "model.safetensors: the file is truncated: it has"),
    "empty": (lambda whole: b"", "model.safetensors: not a safetensors file: it has no valid header"),
    "missing": (None, "no weights found. Looked for model.safetensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_weights_end_a_start_before_anything_is_tokenized(damage, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, message = DAMAGED[damage]
    weights = folder / "model.safetensors"
    if change is None:
        weights.unlink()
    else:
        weights.write_bytes(change(weights.read_bytes()))
    config = {
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "model": {"seq_len": 16},
        "data": {"tokenizer": str(folder), "train_urls": ["stdlib:train"], "cache_dir": "cache"},
        "trainer": {"id": "x", "train_batch_size": 8, "num_train_steps": 2},
    }
    with pytest.raises(ConfigError, match=message):
        train.train(decode_run(ConfigSource(config), None))
    assert not (tmp_path / "cache").exists()
    if change is not None:
        with pytest.raises(ConfigError, match=message):
            check_pretrained(folder, 1)  # a dry run


TEXTS = ("The capital of France is Paris.", "What is the capital of Italy?")


def evaluated(capsys, *arguments):
    """The numbers that `jaxlm evaluate` prints, and its notes."""
    assert evaluate.main([*arguments, "--trainer.compilation_cache_dir", "null"]) == 0
    shown = capsys.readouterr()
    return json.loads(shown.out.splitlines()[-1]), shown.err


@pytest.mark.slow
def test_the_loss_of_a_folder_is_that_of_transformers(folder, tmp_path, monkeypatch, capsys):
    """On given text, in nats per token and bits per byte, for comparison with a run's losses."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    given = ("--checkpoint", str(folder), "--data.validation_urls", "[text.jsonl]")
    found, notes = evaluated(capsys, *given)
    assert "note: sequences of 64 tokens, the model's longest. Compare losses with the same --model.seq_len" in notes
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    nats, num_tokens, text_nats = 0.0, 0, 0.0
    for text in TEXTS:
        ids = torch.tensor([[0, *tokenizer(text, add_special_tokens=False)["input_ids"], 0]])
        with torch.no_grad():
            logits = theirs(ids).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").double().numpy()
        nats, num_tokens, text_nats = nats + each.sum(), num_tokens + len(each), text_nats + each[:-1].sum()
    assert found["tokens"] == num_tokens
    assert (found["step"], found["checkpoint"]) == (None, str(folder))
    np.testing.assert_allclose(found["loss"], nats / num_tokens, rtol=1e-5)
    num_bytes = sum(map(len, TEXTS))
    np.testing.assert_allclose(found["bpb"], text_nats / np.log(2) / num_bytes, rtol=1e-5)
    short, notes = evaluated(capsys, *given, "--model.seq_len", "32", "--batch_size", "16")
    assert "note: sequences" not in notes
    np.testing.assert_allclose(short["loss"], found["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "is a Hugging Face model, which has no validation data. Set --data.validation_urls"),
        (("--data.validation_urls", "[nowhere.txt]"), "nowhere.txt"),
        (("--weights", "ema", "--data.validation_urls", "[x]"), "is a Hugging Face model and has no averages"),
        (("--data.tokenizer", "x.json"), "--data.tokenizer has no effect here"),
        (("--trainer.num_train_steps", "1"), "--trainer.num_train_steps has no effect on a trained model"),
    ],
    ids=str,
)
def test_what_is_missing_to_evaluate_a_folder_is_one_message(folder, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    assert evaluate.main(["--checkpoint", str(folder), "--trainer.compilation_cache_dir", "null", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_is_loaded_and_answers_ids(folder, capsys):
    ids, before = [[5, 6, 7]], load(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    ours = load(folder)
    for ask in ("logits", "log_probs"):
        np.testing.assert_array_equal(getattr(ours, ask)(ids)[0], getattr(before, ask)(ids)[0])
    assert ours.hidden(ids)["final"][0].shape == (3, MODEL.hidden_dim)
    for ask in (lambda: ours.generate(ids), lambda: ours.logits(["The"]), lambda: ours.tokenizer):
        with pytest.raises(
            ConfigError, match=r"has no tokenizer\.json, without which texts cannot be read or written\."
        ):
            ask()
    assert sample.main(["--checkpoint", str(folder), "--prompt", "The"]) == 2
    assert "has no tokenizer.json, without which texts cannot be read or written" in capsys.readouterr().err


EARLIER = Path(__file__).parents[1] / "vectors" / "earlier_run" / "step-6"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nothing", {}, r"name=.*nothing: no checkpoint found"),
        ("adapters", {}, r"name=(.*adapters): it has only adapters\. Set name to the model .*, and add adapter=\1"),
        ("hf", {"weights": "ema"}, r"weights: 'ema' given, but .* has no averages"),
        (EARLIER, {"weights": "emma", "keys": {"trainer.fsdp_axis": None}}, r"weights: 'emma' given, but .* only has"),
        (EARLIER, {"keys": {"trainer.seed": 1}}, r"^keys: trainer\.seed has no effect on a trained model"),
        (EARLIER, {"keys": {"trainer.mp": 5}}, r"^keys: trainer\.mp: 5 given"),
        ("hf", {"keys": {"trainer.seed": 1}}, r"^keys: trainer\.seed has no effect on a trained model"),
        ("hf", {"keys": {"trainer.mp": 5}}, r"^keys: trainer\.mp: 5 given"),
        ("hf", {"keys": {"trainer.mp.x": 1}}, r"^keys: trainer\.mp\.x: .* neither a section nor a list"),
    ],
)
def test_errors_of_load_name_its_arguments(name, arguments, message, folder, tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder if name == "hf" else tmp_path / name, **arguments)
    assert "--" not in str(caught.value)
