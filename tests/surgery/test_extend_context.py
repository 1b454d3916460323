"""Phases with longer and longer sequences: what changes in the model, and what transformers reads from exports."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.engine.entry import enter_phase
from jaxlm.interop.hf.source_folder import NO_SOURCE
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan, plan_phases
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.export import Exporter, ExportHook
from tests.answers import write_tokenizer
from tests.interop.cases import inputs_of, logits_of, tokens
from tests.tiers import one_of

SIZES = {"seq_len": 32, "hidden_dim": 32, "num_layers": 4, "num_heads": 4}
LLAMA = {"type": "llama", **SIZES, "intermediate_dim": 48, "rope": {"theta": 5000.0}, "initializer_range": 0.3}
PAIRS = 4
ROPES = {
    "theta": {"theta": 80000.0},
    "linear": {"type": "linear"},
    "yarn": {"type": "yarn", "beta_fast": 4.0},
    "dynamic": {"type": "dynamic", "original_max_position_embeddings": 128},  # transformers knows no other length
    "llama3": {"type": "llama3"},
    "longrope": {"type": "longrope", "short_factor": [1.0] * PAIRS, "long_factor": [1.0, 1.5, 2.0, 3.5]},
}


def decoded(*surgeries, model=LLAMA):
    """The configuration of a run whose phases have these surgeries."""
    phases = [{"name": f"p{number}", "num_train_steps": 1} for number in range(len(surgeries) + 1)]
    for phase, surgery in zip(phases[1:], surgeries, strict=True):
        phase["surgery"] = [{"type": "extend_context", **surgery}]
    written = {"model": model, "phases": phases, "trainer": {"train_batch_size": 8}}
    return decode_run(ConfigSource(written), None)


def models(*surgeries, model=LLAMA):
    """The config of each phase's model."""
    return [phase.model for phase in plan_phases(decoded(*surgeries, model=model))[0]]


def test_keys_that_are_left_out_follow_from_the_model():
    ropes = [one.rope for one in models(*({"seq_len": n, "rope": {"type": "yarn"}} for n in (64, 256)))]
    assert [(r.theta, getattr(r, "factor", 1.0)) for r in ropes] == [(5000.0, 1.0), (5000.0, 2.0), (5000.0, 8.0)]
    assert {r.original_max_position_embeddings for r in ropes[1:]} == {32}
    assert [r.amplitude for r in ropes] == pytest.approx([1.0, 0.1 * math.log(2) + 1, 0.1 * math.log(8) + 1])
    stretched = models(*({"seq_len": n, "rope": {"type": "linear"}} for n in (64, 256)))
    assert [m.rope.factor for m in stretched[1:]] == [2.0, 8.0], "linear scaling has no key for the length before"
    (_, long) = models({"seq_len": 64, "rope": ROPES["longrope"]})
    assert (long.rope.original_max_position_embeddings, long.rope.max_position_embeddings) == (32, 64)
    (_, given) = models({"seq_len": 64, "rope": {"type": "yarn", "theta": 7.0, "factor": 3.0}})
    assert (given.rope.theta, given.rope.factor) == (7.0, 3.0)
    (_, kept) = models({"seq_len": 64})
    assert kept == dataclasses.replace(kept, seq_len=64, rope=ropes[0])


def test_the_saved_configuration_has_the_derived_keys():
    config = decoded({"seq_len": 64, "rope": {"type": "yarn"}}, {"seq_len": 128, "rope": {"type": "yarn"}})
    assert decode_run(ConfigSource(encode(config)), None) == config


def test_a_phase_keeps_parameters_and_moments():
    plan = make_plan(decoded({"seq_len": 64, "rope": {"type": "yarn"}}), "x", 61)
    before, after = (plan.state_builder.abstract_state(phase) for phase in plan.phases)
    shapes = [[(path, leaf.axes) for path, leaf in tree.leaves(state.model)] for state in (before, after)]
    assert shapes[0] == shapes[1]
    assert after.model.Pos.size == 64
    assert {kind.rope for kind in after.model.body.kinds_by_layer} == {plan.phases[1].model.rope}
    (surgery,) = plan.phases[1].surgeries
    assert jax.tree.structure(surgery.moved(before.model, None)) == jax.tree.structure(after.model)


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_local_layers_keep_their_rotation(family):
    sizes = {"sliding_window": 8, "sliding_window_pattern": 2, "intermediate_dim": 48}
    before, after = models({"seq_len": 64, "rope": {"type": "linear"}}, model={"type": family, **SIZES, **sizes})
    assert [kind.rope == old.rope for kind, old in zip(after.kinds, before.kinds, strict=True)] == [True, False] * 2


def test_layers_without_rotation_stay_so():
    model = {"type": "smollm3", **SIZES, "intermediate_dim": 48, "num_kv_heads": 4}
    before, after = models({"seq_len": 64, "rope": {"type": "yarn"}}, model=model)
    assert [kind.rope is None for kind in after.kinds] == [kind.rope is None for kind in before.kinds]
    assert before.kinds != after.kinds


@pytest.mark.parametrize(
    ("surgery", "model", "message"),
    [
        ({"seq_len": 16}, LLAMA, "seq_len: 16 given, but the model reads 32 tokens already"),
        ({"seq_len": 32}, LLAMA, "which the model has already"),
        (
            {"seq_len": 64, "rope": {"type": "yarn", "original_max_position_embeddings": 100}},
            LLAMA,
            "original_max_position_embeddings: 100 given, which is not shorter than seq_len: 64",
        ),
        (
            {"seq_len": 64, "rope": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            LLAMA,
            "rope.short_factor: 1 factors given, 4 expected",
        ),
        *(
            (
                {"seq_len": 64},
                {"type": family, **SIZES},
                f"no rotary position embedding (rope) of a model of type {family}",
            )
            for family in ("gpt2", "mpt")
        ),
        (
            {"seq_len": 64},
            {"type": "flax", "factory": "tests.answers:none", "seq_len": 32},
            "no rotary position embedding (rope) of a model of type flax",
        ),
    ],
)
def test_what_cannot_be_extended_is_refused(surgery, model, message):
    with pytest.raises(ConfigError) as error:
        models(surgery, model=model)
    assert message in str(error.value)
    assert str(error.value).startswith(("surgery extend_context: ", "model.rope"))


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(sorted(ROPES, reverse=True), but=2))
def test_transformers_reads_exports_with_the_same_logits(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    num_tokens = write_tokenizer(tmp_path / "tokenizer")
    plan = make_plan(decoded({"seq_len": 64}, {"seq_len": 128, "rope": ROPES[name]}), "x", num_tokens)
    phase = plan.phases[2]
    with plan.layout.use():
        states = [enter_phase(plan.state_builder, one, plan.layout, None)() for one in (plan.phases[0], phase)]
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
        ExportHook(tmp_path / "out", 1, phase, Exporter(plan, tokenizer, NO_SOURCE, np.float32), print).run(
            3, states[1]
        )
    folder = tmp_path / "out" / "step-3"
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    if name in ("yarn", "llama3", "longrope"):
        assert (config["rope_scaling"]["factor"], config["rope_scaling"]["original_max_position_embeddings"]) == (
            2.0,
            64,
        )
    ids = tokens(2, 120) % num_tokens
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(ids)).logits.numpy()
    before, ours = (np.asarray(logits_of(state.model, inputs_of(ids))) for state in states)
    assert np.abs(ours - theirs).max() <= 1e-4
    if name != "dynamic":  # which changes nothing up to the length of the file
        assert np.abs(before - theirs).max() > 1e-3
