"""Trains a 4-layer student with and without an 8-layer teacher on Python's standard library, at equal steps.

    python benchmarks/distill.py --folder runs/distill [--seeds 0,1,2] [--teacher_steps 1300] [--steps 1000]
        [--jobs 1]

First trains the teacher. Then, for each seed, trains the student alone (`next_token`) and with the teacher (`distill`,
forward KL and JS over the whole vocabulary, and forward KL from the cached top 32). Student, data and optimizer are the
same. Each run is a process of its own and takes at most about 10 minutes on 2 CPU cores. Start the same command again
after an interruption: finished runs are not repeated, and the others continue from their last checkpoint.

Writes `distill.json` (validation loss by step of every run, with means and standard deviations over the seeds) and
`distill.png` into the folder. The last line printed is JSON: form -> [mean, standard deviation] of the last validation
loss.
"""

import argparse
import itertools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from training_runs import LLAMA, mean_and_deviation, plot_losses, start, trainer, validation_losses

EVALS_PER_RUN = 10
DATA = {
    "train_urls": ["stdlib:train"],
    "validation_urls": ["stdlib:validation"],
    "cache_dir": "cache",
    "vocab_size": 4096,
}
OPTIMIZER = {"learning_rate": 6e-3, "weight_decay": 0.1, "warmup": 50, "lr_schedule": "linear", "min_lr_ratio": 0.0}
TEACHER, TEACHER_LAYERS, STUDENT_LAYERS = "teacher", 8, 4
OBJECTIVES: dict[str, dict] = {
    "alone": {"type": "next_token"},
    "forward KL": {"type": "distill", "temperature": 2.0, "weight": 0.5},
    "JS": {"type": "distill", "divergence": "js", "temperature": 2.0, "weight": 0.5},
    "forward KL, cached top 32": {"type": "distill", "temperature": 2.0, "weight": 0.5, "top_k": 32, "cache": True},
}


def main() -> None:
    """Trains everything that is not trained yet, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for runs, caches and results")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds of the students (default 0,1,2)")
    parser.add_argument("--teacher_steps", type=int, default=1300, help="steps of the teacher (default 1300)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each student (default 1000)")
    parser.add_argument("--forms", default=",".join(FORM_NAMES), help="comma-separated (default all)")
    parser.add_argument("--jobs", type=int, default=1, help="students that train at the same time (default 1)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    losses = {TEACHER: {0: train(options.folder, TEACHER, teacher_config(options.teacher_steps))}}

    def train_student(student: tuple[int, str]) -> dict[int, float]:
        seed, form = student
        config = student_config(form, seed, options.steps, options.teacher_steps)
        return train(options.folder, f"{short(form)}-{seed}", config)

    forms = [FORM_NAMES[name] for name in options.forms.split(",")]
    students = list(itertools.product(map(int, options.seeds.split(",")), forms))
    with ThreadPoolExecutor(options.jobs) as pool:
        for (seed, form), found in zip(students, pool.map(train_student, students), strict=True):
            losses.setdefault(form, {})[seed] = found
            report(options.folder, losses)  # after every run, so that an interruption loses none


def short(form: str) -> str:
    """A form's name in file names and on the command line."""
    return form.lower().replace(",", "").replace(" ", "_")


FORM_NAMES = {short(form): form for form in OBJECTIVES}


def teacher_config(steps: int) -> dict:
    """The teacher's run."""
    return run_config(steps, seed=100, num_layers=TEACHER_LAYERS, objective={"type": "next_token"})


def student_config(form: str, seed: int, steps: int, teacher_steps: int) -> dict:
    """A student's run."""
    config = run_config(steps, seed=seed, num_layers=STUDENT_LAYERS, objective=OBJECTIVES[form])
    if OBJECTIVES[form]["type"] == "distill":
        path = f"checkpoints/{TEACHER}/step-{teacher_steps}"
        config["refs"] = {"teacher": {"type": "checkpoint", "path": path, "dtype": "float32"}}
    return config


def run_config(steps: int, *, seed: int, num_layers: int, objective: dict) -> dict:
    """The configuration that all runs share."""
    keys = trainer(seed, 8, max(1, steps // EVALS_PER_RUN)) | {"num_train_steps": steps, "max_eval_batches": 50}
    model = {**LLAMA, "num_layers": num_layers}
    return {"data": DATA, "model": model, "trainer": keys, "objective": objective, "optimizer": OPTIMIZER}


def train(folder: Path, name: str, config: dict) -> dict[int, float]:
    """Trains a run to its end if it is not there yet. Returns step -> validation loss."""
    losses = validation_losses(folder, name)
    if config["trainer"]["num_train_steps"] not in losses:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        start(folder, name, "--config_path", f"{name}.yaml")
        losses = validation_losses(folder, name)
    return losses


def report(folder: Path, losses: Mapping[str, Mapping[int, Mapping[int, float]]]) -> None:
    """Writes the results so far, and prints the last losses."""
    last = {form: [by_step[max(by_step)] for by_step in seeds.values()] for form, seeds in losses.items()}
    summary = {form: mean_and_deviation(values) for form, values in last.items()}
    (folder / "distill.json").write_text(json.dumps({"summary": summary, "losses": losses}, indent=1))
    plot(folder / "distill.png", losses)
    print(json.dumps(summary))


def plot(path: Path, losses: Mapping[str, Mapping[int, Mapping[int, float]]]) -> None:
    """Plots the mean validation loss by step, with the range over the seeds, and the teacher's last one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for form in filter(losses.get, OBJECTIVES):
        plot_losses(axes, losses[form], form)
    (teacher,) = losses[TEACHER].values()
    axes.axhline(teacher[max(teacher)], color="0.4", linestyle="--", label="teacher, at its end")
    axes.set(xlabel="step of the student", ylabel="validation loss (nats per token)")
    axes.set_title(f"A {STUDENT_LAYERS}-layer student of an {TEACHER_LAYERS}-layer teacher, mean and range over seeds")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
