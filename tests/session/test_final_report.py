"""The report at the end of a run."""

import gzip
from types import SimpleNamespace

import pytest

from jaxlm.data.formats.chat import ChatFormat, ShareGptFormat
from jaxlm.data.formats.completions import PairsFormat, PromptsFormat, SupervisedFormat
from jaxlm.objectives.next_token import NextToken
from jaxlm.objectives.reward import RewardObjective
from jaxlm.observe.logged_run import LoggedRun, series_of
from jaxlm.observe.page.sections import newest
from jaxlm.observe.trackers.tensorboard import TensorboardConfig
from jaxlm.observe.trackers.wandb import WandbConfig
from jaxlm.plan.run_config import PhaseConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.session.final_report import chats, compressors, how_to_train_longer, how_to_use, outputs, skipped_updates


def test_compressors_are_measured_on_all_texts_as_one_stream():
    texts = ["one text\n" * 50, "another\n" * 70]
    raw = "".join(texts).encode()
    rows = dict(compressors(texts))
    assert rows["  gzip -9 on all text"] == f"{8 * len(gzip.compress(raw, 9)) / len(raw):.4f} ({len(raw):,} bytes)"


def test_a_last_phase_without_validation_text_has_no_compressors():
    assert compressors([]) == []


def test_the_report_says_which_updates_were_skipped():
    counts = [0, 1, 2, 3, 3, 4, 4]
    records = [{"step": step, "train/skipped_steps": count} for step, count in enumerate(counts, 1)]
    rows = [skipped_updates(LoggedRun("run", series_of(some))) for some in (records, records[:1], [])]
    assert rows == [[("skipped updates", "4 of 7 steps: 2 to 4, 6")], [], []]


def test_the_report_does_not_show_an_earlier_loss_as_the_last():
    records = [{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.5}, {"step": 3, "train/loss": None}]
    texts = [
        newest(LoggedRun("run", series_of(some))["train/loss"]) for some in (records[:2], records, records[2:], [])
    ]
    assert texts == ["2.5000", "not finite; 2.5000 at step 2", "never finite", "none"]


@pytest.mark.parametrize(
    ("objective", "chats", "command"),
    [
        (NextToken(), False, "jaxlm sample --checkpoint checkpoints/run --prompt"),
        (NextToken(), True, "jaxlm chat --checkpoint checkpoints/run"),
        (RewardObjective(), True, "jaxlm convert to-hf --checkpoint checkpoints/run --output_dir run-hf"),
    ],
)
def test_the_report_advises_what_the_model_is_trained_for(objective, chats, command):
    phases = [SimpleNamespace(objective=RewardObjective()), SimpleNamespace(objective=objective)]
    checkpoints = SimpleNamespace(location="checkpoints/run")
    _, text = how_to_use(SimpleNamespace(phases=phases, run_id="run", checkpoints=checkpoints), chats=chats)
    assert text.startswith(command)


@pytest.mark.parametrize(
    ("record_format", "answers"),
    [
        (SupervisedFormat(), False),
        (PairsFormat(), False),
        (PromptsFormat(), False),
        (SupervisedFormat(chat_template="chatml"), True),
        (ChatFormat(), True),
        (ShareGptFormat(), True),
    ],
)
def test_only_models_that_learn_a_chat_template_chat(record_format, answers):
    assert chats(record_format) is answers


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ({}, ["--trainer.num_train_steps 80"]),
        ({"epoch": 3}, ["--epoch 6"]),
        (
            {"phases": [PhaseConfig(name="one", num_train_steps=10), PhaseConfig(name="two")]},
            ["--trainer.num_train_steps 80"],
        ),
        (
            {"phases": [PhaseConfig(name="one", num_train_steps=10), PhaseConfig(name="one", num_train_steps=30)]},
            ["--phases.1.num_train_steps 60"],
        ),
        (
            {
                "phases": [PhaseConfig(name="one", num_train_steps=10), PhaseConfig(name="one", num_train_steps=30)],
                "trainer": TrainerConfig(num_train_steps=40),
            },
            ["--phases.1.num_train_steps 60 --trainer.num_train_steps 70"],
        ),
        ({"phases": [PhaseConfig(name="one", num_train_steps=40)], "preset": SimpleNamespace()}, []),
    ],
)
def test_the_report_advises_the_key_that_trains_longer(keys, advice):
    config = SimpleNamespace(**{"epoch": 0, "phases": [], "preset": None, "trainer": TrainerConfig()} | keys)
    rows = how_to_train_longer(SimpleNamespace(config=config, num_steps=40))
    assert [text for _, text in rows] == [f"run the same command with {key}" for key in advice]


def test_the_report_names_what_the_trackers_have_written(tmp_path):
    trackers = [TensorboardConfig(logdir="boards"), WandbConfig(mode="disabled")]
    trainer = SimpleNamespace(trackers=trackers)
    plan = SimpleNamespace(log_folder=tmp_path, run_id="run", config=SimpleNamespace(trainer=trainer))
    metrics, opened = ("metrics", f"{tmp_path}/metrics.jsonl"), ("tensorboard", "tensorboard --logdir boards")
    assert outputs(plan) == [metrics, opened]
    (tmp_path / "samples.jsonl").write_text("")
    assert outputs(plan) == [metrics, ("samples", f"{tmp_path}/samples.jsonl"), opened]
