"""Annotations of the sequences that the steps of a phase read: which ones are stored, where, and what they say."""

import copy
import dataclasses
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.logged import Activity
from jaxlm.data.annotations import AnnotationFolder
from jaxlm.data.batch_schedule import BatchSchedule, BatchStage
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.preemption import StopRequest
from jaxlm.engine.sync import FlagSync, Interrupted, StoppedError
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import ITSELF
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import annotate
from jaxlm.systems.progressive.cached_trunk import CachedTrunk
from tests.data.helpers import some_text
from tests.engine.helpers import layout, one_device

TOKENS, BATCH = 32, 8
START = {"examples": 0, "step": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    (folder / "text.txt").write_text(some_text(0, 700))
    return folder


class Setup:
    """The plan of a masked model that trains a layer on a stored trunk, and the model as it is at the phase's start."""

    def __init__(self, corpus: Path):
        model = {"type": "llama", "seq_len": TOKENS, "hidden_dim": 16, "intermediate_dim": 24, "num_layers": 1}
        model |= {"num_heads": 2, "use_bidirectional_attention": True, "time_embedding": {"dim": 8}}
        data = {"train_urls": [f"{corpus}/*.txt"], "cache_dir": f"{corpus}/cache", "vocab_size": 300}
        data |= {"tokenizer": {"type": "bpe", "special_tokens": ["<|endoftext|>", "<|mask|>"]}}
        upper = {"name": "upper", "surgery": [{"type": "grow", "num_layers": 1, "init": "random"}]}
        upper |= {"trainable": ["new_stack"], "objective": {"type": "cached_trunk", "objective": {"type": "diffusion"}}}
        trainer = {"train_batch_size": BATCH, "num_train_steps": 1}
        masking = {"mask_replicas": 2}
        source = {"model": model, "data": {**data, "masking": masking}, "phases": [upper], "trainer": trainer}
        config = decode_run(ConfigSource(source), None)
        self.tokenizer = config.data.corpus.load_tokenizer(lambda _: None)
        self.plan = dataclasses.replace(make_plan(config, "x", self.tokenizer.vocab_size), layout=one_device())
        (self.phase,) = self.plan.phases
        rng, shapes = np.random.default_rng(0), self.plan.state_builder.abstract_state(self.phase).model
        self.model = jax.tree.map(lambda leaf: jax.numpy.asarray(rng.normal(0, 0.4, leaf.shape), leaf.dtype), shapes)

    def opened(self, cache_dir: Path | None = None, **masking):
        section = self.plan.data[0]
        section = dataclasses.replace(section, masking=dataclasses.replace(section.masking, **masking))
        section = section if cache_dir is None else dataclasses.replace(section, cache_dir=str(cache_dir))
        return section.open(self.tokenizer, TOKENS, lambda _: None)


class Stored:
    """The phase with a number of steps, over data of which something may be stored already."""

    def __init__(self, setup: Setup, plain, steps: int, position=START, check_stop=lambda: None, clock=None):
        self.plain, self.plan, self.model = plain, setup.plan, setup.model
        self.phase = dataclasses.replace(setup.phase, end=steps)
        self.lines: list[str] = []
        self.reported: list[tuple[str, dict[str, Any]]] = []
        with self.plan.layout.use():
            report = lambda step, text, kind, **fields: self.reported.append((text, fields))  # noqa: E731
            args = (self.plan, self.phase, self.plain, self.lines.append, report, lambda: pytest.fail("no checks"))
            self.data = annotate.with_annotations(
                *args, position["step"], position, clock or ActivityClock(), check_stop
            )

    def batches(self, data, position=None, skipped=0):
        """Yields the batches of the phase, as the training loop takes them."""
        order = {"schedule": self.plan.batches.train, "layout": self.plan.layout, "start": 0, "first_step": 0}
        batches = data.batches(**order, seed=self.plan.config.order_seed)
        if position is not None:
            batches.restore(position)
        batches.skip(skipped)
        try:
            with self.plan.layout.use():
                for step in range(batches.state()["step"], self.phase.end):
                    if batches.due(step):
                        batches.refresh(self.model, step)
                    yield jax.tree.map(lambda column: column[MICROBATCH, 0], next(batches), is_leaf=tree.is_named)
        finally:
            batches.close()

    @property
    def examples(self):
        return self.data.train[""]

    def stored(self, indices):
        """float32 [examples, position, embed], what is stored of some examples."""
        return self.examples.read(np.array(indices))["annotations.stream"]

    def logged(self):
        """The numbers of annotated sequences, of those that are read, of all, and of those that were there before."""
        (line,) = [line for line in self.lines if line.startswith("annotating")]
        return [
            int(number)
            for number in re.search(r"annotating (\d+) .*read (\d+) of (\d+), and (\d+) are there", line).groups()
        ]


@pytest.fixture(scope="module")
def setup(corpus):
    return Setup(corpus)


@pytest.fixture(scope="module")
def two_epochs(setup):
    """The phase over both ways of all sequences, twice, and its batches with and without what is stored."""
    plain = setup.opened()
    run = Stored(setup, plain, -(-2 * len(plain.train[""]) // BATCH))
    return run, list(run.batches(run.data)), list(run.batches(run.plain))


@pytest.mark.slow
def test_losses_are_those_of_a_trunk_that_is_computed(two_epochs):
    """In two epochs, each in an order of its own, and the diffusion loss of hidden tokens in several ways."""
    run, stored, plain = two_epochs
    seen = [row.tobytes() for batch in plain for row in np.asarray(batch.tokens.array)]
    size = len(run.examples)
    assert set(seen[:size]) == set(seen[size : 2 * size])
    assert seen[:size] != seen[size : 2 * size]

    @jax.jit
    def losses(model, batch):
        (terms, _, _), inner = run.phase.objective.terms(model, batch, None, key=None), run.phase.objective.objective
        without = dataclasses.replace(batch, annotations=None)
        return terms["loss"].total, inner.terms(model, without, None, key=None)[0]["loss"].total

    for batch, other in zip(stored, plain, strict=True):
        for name in ("tokens", "targets", "loss_mask", "mask_fractions", "rates"):
            np.testing.assert_array_equal(getattr(batch, name).array, getattr(other, name).array)
        found, expected = losses(run.model, batch)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_what_is_stored_has_the_bits_of_the_trunk(two_epochs):
    """Found by example and way of hiding its tokens, whatever batch it is in."""
    run, stored, plain = two_epochs

    @jax.jit
    def streams(model, batch):
        inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids, mask_fractions=batch.mask_fractions)
        produced = run.phase.objective.annotate({ITSELF: model}, batch).annotations["stream"]
        return produced, model.hidden(inputs, taps=("layer_0",)).taps["layer_0"]

    for batch, other in zip(stored, plain, strict=True):
        with run.plan.layout.use():
            produced, tapped = streams(run.model, other)
        np.testing.assert_array_equal(batch.annotations["stream"].array, produced.array)
        np.testing.assert_array_equal(tapped.array, produced.array)
    ways = run.stored([0, 1])
    inputs = run.examples.read(np.array([0, 1]))
    assert (inputs["targets"][0] == inputs["targets"][1]).all()
    assert (inputs["tokens"][0] != inputs["tokens"][1]).any()
    assert np.abs(ways[0] - ways[1]).max() > 1e-3
    assert np.abs(ways[0] - ways[1]).min(axis=1).min() > 0, "the time of the sequence is added to every token"


@pytest.mark.slow
def test_a_run_that_goes_on_reads_the_same(two_epochs, setup):
    whole, stored, _ = two_epochs
    again = Stored(setup, whole.plain, whole.phase.end)
    for batch, expected in zip(again.batches(again.data, {"examples": 3 * BATCH, "step": 3}), stored[3:], strict=True):
        np.testing.assert_array_equal(batch.annotations["stream"].array, expected.annotations["stream"].array)
    assert not [line for line in again.lines if line.startswith("annotat")]


@pytest.mark.slow
def test_only_sequences_that_steps_read_are_stored(two_epochs, setup, tmp_path):
    whole = two_epochs[0]
    size, plain = len(whole.examples), setup.opened(tmp_path)
    assert whole.logged() == [size, size, size, 0]

    few = Stored(setup, plain, 2)
    seen = {row.tobytes() for batch in few.batches(few.data) for row in np.asarray(batch.tokens.array)}
    assert few.logged() == [len(seen), 2 * BATCH, size, 0]
    (folder,) = (tmp_path / "annotations").glob("*/")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    skipping = Stored(setup, plain, 3)  # after a step back, with the data of a step left out
    assert len(list(skipping.batches(skipping.data, {"examples": BATCH, "step": 1}, skipped=1))) == 2
    assert skipping.logged() == [2 * BATCH, 2 * BATCH, size, 0]

    longer = Stored(setup, plain, 6)
    list(longer.batches(longer.data))
    assert longer.logged() == [2 * BATCH, 6 * BATCH, size, 4 * BATCH]
    assert {path: path.read_bytes() for path in before} == before
    drawn = plain.mixture(setup.plan.batches.train, seed=setup.plan.config.order_seed).drawn(0, 6 * BATCH)[""]
    np.testing.assert_array_equal(longer.stored(drawn), whole.stored(drawn))
    with pytest.raises(LookupError, match="has no annotations"):
        longer.stored(np.arange(size))


@pytest.mark.slow
def test_a_request_to_stop_ends_it_after_a_block(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(annotate, "_BLOCK_EXAMPLES", BATCH)
    request, write = StopRequest(), AnnotationFolder.write

    def written(*block):
        write(*block)
        request.receive(signal.SIGTERM, None)

    plain, sync = setup.opened(tmp_path), FlagSync(setup.plan.layout, request)
    stopped = Stored(setup, plain, 3, check_stop=sync.check_stop)
    monkeypatch.setattr(AnnotationFolder, "write", written)
    with pytest.raises(StoppedError) as caught:
        list(stopped.batches(stopped.data))
    assert caught.value.outcome == Interrupted(signal.SIGTERM)

    monkeypatch.setattr(AnnotationFolder, "write", write)
    clock, silent_s = ActivityClock(), []
    monkeypatch.setattr(AnnotationFolder, "write", lambda *block: (silent_s.append(clock.silent_s()), write(*block)))
    again = Stored(setup, plain, 3, clock=clock)
    with clock.during(Activity.ROLLOUT):
        assert len(list(again.batches(again.data))) == 3
    assert again.logged() == [2 * BATCH, 3 * BATCH, len(again.examples), BATCH], "what was stored before is kept"
    assert sum(silent_s) <= clock.seconds()[Activity.ANNOTATION], "each block is progress, for the watchdog"
    assert min(clock.seconds()[activity] for activity in (Activity.COMPILE, Activity.ANNOTATION)) > 0


class OfTeacher(CachedTrunk):
    """What a reference computes instead of the model that trains."""

    @property
    def facts(self):
        return dataclasses.replace(super().facts, asks_itself=False, references=("teacher",))

    def annotate(self, refs, batch, slot=None, model=None):
        return super().annotate({ITSELF: refs["teacher"]}, batch)


@pytest.mark.slow
def test_a_teacher_is_asked_before_the_first_batch_for_what_steps_still_read(setup, tmp_path, monkeypatch):
    teacher = SimpleNamespace(
        abstract=lambda _: setup.model, load=lambda *_: setup.model, identity=lambda: {"of": "it"}
    )
    taught = copy.copy(setup)
    taught.plan = dataclasses.replace(setup.plan, refs={"teacher": teacher})
    taught.phase = dataclasses.replace(setup.phase, objective=OfTeacher(setup.phase.objective.objective))
    monkeypatch.setattr(annotate, "check_sanity", lambda *_: None)
    later = {"examples": 2 * BATCH, "step": 2}
    for position, num_stored, folder in ((START, 3 * BATCH, "whole"), (later, BATCH, "elsewhere")):
        run = Stored(taught, setup.opened(tmp_path / folder), 3, position)
        assert run.logged()[:2] == [num_stored, num_stored]
        (block,) = (tmp_path / folder / "annotations").glob("*/*/records.npy")
        assert len(np.load(block)) == num_stored
        assert len(list(run.batches(run.data, position))) == 3 - position["step"]
        ((_, fields),) = run.reported
        assert (fields["phase"], fields["count"]) == ("upper", num_stored), "as many as are stored there"
    again = Stored(taught, setup.opened(tmp_path / "whole"), 3, later)
    list(again.batches(again.data, later))
    assert not again.lines
    ((text, _),) = again.reported
    assert text.startswith(f"phase 'upper': reads {3 * BATCH} stored sequences"), "those of the whole phase"


@pytest.mark.slow
def test_other_processes_read_the_blocks_that_process_0_lists(two_epochs, monkeypatch):
    """Their own lists of a shared folder may be old."""
    run = two_epochs[0]
    place = run.reported[0][1]["folder"]
    made_from = json.loads((Path(place) / "block-0" / "cache.json").read_text())["made_from"]
    folder = AnnotationFolder(run.plain.train[""], made_from)
    listed = folder.blocks()
    monkeypatch.setattr(AnnotationFolder, "blocks", lambda _: [])
    monkeypatch.setattr(annotate, "from_main", lambda _: listed)
    drawn = np.array([3, 0])
    np.testing.assert_array_equal(annotate._opened(folder).read(drawn)["stream"], run.stored(drawn))
    monkeypatch.setattr(annotate, "from_main", lambda _: [*listed, "block-99"])
    with pytest.raises(ConfigError, match=r"not all processes see .*\. Set data.cache_dir to a folder"):
        annotate._opened(folder)


def _annotator(plan, phase):
    unused: Any = None
    return annotate._Annotator(plan, phase, unused, unused, unused, unused, unused)


@pytest.mark.slow
def test_what_another_program_computes_is_stored_elsewhere(setup):
    """Its bits may differ. Whoever reads them would depend on who was there before."""

    def identity(batch=BATCH, microbatch=BATCH, where=None):
        stage = BatchStage(0, batch, batch // microbatch, microbatch)
        batches = dataclasses.replace(setup.plan.batches, train=BatchSchedule((stage,)))
        plan = dataclasses.replace(setup.plan, batches=batches, layout=where or setup.plan.layout)
        return json.dumps(_annotator(plan, setup.phase).identity(setup.model))

    assert identity(batch=2 * BATCH) == identity()
    assert len({identity(), identity(microbatch=BATCH // 2), identity(where=layout())}) == 3


def test_other_masks_are_stored_elsewhere(setup):
    def place(**masking):
        (examples,) = setup.opened(**masking).train.values()
        return AnnotationFolder(examples, _annotator(setup.plan, setup.phase)._made_from(examples, {})).path

    places = {place(), place(seed=1), place(mask_replicas=3), place(max_mask_fraction=0.5), place(mode="fixed_count")}
    assert len(places) == 5
    assert place(validation_replicas=2) in places
