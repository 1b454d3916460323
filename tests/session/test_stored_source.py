"""Runs that start from a folder in fp8 or MXFP4: exports that are decoded, and exports that copy its codes and scales."""

import numpy as np
import pytest

from jaxlm.commands import convert
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.tensor_files import open_tensors
from tests.answers import write_model, write_tokenizer
from tests.interop.stored import as_fp8, as_mxfp4, saved_gpt_oss
from tests.interop.test_multimodal import assert_same_tensors, content_of
from tests.session.test_multimodal_run import start_of
from tests.session.test_source import checkpoint, run

NORMS = [{"name": "p", "trainable": ["norm"]}]


@pytest.fixture
def place(tmp_path):
    pytest.importorskip("transformers")
    write_model(tmp_path / "hf")
    write_tokenizer(tmp_path / "tokenizer")
    as_fp8(tmp_path / "hf")
    return tmp_path


@pytest.mark.slow
def test_a_run_keeps_what_it_does_not_train(place, capfd):
    """So does an export from its checkpoint, if told to; by default that one is decoded."""
    start = start_of(place, phases=NORMS, optimizer={"type": "adam", "learning_rate": 0.1})
    kept, source = open_tensors(run(place, "a", hf_stored_format="keep", **start)), open_tensors(place / "hf")
    assert kept.tensors == source.tensors
    norms = {name for name in source.tensors if "norm" in name}
    for name in source.tensors:
        assert (kept.view(name).tobytes() == source.view(name).tobytes()) is (name not in norms), name
    exported = place / "exports" / "a" / "step-1"
    assert content_of(exported) == content_of(place / "hf")
    options = ["to-hf", "--checkpoint", checkpoint(place, "a"), "--output_dir"]
    assert convert.main([*options, str(place / "b"), "--stored_format", "keep", "--verify", "true"]) == 0
    assert_same_tensors(place / "b", exported)
    assert convert.main([*options, str(place / "c")]) == 0
    assert open_tensors(place / "c").tensors.keys() == {name for name in source.tensors if "scale" not in name}
    assert "quantization_config" not in content_of(place / "c")
    run(place, "d", **start_of(place))
    options = ["to-hf", "--checkpoint", checkpoint(place, "d"), "--output_dir", str(place / "d")]
    assert convert.main([*options, "--stored_format", "keep"]) == 1
    assert "q_proj.weight in its stored form: it was trained, or its source changed" in capfd.readouterr().err


@pytest.mark.slow
def test_what_cannot_be_kept_is_told_before_it_trains(place):
    adapters = [{"name": "p", "surgery": [{"type": "lora", "rank": 2}], "trainable": [r"\.[ab]$"]}]
    for keys, message in (
        ({}, r"keep .* given, but body\..*_proj\.weight is trained, .* Freeze it, or set hf_stored_format: decode"),
        ({"phases": adapters}, r"keep .* given, but .*_proj\.[ab] is trained"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(place, "a", hf_stored_format="keep", **start_of(place, **keys))
    decoded: dict = start_of(place) | {"initialize_from_hf": str(place / "hf-decoded")}
    with pytest.raises(ConfigError, match=r"keep .* given, but .*hf-decoded has no stored weights. Remove it"):
        run(place, "a", hf_stored_format="keep", **decoded)


@pytest.fixture
def gpt_oss(tmp_path):
    """A small gpt-oss, with its experts in MXFP4."""
    pytest.importorskip("transformers")
    as_mxfp4(saved_gpt_oss(tmp_path / "hf", write_tokenizer(tmp_path / "tokenizer")))
    return tmp_path


def is_expert(name):
    return "proj_blocks" in name or "proj_scales" in name


@pytest.mark.soak
def test_gpt_oss_trains_decoded_and_keeps_its_experts_if_they_are_frozen(gpt_oss):
    """The layout of its export is that of folders in bfloat16; kept experts are those of the source, byte for byte."""
    start = start_of(gpt_oss, hf_save_dtype="bfloat16", optimizer={"type": "adam", "learning_rate": 0.01})
    mp = {"mp": "p=bf16,c=bfloat16"}
    source, decoded = open_tensors(gpt_oss / "hf"), open_tensors(gpt_oss / "hf-decoded")
    whole = open_tensors(run(gpt_oss, "a", 3, trainer=mp, **start))
    assert whole.tensors == decoded.tensors
    assert "quantization_config" not in content_of(gpt_oss / "exports" / "a" / "step-3")
    for name in decoded.tensors:
        assert whole.view(name).tobytes() != decoded.view(name).tobytes(), name
    attention = [{"name": "p", "trainable": [r"\.attn\."]}]
    kept = open_tensors(run(gpt_oss, "b", 3, trainer=mp, phases=attention, hf_stored_format="keep", **start))
    assert kept.tensors == source.tensors
    assert content_of(gpt_oss / "exports" / "b" / "step-3") == content_of(gpt_oss / "hf")
    for name in source.tensors:
        assert (kept.view(name).tobytes() == source.view(name).tobytes()) is ("attn" not in name), name


@pytest.mark.slow
def test_adapters_train_beside_experts_in_four_bits(gpt_oss):
    """Merged exports have the experts as they were, decoded or kept. The adapter alone fits the decoded folder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    surgery = [
        {"type": "quantize", "kind": "mxfp4", "modules": "mlp.*proj"},
        {"type": "lora", "target": "attn", "rank": 2},
    ]
    phases = [{"name": "p", "surgery": surgery, "trainable": [r"\.[ab]$"]}]
    start = start_of(gpt_oss, phases=phases, optimizer={"type": "adam", "learning_rate": 0.01})
    merged, decoded = open_tensors(run(gpt_oss, "a", 3, **start)), open_tensors(gpt_oss / "hf-decoded")
    assert merged.tensors.keys() == decoded.tensors.keys()
    for name in decoded.tensors:
        same = np.array_equal(merged.view(name), decoded.view(name).astype(np.float32))
        assert same is ("attn" not in name or not name.endswith("proj.weight")), name
    options = ["to-hf", "--checkpoint", checkpoint(gpt_oss, "a"), "--output_dir"]
    assert convert.main([*options, str(gpt_oss / "kept"), "--stored_format", "keep"]) == 0
    kept, source = open_tensors(gpt_oss / "kept"), open_tensors(gpt_oss / "hf")
    assert kept.tensors.keys() == source.tensors.keys()
    for name in filter(is_expert, source.tensors):
        assert kept.view(name).tobytes() == source.view(name).tobytes(), name
    assert convert.main([*options, str(gpt_oss / "adapter"), "--adapters", "only"]) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.PeftModel.from_pretrained(load(gpt_oss / "hf-decoded", dtype=torch.float32), gpt_oss / "adapter")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = load(gpt_oss / "exports" / "a" / "step-3", dtype=torch.float32)(ids).logits
        np.testing.assert_allclose(adapted(ids).logits, expected, rtol=1e-4, atol=1e-4)
