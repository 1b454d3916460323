"""Runs on rows packed by best fit: killed in the middle of an epoch, and on fewer and fewer devices."""

import json
import re
from dataclasses import replace

import pytest

from tests.end_to_end.commands import Workplace

STEPS = 16
PACKING = (
    *("--config_path", "run.yaml", "--data.packing", "{type: best_fit, buffer_size: 20, refill_size: 8}"),
    *("--data.enforce_eos", "false", "--trainer.steps_per_eval", "8", "--trainer.num_train_steps", str(STEPS)),
)
WATCH = (
    "--trainer.watch",
    "{watch_targets: [batch], include_norms: false, include_per_parameter_norms: false, interval: 1}",
)


def with_paragraphs(place: Workplace, train: str = "train") -> Workplace:
    """A configuration whose documents are the paragraphs of the corpus. Most fit into a row, and some do not."""
    for split in ("train", "validation"):
        texts = [path.read_text().split("\n\n") for path in sorted((place.corpus / split).glob("*.py"))]
        paragraphs = [paragraph for text in texts for paragraph in text if paragraph.strip()]
        records = [json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs]
        (place.folder / f"{split}.jsonl").write_text("".join(records))
    path = place.write()
    text = re.sub(r"train_urls: \[.*\]", f"train_urls: [{train}.jsonl]", path.read_text())
    text = re.sub(r"validation_urls: \[.*\]", "validation_urls: [validation.jsonl]", text)
    path.write_text(re.sub(r"(?m)^  cache_dir: .*", f"  cache_dir: {place.cache}/paragraphs-{train}", text))
    return place


def logged(place: Workplace) -> dict[int, tuple[float, float]]:
    """Step -> (loss, hash of the batch)."""
    records = [record for record in place.records() if "train/loss" in record]
    return {record["step"]: (record["train/loss"], record["data/batch_hash"]) for record in records}


@pytest.fixture(scope="module")
def uninterrupted(workplace) -> Workplace:
    place = with_paragraphs(workplace())
    finished = place.finish(*PACKING, *WATCH)
    assert re.search(
        r"train: [\d,]+ rows of 32 tokens, packed by best fit, .* losing .* tokens \(\d+\.\d%\)", finished.out
    )
    return place


@pytest.mark.soak
def test_killed_in_the_middle_of_an_epoch(workplace, uninterrupted):
    place = with_paragraphs(workplace())
    place.die(*PACKING, *WATCH, at="second phase")
    finished = place.finish(*PACKING, *WATCH)
    assert re.search(r"resuming, from .*step-(5|10)$", finished.out, re.MULTILINE)
    assert place.losses() == uninterrupted.losses()
    assert place.digest(f"step-{STEPS}") == uninterrupted.digest(f"step-{STEPS}")
    batches = {batch for _, batch in logged(place).values()}
    assert len(batches) == STEPS, "every step of this epoch has rows of its own"


@pytest.mark.soak
def test_killed_where_documents_of_two_passes_wait_together(workplace):
    """The buffer holds each document several times, and the run reads more than one pass."""
    options = [word.replace("20,", "3000,") for word in PACKING]
    options += [*WATCH, "--data.shuffle", "false"]
    places = [with_paragraphs(workplace(), train="validation") for _ in range(2)]
    uninterrupted = places[0].finish(*options)
    found = re.search(r"train: ([\d,]+) rows of 32 tokens, .* without a break", uninterrupted.out)
    assert found is not None
    assert int(found[1].replace(",", "")) < STEPS * 8
    places[1].die(*options, at="second phase")
    places[1].finish(*options)
    assert places[1].losses() == places[0].losses()
    assert places[1].digest(f"step-{STEPS}") == places[0].digest(f"step-{STEPS}")
    assert logged(places[1]) == logged(places[0])


@pytest.mark.soak  # another one is refused in tests/end_to_end/test_command.py
def test_another_packing_is_refused_on_resume(uninterrupted):
    *split, _ = (word.replace("best_fit,", "best_fit, fill: split,") for word in PACKING)
    refused = uninterrupted.run(*split, str(STEPS + 1), *WATCH)
    assert refused.code == 2
    assert "packing" in refused.err


@pytest.mark.soak  # the batches of other data in tests/end_to_end/test_elastic.py
def test_the_batches_are_the_same_on_eight_and_on_two_devices(workplace, uninterrupted):
    place = with_paragraphs(workplace(8))
    place.stop(*PACKING, *WATCH, at=13)
    finished = replace(place, devices=2).run(*PACKING, *WATCH)
    assert finished.code == 0, finished.err
    found, expected = logged(place), logged(uninterrupted)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step, (loss, batch) in expected.items():
        assert found[step][1] == batch
        assert found[step][0] == pytest.approx(loss, rel=1e-5)
