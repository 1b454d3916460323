"""Upcycling from a folder: blocks distilled at once, from a live and from a cached teacher, killed and resumed."""

import json
import shutil

import pytest

from tests.end_to_end.commands import Workplace, check_close

pytestmark = pytest.mark.slow
UPCYCLED = """
initialize_from_hf: {teacher}
use_hf_model_config: true
refs: {{teacher: {{type: hf, path: {teacher}, dtype: float32}}}}
phases:
  - name: blocks
    num_train_steps: 12
    surgery: [{{type: decouple, sem_dim: 16, geo_dim: 16, method: random}}]
    trainable: ["attn\\\\.[qk]_(sem|geo)"]
    objective: {{type: blockwise, {keys}}}
  - name: all_weights
    num_train_steps: 6
    objective: {{type: distill, weight: 0.5}}
"""
FORMS = {
    "live": "target: attention",
    "cached": "target: attention, cache: true",
    "int8": "target: attention, cache: int8",
    "converged": "target: attention, convergence: {max_steps: 3}",
    "sequential": "target: residual, order: sequential, inputs: student, convergence: {max_steps: 6}",
}


@pytest.fixture(scope="module")
def teacher(workplace):
    """The folder of a teacher in Hugging Face format."""
    place = workplace()
    place.write()
    place.finish("--config_path", "run.yaml", "--hf_save_path", "hf", "--hf_save_steps", "1000")
    (folder,) = (place.folder / "hf").glob("step-*")
    return folder


def prepared(workplace, teacher, form: str, devices: int = 1) -> Workplace:
    """A folder with the configuration, a copy of the teacher, and caches of its own."""
    place = workplace(devices)
    shutil.copytree(teacher, place.folder / "teacher")
    text = place.write(UPCYCLED.format(teacher="teacher", keys=FORMS[form]), num_steps=18).read_text()
    shutil.copytree(place.cache, place.folder / "cache", ignore=shutil.ignore_patterns("xla", "annotations"))
    text = text.replace(f"cache_dir: {place.cache}\n", "cache_dir: cache\n").replace(
        "vocab_size: 300", "tokenizer: teacher"
    )
    model = text.index("model:"), text.index("trainer:")
    (place.folder / "run.yaml").write_text(text[: model[0]] + text[model[1] :])
    return place


@pytest.fixture(scope="module")
def whole(workplace, teacher):
    """The uninterrupted run of each form: (losses, hashes of its last checkpoint, folder, output)."""
    runs = {}

    def run(form: str):
        if form not in runs:
            place = prepared(workplace, teacher, form)
            finished = place.finish("--config_path", "run.yaml")
            runs[form] = place.losses(), place, finished.out
        return runs[form]

    return run


def test_stored_streams_give_the_losses_of_a_live_teacher(whole):
    live, cached = (whole(form)[0] for form in ("live", "cached"))
    check_close(cached, live, 1e-6)
    assert float.fromhex(live[12]) < 0.8 * float.fromhex(live[1])


@pytest.mark.soak  # tests/systems/progressive/test_cached_trunk.py compares streams in 8 bits with their floats
def test_streams_in_eight_bits_give_nearly_the_losses_of_a_live_teacher(whole):
    live, int8 = (whole(form)[0] for form in ("live", "int8"))
    # The errors of 8 bits are a part of the loss of blocks, but hardly of what the model learns from them.
    check_close({step: int8[step] for step in range(13, 19)}, {step: live[step] for step in range(13, 19)}, 5e-3)


@pytest.mark.soak  # tests/systems/progressive: test_annotate.py does so for a teacher, test_progressive_run.py for a command
def test_a_second_run_reads_what_the_first_has_stored(whole):
    losses, place, first = whole("cached")
    again = place.finish("--config_path", "run.yaml", "--trainer.id", "again")
    assert place.losses("again") == losses
    assert "annotating" in first
    assert "annotating" not in again.out


@pytest.mark.soak
def test_other_weights_of_the_teacher_are_stored_anew(whole, workplace, teacher):
    from safetensors.numpy import load_file, save_file

    _, place, _ = whole("cached")
    weights = place.folder / "teacher" / "model.safetensors"
    before = weights.read_bytes()
    try:
        arrays = load_file(weights)
        name = next(name for name in sorted(arrays) if "q_proj" in name)
        arrays[name][0, 0] += 1.0
        save_file(arrays, weights, metadata={"format": "pt"})
        changed = place.finish("--config_path", "run.yaml", "--trainer.id", "changed")
    finally:
        weights.write_bytes(before)
    assert "annotating" in changed.out


@pytest.mark.soak
def test_a_phase_ends_once_all_blocks_are_done(whole):
    losses, place, out = whole("converged")
    assert "train/blocks_left is 0" in out
    records = [json.loads(line) for line in (place.folder / "logs/run/metrics.jsonl").read_text().splitlines()]
    steps = [
        max(r[f"train/block_steps/{block}"] for r in records if f"train/block_steps/{block}" in r) for block in range(2)
    ]
    assert steps == [3, 3]
    assert len(losses) < 18


@pytest.mark.soak
@pytest.mark.parametrize(
    ("form", "step"),
    [
        pytest.param("sequential", 5, marks=pytest.mark.soak),
        ("cached", 15),
        pytest.param("sequential", 15, marks=pytest.mark.soak),
        pytest.param("cached", 5, marks=pytest.mark.soak),
    ],
)
def test_a_killed_run_ends_as_if_it_had_not_been(whole, workplace, teacher, form, step):
    """The second phase does not read the cache of the first one."""
    losses, *_ = whole(form)
    place = prepared(workplace, teacher, form)
    place.die("--config_path", "run.yaml", at=str(step))
    finished = place.finish("--config_path", "run.yaml")
    assert "resuming, from" in finished.out
    assert place.losses() == losses
