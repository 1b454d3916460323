"""Runs that start from a multimodal folder: what their exports and adapters have of its other parts."""

import json
import shutil

import numpy as np
import pytest

from jaxlm.commands import convert
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.reading.decode import encode
from jaxlm.session.load_model import open_model
from tests.interop.multimodal import VOCAB, saved
from tests.session.test_source import checkpoint, differences, run


def write_tokenizer(folder):
    """Single characters, and as many rows as the model has."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    ids = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for token in (*sorted(pre_tokenizers.ByteLevel.alphabet())[:88], *(f"<{n}>" for n in range(VOCAB))):
        ids |= {token: len(ids)} if len(ids) < VOCAB else {}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


@pytest.fixture
def place(tmp_path):
    pytest.importorskip("transformers")
    saved("gemma3", tmp_path / "hf")
    for name in ("hf", "tokenizer"):
        write_tokenizer(tmp_path / name)
    return tmp_path


def start_of(place, **keys):
    return {"initialize_from_hf": str(place / "hf"), "use_hf_model_config": True, "model": {"seq_len": 32}, **keys}


def content_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.slow
def test_a_run_exports_all_parts_or_the_text(place, capfd):
    """Also from its checkpoints, and from those of a run that starts from them."""
    start, source, file = start_of(place), content_of(place / "hf"), SafetensorsFile(place / "hf" / "model.safetensors")
    untrained = {name for name in file.tensors if not name.startswith("language_model.")}

    def assert_whole(folder, dtype="float32"):
        written = SafetensorsFile(folder / "model.safetensors")
        assert written.tensors.keys() == file.tensors.keys()
        for name in untrained:
            assert written.view(name).tobytes() == file.view(name).tobytes()
        assert differences(folder, source) == ({} if dtype == "float32" else {"dtype": ("float32", dtype)})
        assert (folder / "preprocessor_config.json").is_file()

    assert_whole(run(place, "a", hf_save_dtype="source", **start))
    assert "exported to" in (out := capfd.readouterr().out)
    assert "with multi_modal_projector.* (2 tensors), vision_tower.* (32 tensors) of " in out
    alone = run(
        place, "b", hf_save_parts="text", trainer={"initialize_from": checkpoint(place, "a")}, **model_of(place)
    )
    assert content_of(alone)["model_type"] == "gemma3_text"
    assert not (alone / "preprocessor_config.json").exists()
    assert "without multi_modal_projector.* (2 tensors), vision_tower.* (32 tensors)" in capfd.readouterr().out
    options = ["to-hf", "--checkpoint", checkpoint(place, "b"), "--output_dir"]
    assert convert.main([*options, str(place / "c"), "--dtype", "bfloat16", "--verify", "true"]) == 0
    assert_whole(place / "c", "bfloat16")
    assert open_model(str(place / "c"), {}).tokenizer.stop_ids == (2,)
    shutil.move(place / "hf", place / "moved")
    assert convert.main([*options, str(place / "d")]) == 1
    assert "cannot copy multi_modal_projector.*" in capfd.readouterr().err
    assert convert.main([*options, str(place / "d"), "--parts", "text", "--verify", "true"]) == 0


def model_of(place):
    """The model section that the folder describes."""
    config = open_model(str(place / "hf"), {}).plan.config
    return {"model": {**encode(config.model), "seq_len": 32}}


@pytest.mark.slow
def test_a_run_that_changes_the_structure_is_told_before_it_trains(place):
    phases = [{"name": "p", "surgery": [{"type": "drop_layers", "layers": [0, 1, 2]}]}]
    with pytest.raises(ConfigError, match=r"the export cannot keep .*vision_tower.*hf_save_parts: text"):
        run(place, "a", phases=phases, **start_of(place))
    alone = run(place, "a", phases=phases, hf_save_parts="text", **start_of(place))
    assert content_of(alone)["num_hidden_layers"] == 4


@pytest.mark.soak
def test_adapters_fit_the_text_part_of_the_base(place):
    """PEFT adapts no module of the other parts, and the result is the merged model's."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    phases = [{"name": "p", "surgery": [{"type": "lora", "rank": 2}], "trainable": [r"\.[ab]$"]}]
    merged = run(place, "a", 3, phases=phases, optimizer={"type": "adam", "learning_rate": 0.05}, **start_of(place))
    options = ["to-hf", "--checkpoint", checkpoint(place, "a"), "--output_dir", str(place / "adapters")]
    assert convert.main([*options, "--adapters", "only", "--verify", "true"]) == 0
    assert convert.main([*options[:-1], str(place / "x"), "--adapters", "only", "--parts", "text"]) == 2
    cls = transformers.Gemma3ForConditionalGeneration
    base = cls.from_pretrained(place / "hf")
    adapted = peft.PeftModel.from_pretrained(base, place / "adapters")
    changed = {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    assert changed
    assert all("language_model" in name for name in changed)
    ids = torch.tensor(np.random.default_rng(0).integers(3, 80, (1, 16)))
    with torch.no_grad():
        ours = cls.from_pretrained(merged)(input_ids=ids).logits.numpy()
        np.testing.assert_allclose(adapted(input_ids=ids).logits.numpy(), ours, rtol=1e-4, atol=1e-4)
