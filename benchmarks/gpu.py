"""Compares jaxlm with torch.compile on one NVIDIA GPU, and its kernels with references. Offline, in under nine minutes.

    python benchmarks/gpu.py --output gpu
    python benchmarks/gpu.py --models GPT-2      # only the models whose name contains GPT-2, and their kernels
    python benchmarks/gpu.py --tiny              # the same code on a CPU, with tiny shapes
    python benchmarks/gpu.py --forecast h200-1   # jaxlm alone, compiled for a GPU you do not have; nothing runs

The models are GPT-2 124M on 1,024 tokens, and a 1.2B Llama and a 1.4B Llama with heads of 128 on 4,096 tokens, in
bfloat16 with float32 parameters, on random tokens. jaxlm and PyTorch run in separate processes, in turn, round after
round while time remains. jaxlm is measured by `python -m jaxlm bench`. PyTorch runs a compiled step with the attention
backend that is fastest at the model's shape, and splits the batch into microbatches only if it does not fit. Writes
OUTPUT.md and OUTPUT.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from processes import PeerFailedError, answer_of

PEERS = Path(__file__).parent / "peers"
PROBES = {
    "jax": "import jax, json; d = jax.devices()[0]; m = (d.memory_stats() or {}).get('bytes_limit', 0);"
    " print(json.dumps({'gpu': d.platform == 'gpu', 'is': d.device_kind, 'bytes': m}))",
    "torch": "import torch, json; print(json.dumps({'gpu': torch.cuda.is_available(), 'is': torch.__version__}))",
}


@dataclass(frozen=True)
class Model:
    """One model at one batch size. `shape` uses the PyTorch peer's names. `small_rows` is for GPUs with 80 GB."""

    name: str
    rows: int
    shape: dict
    small_rows: int

    def sized_for(self, memory_bytes: int) -> "Model":
        """The model with the batch size for a GPU with that much memory."""
        return self if memory_bytes > 100e9 else replace(self, rows=self.small_rows)

    @property
    def config(self) -> dict:
        """The run's configuration for jaxlm."""
        s = self.shape
        model = {
            "type": s["family"],
            "seq_len": s["seq_len"],
            "hidden_dim": s["hidden"],
            "num_layers": s["layers"],
            "num_heads": s["heads"],
        }
        if s["family"] == "llama":
            more = {"intermediate_dim": s["mlp"], "num_kv_heads": s["kv_heads"], "tie_word_embeddings": s["tied"]}
            model |= more
        trainer = {"train_batch_size": self.rows, "mp": "p=f32,c=bfloat16", "log_dir": "logs"}
        return {"data": {"vocab_size": s["vocab"]}, "model": model, "trainer": trainer}


def make_model(name: str, rows: int, family: str, *, small_rows: int | None = None, **sizes) -> Model:
    """A model. `mlp`, `kv_heads` and `tied` default to GPT-2's, and `small_rows` to `rows`."""
    usual = {"kv_heads": sizes["heads"], "mlp": 4 * sizes["hidden"], "tied": family == "gpt2"}
    return Model(name, rows, {"family": family, **usual, **sizes}, rows if small_rows is None else small_rows)


LONG = {"family": "llama", "hidden": 2048, "seq_len": 4096, "small_rows": 8}
MODELS = (
    make_model("GPT-2 124M, T1024", 128, "gpt2", hidden=768, layers=12, heads=12, seq_len=1024, vocab=50304),
    make_model("Llama 1.2B, T4096", 16, **LONG, layers=16, heads=32, kv_heads=8, mlp=8192, vocab=128256, tied=True),
    make_model("Llama 1.4B, head size 128, T4096", 16, **LONG, layers=24, heads=16, mlp=5504, vocab=50304),
)
TINY_SIZES = {"hidden": 32, "layers": 1, "seq_len": 32, "vocab": 64}
TINY = (
    make_model("tiny GPT-2", 4, "gpt2", heads=4, **TINY_SIZES),
    make_model("tiny Llama", 4, "llama", heads=4, kv_heads=2, mlp=48, **TINY_SIZES),
)
DOCUMENTS = (1, 12)


@dataclass
class Run:
    """The benchmark's options and results."""

    models: tuple[Model, ...]
    steps: int
    warmup: int
    python: dict[str, str]
    ends: float
    kernels: dict = field(default_factory=dict)
    answers: dict = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until the benchmark must end."""
        return self.ends - time.monotonic()

    def answer_or_none(self, what: str, command: list[str]) -> dict | None:
        """Runs a process and returns its answer. Records a failure and returns None if it has none."""
        began = time.monotonic()
        try:
            answer = answer_of(command, timeout_s=max(1.0, self.left_s))
        except PeerFailedError as error:
            self.failures.append(f"{what}: {error}")
            print(f"{what}: {str(error)[-1000:]}", file=sys.stderr)
            return None
        answer["process_seconds"] = time.monotonic() - began
        print(f"{what}: {answer['process_seconds']:.0f} s, {self.left_s:.0f} s left", file=sys.stderr)
        return answer

    def compare_kernels(self) -> None:
        """Measures attention at every model's shape, with one and with many documents, and the loss."""
        attention, losses = [], []
        for model in self.models:
            s = model.shape
            common = {"rows": model.rows, "length": s["seq_len"], "heads": s["heads"], "kv_heads": s["kv_heads"]}
            size = s["hidden"] // s["heads"]
            attention += [{**common, "head_size": size, "documents": n} for n in DOCUMENTS]
            losses.append({"tokens": model.rows * s["seq_len"], "embed": s["hidden"], "vocab": s["vocab"]})
        request = {"attention": attention, "loss": losses, "repeats": min(10, self.steps)}
        script = str(PEERS / "jaxlm_kernels.py")
        self.kernels = self.answer_or_none("kernels", [self.python["jax"], script, json.dumps(request)]) or {}

    def commands(self, model: Model, folder: Path) -> Iterator[tuple[str, list[str]]]:
        """Yields (peer, command) for every peer that can run."""
        path = folder / f"{self.models.index(model)}.yaml"
        path.write_text(json.dumps(model.config))  # JSON is valid YAML
        count = ["--steps", str(self.steps), "--warmup", str(self.warmup)]
        cache = ["--trainer.compilation_cache_dir", str(folder / "programs")]
        yield "jaxlm", [self.python["jax"], "-m", "jaxlm.commands.bench", "--config_path", str(path), *count, *cache]
        if "torch" in self.python:
            request = {"shape": model.shape, "rows": model.rows, "steps": self.steps, "warmup": self.warmup}
            yield "torch.compile", [self.python["torch"], str(PEERS / "torch_decoder.py"), json.dumps(request)]

    def take_turns(self, rounds: int) -> None:
        """Runs every peer on every model, round after round. Skips processes that would not finish in time. Measures the
        kernels after the first round."""
        with tempfile.TemporaryDirectory() as folder:
            for number in range(rounds):
                for model in self.models:
                    for peer, command in self.commands(model, Path(folder)):
                        answers = self.answers.setdefault(model.name, {}).setdefault(peer, [])
                        longest = max((a["process_seconds"] for a in answers), default=0.0)
                        if self.left_s < longest or len(answers) < number:
                            continue  # no time left, or it failed before
                        answer = self.answer_or_none(f"round {number + 1}, {model.name}, {peer}", command)
                        answers += [answer] if answer else []
                if number == 0:
                    self.compare_kernels()


def main() -> None:
    """Runs all rounds and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and few steps, to run all code on a CPU")
    parser.add_argument("--models", default="", help="only models whose name contains this text (default all)")
    parser.add_argument("--forecast", metavar="TOPOLOGY", help="print what `jaxlm bench --topology` expects")
    parser.add_argument("--rounds", type=int, default=3, help="maximum number of rounds (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps per process (default 10)")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps before them (default 3)")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit in minutes (default 8.5)")
    parser.add_argument("--jax_python", default=sys.executable, help="interpreter that has jaxlm (default: this one)")
    parser.add_argument("--torch_python", default=sys.executable, help="the one that has PyTorch (default: this one)")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="prefix of OUTPUT.md and OUTPUT.json")
    options = parser.parse_args()
    models = [model for model in (TINY if options.tiny else MODELS) if options.models in model.name]
    if not models:
        parser.error(f"--models: no model has '{options.models}' in its name")
    if options.forecast:
        forecast(options.jax_python, options.forecast, models)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # jax's default is 0.75 of the GPU's memory
    ends = time.monotonic() + 60 * options.minutes
    pythons = {"jax": options.jax_python, "torch": options.torch_python}
    if options.tiny:
        run = Run(tuple(models), 2, 1, pythons, ends)
    else:
        pythons, memory_bytes = usable(pythons)
        sized = tuple(model.sized_for(memory_bytes) for model in models)
        run = Run(sized, options.steps, options.warmup, pythons, ends)
    run.take_turns(options.rounds)
    text = report(run)
    options.output.with_suffix(".md").write_text(text)
    results = {"kernels": run.kernels, "models": run.answers, "failures": run.failures}
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=1))
    print(text)
    if run.failures:
        raise SystemExit(f"{len(run.failures)} process(es) failed. See {options.output}.json")


def forecast(python: str, topology: str, models: Sequence[Model]) -> None:
    """Prints a table of the expected results for the models."""
    print("| model | tokens/s | causal MFU | products and attention | memory-bound | memory per GPU | how |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.yaml"
            path.write_text(json.dumps(model.config))
            try:
                command = [python, "-m", "jaxlm.commands.bench", "--config_path", str(path), "--topology", topology]
                answer = answer_of(command)
            except PeerFailedError as error:
                raise SystemExit(str(error)) from error
        seconds = f"{answer['compute_seconds']:.3f} s | {answer['memory_seconds']:.3f} s"
        rate = f"{answer['tokens_per_second']:,.0f} | {answer['mfu']:.1%}"
        how = f"{answer['compiled_for']}, recomputation {answer['recomputation']}"
        print(f"| {model.name} | {rate} | {seconds} | {answer['memory_bytes'] / 2**30:.1f} GiB | {how} |", flush=True)


def usable(pythons: dict[str, str]) -> tuple[dict[str, str], int]:
    """The interpreters whose library finds an NVIDIA GPU, and the bytes of its memory that jax may use.

    Raises:
        SystemExit: jax finds none.
    """
    usable_pythons, memory_bytes = {}, 0
    for name, python in pythons.items():
        try:
            answer = answer_of([python, "-c", PROBES[name]])
        except (PeerFailedError, OSError) as error:
            answer = {"gpu": False, "is": str(error).strip().splitlines()[-1]}
        if answer["gpu"]:
            usable_pythons[name] = python
            memory_bytes = max(memory_bytes, answer.get("bytes", 0))
        else:
            print(f"{name} in {python} finds no NVIDIA GPU: {answer['is']}", file=sys.stderr)
    if "jax" not in usable_pythons:
        raise SystemExit(
            "jax finds no NVIDIA GPU, so there is nothing to measure. Install it with `pip install 'jaxlm[gpu]'`, or use"
            " --tiny to run the same code on a CPU"
        )
    if "torch" not in usable_pythons:
        print("PyTorch is not measured. Set --torch_python to an interpreter that has it", file=sys.stderr)
    return usable_pythons, memory_bytes


# --- The report -------------------------------------------------------------------------------------------------------


def report(run: Run) -> str:
    """The results as one markdown table."""
    heads = ("what", "peer", "measured", "vs. PyTorch", "causal MFU", "memory", "how")
    rows = [heads, ["---"] * len(heads)]
    rows += [row for name, answers in run.answers.items() for row in model_rows(name, answers)]
    rows += [attention_row(case, name) for case in run.kernels.get("attention", []) for name in sorted(measured(case))]
    rows += [row for case in run.kernels.get("loss", []) for row in loss_rows(case)]
    device = run.kernels.get("device", "unknown device")
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    legend = "lowest and highest process, number of processes, and interquartile range within the last one"
    return "\n".join([f"{device}. Medians; in brackets: {legend}.", "", *lines, ""])


def model_rows(name: str, answers: dict[str, list[dict]]) -> Iterator[list[str]]:
    """One row per peer: tokens/s over its processes, and MFU with jaxlm's FLOP count."""
    rates = {peer: [a["tokens_per_second"] for a in runs] for peer, runs in answers.items() if runs}
    ours, theirs = (rates.get(peer) for peer in ("jaxlm", "torch.compile"))
    for peer, values in rates.items():
        last, rate = answers[peer][-1], statistics.median(values)
        mfu = None
        if ours and answers["jaxlm"][-1]["mfu"] is not None:
            first = answers["jaxlm"][-1]
            mfu = first["mfu"] * rate / first["tokens_per_second"]
        ratio = f"{rate / statistics.median(theirs):.2f}" if theirs else "-"
        within = last["step_seconds_spread"] / last["step_seconds"]
        spread = f"{rate:,.0f} tokens/s ({min(values):,.0f} to {max(values):,.0f}; {len(values)}; {within:.1%})"
        peak = last["peak_bytes"]
        memory = "-" if peak is None else f"{peak / 2**30:.1f} GiB"
        yield [name, peer, spread, ratio, "-" if mfu is None else f"{mfu:.1%}", memory, how(peer, last)]


def how(peer: str, answer: dict) -> str:
    """How a peer's step was compiled, in words."""
    if peer == "jaxlm":
        kernels = ", ".join(f"{name} x {n}" for name, n in answer["kernels"].items()) or "no library kernels"
        return f"recomputation {answer['recomputation']}; {kernels}; compiled in {answer['compile_seconds']:.0f} s"
    parts = f"{answer['attention']}, {answer['micro_batches']} microbatch(es)"
    return f"{parts}, first step {answer['compile_seconds']:.0f} s"


def measured(case: dict) -> list[str]:
    """The backends measured in an attention case."""
    return [name for name, result in case.items() if isinstance(result, dict)]


def attention_row(case: dict, name: str) -> list[str]:
    """An attention backend's time and errors."""
    sizes = "{rows} x {length}, {heads}/{kv_heads} heads of {head_size}, {documents} document(s)".format(**case)
    result = case[name]
    errors = ", ".join(f"{key} {value:.1e}" for key, value in result["errors"].items())
    mark = f"chosen: {case['reason']}; " if name == case["chosen"] else ""
    return [f"attention, {sizes}", name, milliseconds(result["seconds"]), "-", "-", "-", f"{mark}errors {errors}"]


def loss_rows(case: dict) -> Iterator[list[str]]:
    """Rows for the loss in chunks and with all logits at once."""
    what = "loss, {tokens} tokens, {embed} to {vocab}".format(**case)
    errors = ", ".join(f"{key} {value:.1e}" for key, value in case["errors"].items())
    yield [what, "jaxlm", milliseconds(case["seconds"]), "-", "-", "-", f"errors {errors}"]
    yield [what, "all logits at once", milliseconds(case["seconds_all_logits"]), "-", "-", "-", "the reference"]


def milliseconds(seconds: float | None) -> str:
    """Forward and backward together, in words."""
    return "does not fit" if seconds is None else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
