"""Runs that start from a folder in fp8: exports that are decoded, and exports that copy its codes and scales."""

import pytest

from jaxlm.commands import convert
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.tensor_files import open_tensors
from tests.answers import write_model, write_tokenizer
from tests.interop.stored import as_fp8
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
