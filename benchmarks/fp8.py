"""Training in fp8 on one NVIDIA GPU of the Hopper generation or newer: speed, and loss curves. Offline, in under six minutes.

    python benchmarks/fp8.py --output fp8
    python benchmarks/fp8.py --tiny              # the same code on a CPU, with tiny shapes
    python benchmarks/fp8.py --forecast h100-1   # speed only, compiled for a GPU you do not have; nothing runs

Speed: `python -m jaxlm bench` on the 1.4B and the 1.2B Llama of `gpu.py`, in bfloat16 and with the two recipes, in separate
processes. Loss: `python -m jaxlm.train` for 50 steps of a 160M Llama on the source files of Python's standard library, with
the same seed. The check passes if the mean loss of every ten steps is within 1 % of bfloat16. Writes OUTPUT.md and
OUTPUT.json, and exits with 1 if the check or a process fails.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpu import MODELS, TINY, Model, usable
from processes import PeerFailedError, answer_of, shortened
from training_runs import read, trainer_in

VARIANTS = {"bfloat16": None, "tensorwise": "tensorwise", "rowwise": "rowwise"}
LIMIT = 0.01  # of the relative difference of the mean loss of ten steps
CURVE = {
    "hidden_dim": 1024,
    "intermediate_dim": 2816,
    "num_layers": 10,
    "num_heads": 8,
    "num_kv_heads": 8,
    "seq_len": 1024,
}
TINY_CURVE = {
    "hidden_dim": 128,
    "intermediate_dim": 256,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "seq_len": 128,
}


def with_recipe(config: dict, recipe: str | None, min_features: int) -> dict:
    """The configuration with the surgery; without a recipe, unchanged."""
    if recipe is None:
        return config
    surgery = {"type": "fp8", "recipe": recipe, "min_features": min_features}
    return {**config, "phases": [{"name": "train", "surgery": [surgery]}]}


def curve_config(sizes: dict, recipe: str | None, folder: Path, steps: int, rows: int) -> dict:
    """A run on the standard library's source files. All variants share the token cache."""
    data = {"train_urls": ["stdlib:train"], "cache_dir": str(folder / "cache"), "tokenizer": "bpe", "vocab_size": 4096}
    keys = {"mp": "p=f32,c=bfloat16", "num_train_steps": steps, "train_batch_size": rows}
    trainer = trainer_in(folder, folder, id=f"curve-{recipe or 'bfloat16'}", **keys)
    optimizer = {"learning_rate": 1e-3, "warmup": 10, "lr_schedule": "constant"}
    config = {"data": data, "model": {"type": "llama", **sizes}, "trainer": trainer, "optimizer": optimizer}
    return with_recipe({**config, "evals": []}, recipe, 128)


@dataclass
class Run:
    """The benchmark's options and results."""

    python: str
    ends: float
    models: tuple[Model, ...]
    tiny: bool
    steps: int
    speeds: dict = field(default_factory=dict)
    curves: dict = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until the benchmark must end."""
        return max(1.0, self.ends - time.monotonic())

    def measure_curve(self, variant: str, folder: Path) -> None:
        """The loss of every step, read from the log."""
        sizes, steps, rows = (TINY_CURVE, 20, 4) if self.tiny else (CURVE, 50, 16)
        config = curve_config(sizes, VARIANTS[variant], folder, steps, rows)
        path = folder / f"{config['trainer']['id']}.yaml"
        path.write_text(json.dumps(config))  # JSON is valid YAML
        command = [self.python, "-m", "jaxlm.train", "--config_path", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.left_s, check=False)
        except subprocess.TimeoutExpired as error:
            self.failures.append(f"curve, {variant}: timed out after {error.timeout:.0f} s")
            return
        if done.returncode:
            self.failures.append(f"curve, {variant}: {shortened(done.stderr)}")
            return
        records = read(folder / "logs" / config["trainer"]["id"] / "metrics.jsonl")
        self.curves[variant] = losses = [record["train/loss"] for record in records if "train/loss" in record]
        print(f"curve, {variant}: {losses[0]:.4f} to {losses[-1]:.4f}, {self.left_s:.0f} s left", file=sys.stderr)

    def measure_speed(self, model: Model, variant: str, folder: Path, *more: str) -> None:
        """One process of `jaxlm bench`."""
        path = folder / f"{self.models.index(model)}-{variant}.yaml"
        path.write_text(json.dumps(with_recipe(model.config, VARIANTS[variant], 16 if self.tiny else 128)))
        command = [self.python, "-m", "jaxlm.commands.bench", "--config_path", str(path), *more]
        try:
            answer = answer_of(command, timeout_s=self.left_s)
        except PeerFailedError as error:
            self.failures.append(f"{model.name}, {variant}: {error}")
            print(self.failures[-1][-1000:], file=sys.stderr)
            return
        self.speeds.setdefault(model.name, {})[variant] = answer
        print(f"{model.name}, {variant}: {answer['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)


def differences(curves: dict[str, list[float]]) -> dict[str, float]:
    """The largest relative difference from bfloat16 of the mean loss of ten steps, for each recipe."""
    tens = lambda losses: [statistics.mean(losses[at : at + 10]) for at in range(0, len(losses), 10)]  # noqa: E731
    exact = curves.get("bfloat16")
    others = {name: losses for name, losses in curves.items() if name != "bfloat16" and exact}
    return {n: max(abs(a / b - 1) for a, b in zip(tens(v), tens(exact), strict=True)) for n, v in others.items()}


def report(run: Run, device: str) -> str:
    """The results as two markdown tables."""
    lines = [f"{device}. Medians of the steps.", ""]
    lines += ["| model | products | tokens/s | vs. bfloat16 | MFU | memory | kernels |", "| --- " * 7 + "|"]
    for name, answers in run.speeds.items():
        plain = answers.get("bfloat16", {}).get("tokens_per_second")
        for variant, answer in answers.items():
            rate, peak = answer["tokens_per_second"], answer.get("peak_bytes") or answer.get("memory_bytes") or 0
            ratio = f"{rate / plain:.3f}" if plain else "-"
            mfu = "-" if answer["mfu"] is None else f"{answer['mfu']:.1%}"
            used = ", ".join(f"{kernel} x {n}" for kernel, n in answer["kernels"].items()) or "none"
            lines.append(f"| {name} | {variant} | {rate:,.0f} | {ratio} | {mfu} | {peak / 2**30:.1f} GiB | {used} |")
    apart = differences(run.curves)
    if run.curves:
        lines += ["", "| products | first loss | last loss | largest difference of ten steps |", "| --- " * 4 + "|"]
    for variant, losses in run.curves.items():
        difference = f"{apart[variant]:.3%}" if variant in apart else "-"
        lines.append(f"| {variant} | {losses[0]:.4f} | {losses[-1]:.4f} | {difference} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures the curves, then the speeds, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to run all of the code on a CPU")
    parser.add_argument("--forecast", metavar="TOPOLOGY", help="compile the steps for a GPU that is not attached")
    parser.add_argument("--models", default="", help="only models whose name contains this text (default all)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps per process (default 12)")
    parser.add_argument("--minutes", type=float, default=5.8, help="time limit in minutes (default 5.8)")
    parser.add_argument("--jax_python", default=sys.executable, help="interpreter that has jaxlm (default: this one)")
    parser.add_argument("--output", type=Path, default=Path("fp8"), help="prefix of OUTPUT.md and OUTPUT.json")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # jax's default is 0.75 of the GPU's memory
    models, device = (TINY[1:] if options.tiny else tuple(reversed(MODELS[1:]))), f"compiled for {options.forecast}"
    if not (options.tiny or options.forecast):
        _, memory_bytes = usable({"jax": options.jax_python})
        models = tuple(model.sized_for(memory_bytes) for model in models)
    models = tuple(model for model in models if options.models in model.name)
    run = Run(options.jax_python, time.monotonic() + 60 * options.minutes, models, options.tiny, options.steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variant in () if options.forecast else VARIANTS:
            run.measure_curve(variant, folder)
        more = ["--topology", options.forecast] if options.forecast else ["--steps", str(run.steps), "--warmup", "3"]
        for model in models:
            for variant in VARIANTS:
                run.measure_speed(model, variant, folder, *more)
    if not options.forecast:
        device = next((a["devices"] for answers in run.speeds.values() for a in answers.values()), "unknown device")
    text = report(run, device)
    options.output.with_suffix(".md").write_text(text)
    results = {"speeds": run.speeds, "curves": run.curves, "failures": run.failures}
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=1))
    print(text)
    apart = [f"{variant} {value:.3%}" for variant, value in differences(run.curves).items() if value > LIMIT]
    if run.failures or apart:
        failures = [*(f[:500] for f in run.failures), *(f"loss: {each} from bfloat16" for each in apart)]
        raise SystemExit("; ".join(failures))


if __name__ == "__main__":
    main()
