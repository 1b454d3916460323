"""The comparison of nanochat.py: both programs take the same steps, and read each other's models."""

import csv
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from processes import PeerFailedError, shortened

from jaxlm.data.tokenizer.train_bpe import BpeConfig, train_bpe
from jaxlm.systems.nanochat.core_bundle import CORE_TASKS

PEERS = Path(__file__).resolve().parent / "peers"
STEPS, WARMUP = 20, 5
ROWS, MICROBATCHES, EVAL_BATCHES = 8, 2, 8
VOCAB = 4090  # six rows of padding
LOADER_SETS = ((97, 700), (128, 700), (1000, 3000), (1024, 3072), (700, 700))  # documents of a row group, and in all
LOADER_BATCHES = 200
_SHORTEST_DOCUMENT = 200  # characters
_SPECIAL_TOKENS = (
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
_TIMEOUT_S = 3600
# Of loose files of CORE's tasks, as in its bundle; others have 10 examples, and a space before the answer.
_NO_EXAMPLES = ("copa", "winograd", "lambada_openai")
_ANSWERS: dict[str, str] = dict.fromkeys(("arc_easy", "piqa", "jeopardy"), "\nAnswer: ")
_LOGITS_GOAL, _LOSS_GOAL, _BPB_GOAL = 1e-4, 1e-3, 1e-6


@dataclass(frozen=True)
class Sizes:
    """Of the models and rows. None is the default of both programs; for `head_dim`, 128 from depth 4 on, else 64."""

    seq_len: int = 256
    aspect_ratio: int | None = None
    head_dim: int | None = None
    window_pattern: str | None = None


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        checkout: the checkout in words.
        in_bfloat16: whether Muon orthogonalizes in bfloat16, on both sides.
    """

    checkout: str
    folder: Path
    recipe: str
    depth: int
    in_bfloat16: bool
    sizes: Sizes = Sizes()

    @property
    def head_dim(self) -> int:
        return self.sizes.head_dim or (128 if self.depth >= 4 else 64)

    def __str__(self) -> str:
        return f"{self.checkout}, depth {self.depth}, Muon in {'bfloat16' if self.in_bfloat16 else 'float32'}"


@dataclass(frozen=True)
class Place:
    """What all cases read.

    Attributes:
        shards: folder of Parquet files, the last for validation.
        tokenizer: folder with tokenizer.json.
        bundle: the bundle of CORE; None if it is not measured.
        questions: of each task.
    """

    folder: Path
    shards: Path
    tokenizer: Path
    bundle: Path | None
    questions: int

    @property
    def tasks(self) -> dict[str, str]:
        """Task of CORE -> its file and number of examples, in the form that nanochat's functions take."""
        if self.bundle is None:
            return {}
        entries = yaml.safe_load((self.bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        return {entry["label"]: f"{entry['dataset_uri']} {entry['num_fewshot'][0]}" for entry in entries}


@dataclass(frozen=True)
class Finding:
    """A difference.

    Attributes:
        goal: the most that it may be; None if there is no goal.
        note: what it was computed from.
    """

    case: str
    name: str
    difference: float
    goal: float | None
    note: str = ""

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and not self.difference <= self.goal


def in_words(finding: Finding) -> str:
    """A line of the report."""
    goal = "" if finding.goal is None else f"goal {finding.goal:g}, {'MISSED' if finding.is_missed else 'met'}"
    return f"  {finding.name:54}{finding.difference:>10.2e}  {goal:22}{finding.note}".rstrip()


def make_place(folder: Path, bundle: Path | None, questions: int, row_group: int, num_documents: int) -> Place:
    """Writes two shards of the standard library's source, for training and validation, and a tokenizer trained on the first.

    Args:
        row_group: documents in a row group.
        num_documents: in the first shard; two thirds of it in the second.
    """
    texts = list(documents())
    place = Place(
        folder,
        folder / "shards",
        folder / "tokenizer",
        None if bundle is None else complete_bundle(bundle.resolve(), folder / "bundle"),
        questions,
    )
    parts = texts[:num_documents], texts[num_documents : num_documents + num_documents * 2 // 3]
    write_shards(place.shards, parts, row_group)
    config = BpeConfig(pattern="nanochat", special_tokens=list(_SPECIAL_TOKENS))
    train_bpe(parts[0], VOCAB, config).save(place.tokenizer)
    return place


def write_shards(folder: Path, parts: Iterable[list[str]], row_group: int) -> None:
    """Writes a file of each part."""
    folder.mkdir()
    for number, part in enumerate(parts):
        pq.write_table(pa.table({"text": part}), folder / f"shard_{number:05d}.parquet", row_group_size=row_group)


def documents() -> Iterator[str]:
    """Paragraphs of the standard library's modules."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        paragraphs = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
        yield from (text for text in paragraphs if len(text.strip()) >= _SHORTEST_DOCUMENT)


def complete_bundle(given: Path, folder: Path) -> Path:
    """The bundle of CORE at a path. For loose files of its tasks, writes the rest of a bundle around them.

    Ends the process with a message if the folder has neither.
    """
    if (given / "core.yaml").is_file():
        return given
    found = {
        name: path
        for path in sorted(given.glob("*.jsonl"))
        if (name := next((task for task in CORE_TASKS if path.stem.startswith(task)), None)) is not None
    }
    if not found:
        raise SystemExit(f"--bundle: {given} given, but it has neither core.yaml nor a .jsonl file of a task of CORE")
    (folder / "eval_data").mkdir(parents=True)
    entries = []
    for name, path in found.items():
        (folder / "eval_data" / path.name).symlink_to(path)
        with path.open(encoding="utf-8") as lines:
            keys = json.loads(next(lines))
        kinds = {"choices": "multiple_choice", "context_options": "schema"}
        kind = next((kind for key, kind in kinds.items() if key in keys), "language_modeling")
        entries.append(
            {
                "label": name,
                "dataset_uri": path.name,
                "icl_task_type": kind,
                "num_fewshot": [0 if name in _NO_EXAMPLES else 10],
                "continuation_delimiter": _ANSWERS.get(name, " "),
            }
        )
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    with (folder / "eval_meta_data.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Eval Task", "Random baseline"])
        rows.writerows([name, 0.0] for name in found)
    return folder


def compare_loaders(checkout: str, folder: Path, place: Place) -> Iterator[Finding]:
    """Compares the rows that both programs read from the same files, over several passes.

    Args:
        checkout: in words.
        folder: of nanochat's code.
    """
    case, texts = Case(checkout, folder, "head", 4, in_bfloat16=False), list(documents())
    for number, (row_group, num_documents) in enumerate(LOADER_SETS):
        home = place.folder / f"loader-{folder.name}-{number}"
        base = home / "nanochat"
        own = replace(place, shards=home / "shards", bundle=None)
        home.mkdir()
        write_shards(own.shards, (texts[:num_documents], texts[:num_documents]), row_group)
        make_base(base, own)
        (home / "run.yaml").write_text(yaml.safe_dump(configuration(case, own, home, base)))
        common = {"batch": [ROWS, case.sizes.seq_len], "num_batches": LOADER_BATCHES}
        theirs = {"checkout": str(folder), "base_dir": str(base), "tokenizer": str(place.tokenizer / "tokenizer.json")}
        run_peer("nanochat_torch.py", "rows", {**common, **theirs, "output": str(home / "theirs.npz")}, home)
        ours = {"config": str(home / "run.yaml"), "output": str(home / "ours.npz")}
        run_peer("nanochat_jaxlm.py", "rows", {**common, **ours}, home)
        found, expected = (dict(np.load(home / f"{name}.npz")) for name in ("ours", "theirs"))
        different = sum(int((found[split] != expected[split]).any(axis=1).sum()) for split in expected)
        name = f"rows that differ: {num_documents:,} documents, row groups of {row_group:,}"
        yield Finding(checkout, name, different, 0, f"of {sum(map(len, expected.values())):,}, of both splits")


def compare(case: Case, place: Place) -> list[Finding]:
    """Runs both programs and compares what they compute.

    Raises:
        PeerFailedError: one of them failed.
    """
    home = place.folder / f"{case.recipe}-{case.depth}-{case.in_bfloat16}"
    base, run = home / "nanochat", home / "jaxlm"
    checkpoints = {name: base / "base_checkpoints" / name for name in ("start", "trained", "converted")}
    make_base(base, place)
    run.mkdir()
    common = {"checkout": str(case.folder), "base_dir": str(base)}
    training = {
        **common,
        "tokenizer": str(place.tokenizer / "tokenizer.json"),
        "start": str(checkpoints["start"]),
        "keeps_float32": not case.in_bfloat16,
        "arguments": base_train_arguments(case),
        "output": str(home / "steps.npz"),
    }
    run_peer("nanochat_torch.py", "train", training, home)
    (run / "run.yaml").write_text(yaml.safe_dump(configuration(case, place, run, checkpoints["start"])))
    run_command("train", "--config_path", str(run / "run.yaml"))
    own = str(run / "checkpoints" / "run")
    run_command("convert", "to-nanochat", "--checkpoint", own, "--output_dir", str(checkpoints["converted"]))
    measured = {
        "rows": str(home / "steps.npz"),
        "batch": [ROWS, case.sizes.seq_len],
        "num_batches": EVAL_BATCHES,
        "questions": place.questions if place.bundle else 0,
    }
    named = {name: str(path) for name, path in checkpoints.items()}
    theirs = {**common, **measured, "checkpoints": named, "output": str(home / "theirs.npz")}
    run_peer("nanochat_torch.py", "evaluate", theirs, home)
    ours = {
        **measured,
        "checkpoint": own,
        "checkpoints": {name: named[name] for name in ("start", "trained")},
        "changes": model_changes(case),
        "bundle": str(place.bundle),
        "tasks": [*place.tasks],
        "output": str(home / "ours.npz"),
    }
    run_peer("nanochat_jaxlm.py", "evaluate", ours, home)
    losses = [record["train/loss"] for record in records(run) if "train/loss" in record]
    return findings_of(case, place, home, losses)


def make_base(folder: Path, place: Place) -> None:
    """nanochat's folder of data, under the names of both revisions."""
    folder.mkdir(parents=True)
    for name in ("base_data", "base_data_climbmix"):
        (folder / name).symlink_to(place.shards)
    if place.bundle is not None:
        (folder / "eval_bundle").symlink_to(place.bundle)


def base_train_arguments(case: Case) -> list[str]:
    """The command line of scripts/base_train.py."""
    values = {
        "depth": case.depth,
        "head-dim": case.head_dim,
        "max-seq-len": case.sizes.seq_len,
        "device-batch-size": ROWS,
        "total-batch-size": ROWS * MICROBATCHES * case.sizes.seq_len,
        "num-iterations": STEPS,
        "eval-every": STEPS,
        "eval-tokens": EVAL_BATCHES * ROWS * case.sizes.seq_len,
        "core-metric-every": -1,
        "sample-every": -1,
        "model-tag": "trained",
        **({"warmup-steps": WARMUP} if case.recipe == "head" else {}),
        **({} if case.sizes.aspect_ratio is None else {"aspect-ratio": case.sizes.aspect_ratio}),
        **({} if case.sizes.window_pattern is None else {"window-pattern": case.sizes.window_pattern}),
    }
    return [f"--{name}={value}" for name, value in values.items()]


def configuration(case: Case, place: Place, home: Path, start: Path) -> dict[str, Any]:
    """jaxlm's configuration of the same run."""
    dtype = "bfloat16" if case.in_bfloat16 else "float32"
    return {
        "preset": {
            "type": "depth_dial",
            "depth": case.depth,
            "recipe": case.recipe,
            "head_dim": case.head_dim,
            "total_batch_size": ROWS * MICROBATCHES * case.sizes.seq_len,
            "num_iterations": STEPS,
            "device_batch_size": ROWS,
            **({} if case.sizes.aspect_ratio is None else {"aspect_ratio": case.sizes.aspect_ratio}),
        },
        "initialize_from_hf": str(start),
        "data": {
            "train_urls": [str(place.shards / "*.parquet")],
            "num_validation_files": 1,
            "cache_dir": str(home / "cache"),
            "tokenizer": str(place.tokenizer),
            "enforce_eos": False,
            "shuffle": False,
            "packing": {"type": "best_fit"},
        },
        "model": {
            "seq_len": case.sizes.seq_len,
            **({} if case.sizes.window_pattern is None else {"window_pattern": case.sizes.window_pattern}),
            **model_changes(case),
        },
        "optimizer": {"orthogonalization_dtype": dtype, **({"warmup": WARMUP} if case.recipe == "head" else {})},
        "evals": [{"type": "loss"}],
        "trainer": {
            "id": "run",
            "mp": "f32",
            "steps_per_eval": STEPS,
            "max_eval_batches": EVAL_BATCHES,
            "log_dir": str(home / "logs"),
            "compilation_cache_dir": None,
            "checkpointer": {"base_path": str(home / "checkpoints"), "save_interval": "1h"},
        },
    }


def model_changes(case: Case) -> dict[str, Any]:
    """Keys of the model that nanochat's files do not say: the late revision rounds rotations to the dtype it computes in."""
    return {"rope_dtype": "float32"} if case.recipe == "head" else {}


def run_peer(script: str, mode: str, options: Mapping[str, Any], home: Path) -> None:
    """Runs a script of benchmarks/peers with options in a file."""
    file = home / f"{Path(script).stem}-{mode}.json"
    file.write_text(json.dumps(options))
    _run(f"{script} {mode}", [sys.executable, str(PEERS / script), mode, str(file)])


def run_command(name: str, *arguments: str) -> None:
    """Runs a command of jaxlm."""
    _run(f"jaxlm {name}", [sys.executable, "-m", "jaxlm", name, *arguments])


def _run(name: str, command: list[str]) -> None:
    print(f"{name} ...", file=sys.stderr, flush=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PeerFailedError(f"{name} did not end within {_TIMEOUT_S} s") from error
    if done.returncode:
        raise PeerFailedError(f"{name} failed with exit code {done.returncode}:\n{shortened(done.stderr)}")


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics that a run has logged."""
    lines = (run / "logs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def findings_of(case: Case, place: Place, home: Path, losses: list[float]) -> list[Finding]:
    """Compares the figures that the processes have written."""
    steps, theirs, ours = (dict(np.load(home / f"{name}.npz")) for name in ("steps", "theirs", "ours"))
    facts, own_facts = (json.loads((home / f"{name}.json").read_text()) for name in ("theirs", "ours"))
    expected = steps["losses"].reshape(-1, MICROBATCHES).mean(1)
    differences = np.abs(np.array(losses) - expected)

    def finding(name: str, difference: float, goal: float | None, note: str = "") -> Finding:
        return Finding(str(case), name, float(difference), goal, note)

    def logits(name: str, a: np.ndarray, b: np.ndarray) -> Finding:
        note = f"of {b.size:,}, up to {np.abs(b).max():.1f}"
        return finding(f"logits, {name}", np.abs(a - b).max(), _LOGITS_GOAL, note)

    found = [
        logits("its initial weights in jaxlm", ours["start"], theirs["start"]),
        logits("its trained weights in jaxlm", ours["trained"], theirs["trained"]),
        logits("jaxlm's trained weights in its code", ours["own"], theirs["converted"]),
        finding("loss of the first step", differences[0], _LOSS_GOAL, f"{expected[0]:.6f}"),
        finding(
            f"losses of {STEPS} steps, the largest difference",
            differences.max(),
            _LOSS_GOAL,
            f"from {expected[0]:.4f} to {expected[-1]:.4f}",
        ),
        finding("trained weights, relative to what they moved", facts["distance"], None, facts["farthest"]),
        finding(
            "bits per byte of the same weights", abs(own_facts["bpb"] - facts["bpb"]), _BPB_GOAL, f"{facts['bpb']:.7f}"
        ),
    ]
    if place.bundle is not None:
        found.append(answers_of(case, place, own_facts["answers"], facts["answers"]))
    return found


def answers_of(case: Case, place: Place, ours: Mapping[str, list], theirs: Mapping[str, list]) -> Finding:
    """Compares the answers to CORE, question by question."""
    asked = different = right = 0
    refused = []
    for task, key in place.tasks.items():
        for own, answer in zip(ours[task], theirs[key], strict=True):
            asked += 1
            if isinstance(answer, str):
                refused.append(answer)
                continue
            different += own != answer
            right += answer
    note = f"{asked - len(refused)} of {asked} questions, {right} right"
    if refused:
        note += f"; nanochat stops at {len(refused)}: {'; '.join(dict.fromkeys(refused))}"
    return Finding(str(case), "answers to CORE that differ", different, 0, note)
