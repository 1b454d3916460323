"""GRPO on GSM8K with a reward for the form of an answer: its part of post_training.py.

The form: every line has an equation, and the last line is `####` and a number. Whether the number is right is counted, but
not rewarded. Questions of at most 160 characters are asked, 100 of them only in evaluations. All other records fine-tune
the model first, without the annotations of the calculator, so that its answers sometimes have the form. An answer has at most
80 tokens, which is too few for a third of GSM8K's own solutions.

The runs: `gsm8k` fine-tunes. `grpo` rewards the form. Two controls differ from it in one key each: `grpo-zero` has a
learning rate of 0, `grpo-negated` gives -1 for the form. All are evaluated alike: 4 answers to each held-out question,
sampled with the same seed. Answers to one question resemble each other, so the standard errors are those of means over the
questions.
"""

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training_runs import Records, averaged, read, series, train, trainer, write

QUESTIONS = "gsm8k_train_2000.jsonl"
TUNED, REWARDED, ZERO, NEGATED = "gsm8k", "grpo", "grpo-zero", "grpo-negated"
FORM = r"([^\n=]*=[^\n]*\n)+#### -?[\d,.]*\d"
LONGEST_QUESTION, HELD_OUT, ANSWERS = 160, 100, 4
SFT_STEPS, SFT_BATCH = 300, 8
STEPS = {REWARDED: 100, ZERO: 20, NEGATED: 40}
STEPS_PER_EVAL, PROMPTS, GROUP, NEW_TOKENS, SEQ_LEN = 20, 8, 8, 80, 160
LEARNING_RATE, KL_COEF = 2e-4, 0.04
_HELD_OUT_FILE = "gsm8k_held_out.jsonl"
Found = list[dict[str, Any]]


def run_all(data: Path, folder: Path, export: str, shape: Mapping[str, Any], seed: int) -> dict[str, Records]:
    """Trains what is not there yet. Returns the records of each run. Args: shape: of the learning rate while fine-tuning."""
    split(data / QUESTIONS, folder, seed)
    runs = {TUNED: train(folder, TUNED, tuning_config(export, shape, seed))}
    start = f"exports/{TUNED}/step-{SFT_STEPS}"
    return runs | {name: train(folder, name, grpo_config(name, start, seed)) for name in STEPS}


def split(path: Path, folder: Path, seed: int) -> None:
    """Writes the records to fine-tune on, the questions of GRPO, which are among them, and those that are held out."""
    records = [as_record(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(seed).shuffle(records)
    is_short = lambda record: len(record["question"]) <= LONGEST_QUESTION  # noqa: E731
    held_out = list(filter(is_short, records))[:HELD_OUT]
    asked = {record["question"] for record in held_out}
    others = [record for record in records if record["question"] not in asked]
    for name, part in (("held_out", held_out), ("train", others), ("prompts", filter(is_short, others))):
        write(folder / f"gsm8k_{name}.jsonl", map(json.dumps, part))


def as_record(record: Mapping[str, str]) -> dict[str, str]:
    """A question as a prompt, its solution without annotations such as `<<48/2=24>>`, and its last number."""
    solution = re.sub("<<.*?>>", "", record["answer"])
    return {
        "question": record["question"],
        "prompt": f"Question: {record['question']}\nAnswer:\n",
        "response": solution,
        "answer": solution.rpartition("####")[2].strip(),
    }


def tuning_config(export: str, shape: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The run that fine-tunes on solutions."""
    return {
        "initialize_from_hf": export,
        "use_hf_model_config": True,
        "data": {
            "train_urls": ["gsm8k_train.jsonl"],
            "validation_urls": [_HELD_OUT_FILE],
            "cache_dir": f"cache/{TUNED}",
            "tokenizer": export,
            "format": {"type": "supervised", "input_field": "prompt", "output_field": "response"},
        },
        "optimizer": {"learning_rate": 1e-3, **shape},
        "trainer": {**trainer(seed, SFT_BATCH, SFT_STEPS // 5), "num_train_steps": SFT_STEPS},
        "hf_save_path": f"exports/{TUNED}",
        "evals": [{"type": "loss"}, evaluation()],
    }


def grpo_config(name: str, start: str, seed: int) -> dict[str, Any]:
    """A run of GRPO, or one of its controls. Args: start: the export of the fine-tuned model."""
    return {
        "initialize_from_hf": start,
        "use_hf_model_config": True,
        "model": {"seq_len": SEQ_LEN},
        "data": {
            "type": "rollouts",
            "train_urls": ["gsm8k_prompts.jsonl"],
            "cache_dir": "cache/gsm8k-prompts",
            "tokenizer": start,
            "group_size": GROUP,
            "max_new_tokens": NEW_TOKENS,
            "rewards": rewards(-1.0 if name == NEGATED else 1.0),
        },
        "objective": {"type": "grpo", "old_policy": "rollout", "kl": {"coef": KL_COEF}},
        "optimizer": {
            "learning_rate": 0.0 if name == ZERO else LEARNING_RATE,
            "weight_decay": 0.0,
            "lr_schedule": "constant",
            "warmup": 5,
        },
        "trainer": {**trainer(seed, PROMPTS, STEPS_PER_EVAL), "num_train_steps": STEPS[name]},
        "evals": [evaluation()],
    }


def rewards(weight: float) -> list[dict[str, Any]]:
    """The form, and right answers, which only are counted."""
    form = {"type": "format", "name": "form", "pattern": FORM, "weight": weight}
    return [form, {"type": "math", "name": "right", "notation": "gsm8k", "weight": 0.0}]


def evaluation() -> dict[str, Any]:
    """The evaluation that all runs share."""
    return {
        "type": "rollouts",
        "prompts_file": _HELD_OUT_FILE,
        "rewards": rewards(1.0),
        "num_samples": ANSWERS,
        "max_new_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "batch_size": HELD_OUT,
    }


def summary(runs: Mapping[str, Records], folder: Path) -> dict[str, Any]:
    """The figures of all runs on the questions that are held out, and of the training."""
    answers = {name: by_step(read(folder / "logs" / name / "completions.jsonl")) for name in runs}
    found = {name: evaluations(runs[name], answers[name]) for name in runs}
    before = answers[TUNED][SFT_STEPS]
    return {
        "evaluations": found,
        "changes": {name: change(before, answers[name][steps]) for name, steps in STEPS.items()},
        "train": {name: training(runs[name]) for name in STEPS},
        "examples": {
            "before": [one["completion"] for one in before[:ANSWERS]],
            "after": [one["completion"] for one in answers[REWARDED][STEPS[REWARDED]][:ANSWERS]],
            "question": before[0]["prompt"],
        },
    }


def by_step(completions: Records) -> dict[int, Records]:
    """The answers to questions that are held out. After an interruption, those of the last attempt."""
    found: dict[int, Records] = defaultdict(list)
    for one in completions:
        if one["name"] != "train":
            found[one["step"]].append(one)
    return {step: answers[-HELD_OUT * ANSWERS :] for step, answers in found.items()}


def evaluations(records: Records, answers: Mapping[int, Records]) -> Found:
    """The figures of each evaluation of a run."""
    metrics = {name: dict(series(records, f"eval/rollouts/completions/{name}")) for name in _LENGTHS}
    return [
        {
            "step": step,
            **{name: mean(by_question(of_step, name)) for name in ("form", "right")},
            "lines": sum(one["completion"].count("\n") for one in of_step) / len(of_step),
            **{name: values[step] for name, values in metrics.items()},
        }
        for step, of_step in answers.items()
    ]


def training(records: Records) -> dict[str, Any]:
    """The first and the last means over ten steps of what a run of GRPO logs."""
    found = {name: [value for _, value in series(records, f"train/{name}")] for name in _TRAINED}
    return {name: [sum(part) / len(part) for part in (v[:10], v[-10:])] for name, v in found.items()}


def change(before: Records, after: Records) -> dict[str, float]:
    """By how much the form has become more frequent, with the standard error of the differences of the same questions."""
    first, last = by_question(before, "form"), by_question(after, "form")
    return mean({place: last[place] - first[place] for place in first})


def by_question(answers: Records, reward: str) -> dict[str, float]:
    """The mean of a reward over the answers to each question."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in answers:
        found[one["place"]].append(one["rewards"][reward])
    return {place: sum(values) / len(values) for place, values in found.items()}


def mean(of_questions: Mapping[str, float]) -> dict[str, float]:
    """The mean over questions and its standard error."""
    number, values = len(of_questions), of_questions.values()
    center = sum(values) / number
    variance = sum((value - center) ** 2 for value in values) / (number - 1)
    return {"mean": center, "standard_error": math.sqrt(variance / number)}


_LENGTHS = ("mean_length", "clipped_ratio")
_TRAINED = ("rewards/form", "rewards/right", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio")


def plot(axes: Sequence[Any], runs: Mapping[str, Records], found: Mapping[str, Any]) -> None:
    """Plots frequencies of the form, lengths and KL divergences, each with the means of the training."""
    forms, lengths, divergences = axes
    start = found["evaluations"][TUNED][-1]
    for name in STEPS:
        evaluated = [{**start, "step": 0}, *found["evaluations"][name]]
        steps = [one["step"] for one in evaluated]
        rates = [one["form"] for one in evaluated]
        errors = [rate["standard_error"] for rate in rates]
        bars = forms.errorbar(steps, [rate["mean"] for rate in rates], errors, fmt=".-", capsize=2, label=_LABELS[name])
        color = bars.lines[0].get_color()
        lengths.plot(steps, [one["mean_length"] for one in evaluated], ".-", color=color)
        divergences.plot(*zip(*averaged(series(runs[name], "train/kl"), 5), strict=True), color=color)
        for of_metric, metric in ((forms, "rewards/form"), (lengths, "completions/mean_length")):
            trained = averaged(series(runs[name], f"train/{metric}"), 5)
            of_metric.plot(*zip(*trained, strict=True), color=color, alpha=0.3)
    forms.set(title="GRPO: answers in the form", xlabel="step", ylim=(0, 1))
    lengths.set(title="GRPO: length", xlabel="step", ylabel="tokens")
    divergences.set(title="GRPO: KL divergence", xlabel="step", ylabel="nats per token")
    forms.legend(title="held out", loc="center right", fontsize="small")


_LABELS = {REWARDED: "reward for the form", ZERO: "learning rate 0", NEGATED: "the reward negated"}
