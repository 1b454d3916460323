"""Runs with a teacher: refused if it cannot predict the text, ended if the student is too far from it.

Runs the trainer in this process, on eight devices.
"""

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.evals.base import GateError
from jaxlm.evals.compare import FidelityEvalConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.plan.refs.base import SanityConfig
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import verification
from tests.session.test_init_from import Trainings

LOGGED = re.compile(r"refs\.teacher: loss (\d+\.\d+) nats on (\d+) batches, at most (\d+\.\d+) allowed")


class Verified(Trainings):
    """Runs whose teacher is a folder in Hugging Face format."""

    def __init__(self, folder):
        super().__init__(folder)
        (folder / "held-out").mkdir()
        (folder / "held-out" / "b.txt").write_text("".join(f"some words {n * 7 % 89} and more\n" for n in range(80)))

    def train_teachers(self):
        """A trained teacher as it is, and with a scrambled head."""
        folder = self.folder
        result = self.run("teacher", 24)
        checkpoint = self.place("teacher") / "step-24"
        files = load_tokenizer(str(checkpoint / "run" / "tokenizer")).files(max_length=16)
        for name, change in (("good", lambda path, leaf: leaf), ("scrambled", _scrambled)):
            model = jax.jit(lambda model, change=change: tree.map_leaves(change, model))(result.state.model)
            config, layout = result.plan.model, result.plan.layout
            with layout.use():
                save_folder(folder / name, model, config, layout, dtype=np.float32, files=files, special_ids={})

    def config(self, run_id, steps, **sections):
        config = super().config(run_id, steps, **sections)
        config["data"]["validation_urls"] = [f"{self.folder}/held-out"]
        config["trainer"]["max_eval_batches"] = 2
        return config

    def ref(self, name="good", **keys):
        return {"teacher": {"type": "hf", "path": f"{self.folder}/{name}", "dtype": "float32", **keys}}

    def records(self, run_id):
        return [json.loads(line) for line in (self.folder / "logs" / run_id / "metrics.jsonl").read_text().splitlines()]

    def measured(self, run_id, name):
        return [record[name] for record in self.records(run_id) if name in record]


def _scrambled(path, leaf):
    """The rows of the head in another order: each token has another's logit."""
    return (
        NamedArray(jnp.roll(leaf.array, 1, axis=leaf.axes.index(leaf.resolve_axis("vocab"))), leaf.axes)
        if "head" in path
        else leaf
    )


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    made = Verified(tmp_path_factory.mktemp("gates"))
    made.train_teachers()
    return made


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """For runs that end before they read their teacher."""
    return Verified(tmp_path_factory.mktemp("refused"))


DISTILL = {"type": "distill", "teacher_loss": True}


@pytest.mark.slow
def test_the_loss_of_a_good_teacher_is_logged_once(trainings):
    """On one batch, it is the metric of the first step, which the objective measures on its own."""
    refs = trainings.ref(sanity={"batches": 1})
    trainings.run("good", 2, objective=DISTILL, refs=refs)
    ((loss, batches, limit),) = LOGGED.findall(trainings.output)
    assert float(loss) == pytest.approx(trainings.measured("good", "train/teacher_loss")[0], rel=1e-4)
    assert (batches, float(limit)) == ("1", pytest.approx(math.log(280), abs=1e-4))
    trainings.run("good", 4, objective=DISTILL, refs=refs)
    assert "resuming, from" in trainings.output
    assert not LOGGED.findall(trainings.output)


@pytest.mark.slow
def test_a_scrambled_teacher_is_refused_before_anything_is_saved(trainings):
    with pytest.raises(ConfigError) as refused:
        trainings.run("scrambled", 2, objective=DISTILL, refs=trainings.ref("scrambled"))
    found = re.search(
        r"refs\.teacher: the loss of .*scrambled on this run's text is (\d+\.\d+) nats, and at most (\d+\.\d+) is allowed"
        r" \(that of a uniform guess over 280 tokens\)",
        str(refused.value),
    )
    assert found
    assert float(found[1]) > float(found[2]) == pytest.approx(math.log(280), abs=1e-4)
    assert "data.tokenizer is its tokenizer" in str(refused.value)
    assert not list(trainings.place("scrambled").glob("step-*"))
    trainings.run("anyway", 1, objective=DISTILL, refs=trainings.ref("scrambled", sanity=None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "user",
    [
        {"objective": {"type": "distill", "top_k": 4, "cache": True}},
        {"phases": [{"name": "p", "surgery": [{"type": "interpolate", "ref": "teacher"}]}]},
        {"evals": [{"type": "fidelity"}]},
    ],
    ids=["annotations", "surgery", "evaluation"],
)
def test_whoever_reads_a_scrambled_teacher_it_is_refused(trainings, user):
    with pytest.raises(ConfigError, match=r"refs\.teacher: the loss of .*scrambled"):
        trainings.run("whoever", 2, refs=trainings.ref("scrambled"), **user)


def test_limits_of_loss_and_perplexity():
    assert SanityConfig().limit(64)[0] == pytest.approx(math.log(64))
    assert SanityConfig(max_loss=20.0).limit(64) == (20.0, "max_loss: 20")
    assert SanityConfig(max_perplexity=200.0).limit(64)[0] == pytest.approx(math.log(200))
    assert SanityConfig(max_loss=3.0, max_perplexity=200.0).limit(64) == (3.0, "max_loss: 3")
    assert SanityConfig(max_loss=20.0, max_perplexity=200.0).limit(64)[1] == "max_perplexity: 200"


@pytest.mark.soak
def test_a_lower_limit_refuses_a_good_teacher(trainings):
    with pytest.raises(ConfigError, match=r"at most 0\.1000 is allowed \(max_loss: 0\.1\)"):
        trainings.run("low", 2, objective=DISTILL, refs=trainings.ref(sanity={"max_loss": 0.1}))


GATE = {"type": "fidelity", "max_ppl_ratio": None, "fail_fast": True}


@pytest.mark.slow
def test_a_violated_limit_ends_the_run_after_its_last_step_is_saved_and_every_start_after_it(trainings):
    sections = {"refs": trainings.ref(), "evals": [{"type": "loss"}, {**GATE, "max_delta_nll": 0.01}]}
    for _ in range(2):
        with pytest.raises(
            GateError, match=r"eval/fidelity/delta_nll is .*, at most 0\.01 allowed \(max_delta_nll: 0\.01\)"
        ):
            trainings.run("gated", 4, **sections)
        assert (trainings.place("gated") / "step-4").is_dir()
    (delta,) = trainings.measured("gated", "eval/fidelity/delta_nll")
    own, theirs = (
        trainings.measured("gated", f"eval/{name}")[0] for name in ("fidelity/nll", "fidelity/reference_nll")
    )
    assert own == pytest.approx(trainings.measured("gated", "eval/loss")[0], rel=1e-5)
    assert delta == own - theirs > 0.01
    loose = {**sections, "evals": [{**GATE, "max_delta_nll": 10.0}]}
    trainings.run("gated", 4, **loose)
    assert "the run is complete" in trainings.output


@pytest.mark.slow
def test_a_gate_holds_at_the_end_of_every_phase_also_of_one_that_ends_early(trainings):
    phases = [
        {"name": "a", "num_train_steps": 4, "until": {"metric": "eval/loss", "below": 100.0}},
        {"name": "b", "num_train_steps": 2},
    ]
    evals = [{"type": "loss"}, {**GATE, "max_delta_nll": 0.01}]
    with pytest.raises(GateError, match="the end of phase 'a'"):
        trainings.run("early", 6, refs=trainings.ref(), evals=evals, phases=phases, trainer={"steps_per_eval": 2})
    assert [path.name for path in trainings.place("early").glob("step-*") if "step-2" in path.name]
    with pytest.raises(GateError, match="the end of phase 'a'"):
        trainings.run("early", 6, refs=trainings.ref(), evals=evals, phases=phases, trainer={"steps_per_eval": 2})
    assert "phase 'b': parameters" not in trainings.output


@pytest.mark.soak
def test_a_gate_is_judged_on_the_kept_weights_once_they_are_saved_as_the_end(trainings):
    """The phase keeps the weights of step 2 and ends after step 4, where the gate is due and accepts the current weights."""
    until = {"metric": "eval/loss", "mode": "max", "patience": 1}
    gate = {**GATE, "every": 2, "max_delta_nll": 100.0}
    sections = {"refs": trainings.ref(), "trainer": {"steps_per_eval": 2, "until": until}}
    trainings.run("kept", 6, evals=[{"type": "loss"}, gate], **sections)
    first, second, kept = trainings.measured("kept", "eval/loss")
    assert kept == pytest.approx(first)
    assert first > second
    between = (first + second) / 2 - trainings.measured("kept", "eval/fidelity/reference_nll")[0]
    with pytest.raises(GateError, match="the end of phase 'train'"):
        trainings.run("kept again", 6, evals=[{"type": "loss"}, {**gate, "max_delta_nll": between}], **sections)
    assert any("step-4" in path.name for path in trainings.place("kept again").glob("step-*"))


@pytest.mark.soak
def test_a_gate_may_belong_to_a_phase(trainings):
    phases = [{"name": "a", "num_train_steps": 2}, {"name": "b", "num_train_steps": 2}]

    def run(of, refs):
        evals = [{"type": "loss"}, {**GATE, "max_delta_nll": 0.01, "phases": [of]}]
        trainings.run("of_phase", 4, refs=refs, evals=evals, phases=phases)

    for _ in range(2):  # the second one checks the saved end again
        with pytest.raises(GateError, match="the end of phase 'a'"):
            run("a", trainings.ref())
    assert len(trainings.measured("of_phase", "eval/fidelity/delta_nll")) == 1
    with pytest.raises(GateError, match="the end of phase 'b'"):
        run("b", trainings.ref())
    steps = [record["step"] for record in trainings.records("of_phase") if "eval/fidelity/delta_nll" in record]
    assert steps == [2, 4]
    assert [record["step"] for record in trainings.records("of_phase") if "eval/loss" in record] == [2, 4]
    run("a", trainings.ref("gone"))  # no phase that is left reads it
    assert "the run is complete" in trainings.output


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (["train", "b"], r"evals\.0\.phases: 'b' given, but there is no such phase\. The phases are: train"),
        ([], r"evals\.0\.phases: \[\] given, so it would never run\. Name a phase \(train\)"),
    ],
)
def test_the_phases_of_a_gate_exist(refused, phases, message):
    evals = [{"type": "fidelity", "phases": phases}]
    with pytest.raises(ConfigError, match=message):
        refused.run("none", 2, evals=evals, refs=refused.ref())


def test_what_only_another_phase_measures_cannot_end_a_phase(refused):
    phases = [{"name": "a", "until": {"metric": "eval/fidelity/nll", "below": 1.0}}, {"name": "b"}]
    evals = [{"type": "loss"}, {"type": "fidelity", "phases": ["b"]}]
    with pytest.raises(ConfigError, match=r"phases\.0\.until\.metric: .* no evaluation measures it in phase 'a'"):
        refused.run("none", 2, evals=evals, refs=refused.ref(), phases=phases)


@pytest.mark.soak
def test_a_student_equal_to_its_teacher_passes_every_gate(trainings):
    limits = {"max_mean_l1": 1e-4, "max_max_l1": 1e-4}
    evals = [
        {"type": "compare", "attention": limits, "logits": limits, "fail_fast": True},
        {"type": "fidelity", "max_delta_nll": 1e-4, "fail_fast": True},
        {"type": "continuations", "prompt_tokens": 4, "max_new_tokens": 4, "min_agreement": 1.0, "max_delta_nll": 1e-4},
        {
            "type": "cases",
            "cases": [{"id": "a", "prompt": "some", "answer": "x", "kind": "text_greedy"}],
            "max_new_tokens": 4,
        },
    ]
    still = {"learning_rate": 0.0, "warmup": 0, "lr_schedule": "constant"}
    trainings.run("same", 2, refs=trainings.ref(), evals=evals, optimizer=still, **_from(trainings))
    found = trainings.records("same")[-1]
    assert found["eval/compare/attention/mean_l1"] < 1e-4
    assert found["eval/continuations/agreement"] == 1.0
    assert found["eval/cases/accuracy"] == found["eval/cases/reference_accuracy"]
    assert "warning: step" not in trainings.output


def _from(trainings):
    return {"initialize_from_hf": f"{trainings.folder}/good", "data": _data(trainings)}


def _data(trainings):
    return {
        "train_urls": [f"{trainings.folder}/text"],
        "cache_dir": f"{trainings.folder}/cache-hf",
        "tokenizer": f"{trainings.folder}/good",
    }


def test_what_the_command_prints_is_json(capsys):
    """Numbers that JSON does not have are null, as in the files of a run."""
    metrics = {"fidelity/nll": math.nan, "fidelity/ppl_ratio": math.inf, "fidelity/reference_nll": 2.5}
    opened: Any = SimpleNamespace(location="here")
    verification._print(opened, metrics, [FidelityEvalConfig()])

    def refuse(text):
        raise AssertionError(text)

    printed = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=refuse)
    assert printed["metrics"] == {"fidelity/nll": None, "fidelity/ppl_ratio": None, "fidelity/reference_nll": 2.5}
    assert "eval/fidelity/ppl_ratio is inf, at most 1.05 allowed (max_ppl_ratio: 1.05)" in printed["violations"]


def test_an_evaluation_needs_its_reference_and_its_data(refused):
    with pytest.raises(
        ConfigError, match=r"refs: the evaluation 'fidelity' uses the model 'teacher', but the section is empty"
    ):
        refused.run("none", 2, evals=[{"type": "fidelity"}])
    config = refused.config("none", 2, evals=[{"type": "fidelity"}], refs=refused.ref())
    assert config["data"].pop("validation_urls")
    with pytest.raises(ConfigError, match=r"the evaluation 'fidelity' has limits, but there is no validation data"):
        make_plan(decode_run(ConfigSource(config), None), "none", 280)
    with pytest.raises(ConfigError, match=r"2 evaluations given with the name 'fidelity'"):
        refused.run("none", 2, evals=[{"type": "fidelity"}] * 2, refs=refused.ref())


def test_a_teacher_that_a_phase_still_reads_must_be_there(refused):
    with pytest.raises(ConfigError, match=r"refs\.teacher\.path: "):
        refused.run("none", 2, refs=refused.ref("nowhere"), objective=DISTILL)
