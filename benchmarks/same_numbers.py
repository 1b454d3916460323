"""Checks that the working tree computes exactly what an earlier commit computed. For changes that must not change a number.

    python benchmarks/same_numbers.py --before d17b901 [--only losses,programs,continuation,files] [--cases NAME,NAME]
        [--folder FOLDER]

Checks the earlier commit out beside the working tree (`git worktree`) and trains small runs with each, one process at a
time: the quickstart (each tree uses its own file), a Llama, a Mixtral, a GPT-2 with dropout, nano, a two-phase run with LoRA,
DPO, GRPO on rollouts, distillation, a blockwise upcycle, an orchestrator over a portfolio of strategies, and masked diffusion
in a model that grows; most of them on one and on eight simulated devices. It uses only the commands of both trees, so modules
may move and be renamed. `distill` and `upcycle` have the checkpoint of `llama` as their teacher.

losses          every number in `metrics.jsonl` except times is bit-identical, including each training loss, and so are the
                decisions of controllers; the working tree uses the token caches of the earlier commit without rewriting them
programs        the optimized HLO of every step is the same after normalization: source locations are removed and names are
                numbered, because they follow names in the source. The text leaves out the values of some large constants.
                The counts of `jaxlm bench` (FLOPs, bytes, kernels, collectives) are the same
continuation    the working tree resumes from a checkpoint of the earlier commit, and its numbers and last checkpoint are
                those of the uninterrupted run of the earlier commit
files           the last checkpoints have the same file names and arrays (Orbax files are not byte-deterministic); exported
                folders and token caches are byte-identical

Prints one line per check, `same` or `DIFFERS` with the difference, and a JSON line last. Exits with 1 if anything differs.
Runs on the CPU and takes about 35 minutes on two cores. `--folder` keeps everything that the runs write.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from commits import ROOT, checked_out

STEPS, CUT = 50, 25
TIMEOUT_S = 600
CACHES = "caches"  # shared by both trees; run folders lie two levels below its parent
OPTIONS = {
    "trainer.id": "run",
    "trainer.steps_per_eval": CUT,
    "trainer.max_eval_batches": 2,
    "trainer.log_dir": "logs",
    "trainer.log_xla_hlo": "true",
    "trainer.compilation_cache_dir": "null",  # each tree must compile its own programs
    "trainer.checkpointer.base_path": "checkpoints",
    "trainer.checkpointer.save_interval": "1h",
    "trainer.checkpointer.keep": f"[{{every: {CUT}}}]",
    "evals": "[{type: loss}]",
    "data.cache_dir": f"../../{CACHES}/text",
}
COMMON = """
data: {train_urls: ["stdlib:train"], validation_urls: ["stdlib:validation"], tokenizer: bpe, vocab_size: 4096}
trainer: {train_batch_size: 8}
optimizer: {learning_rate: 3.0e-3, weight_decay: 0.1, warmup: 5}
"""
LLAMA = """
model: {type: llama, seq_len: 64, hidden_dim: 64, intermediate_dim: 128, num_layers: 2, num_heads: 4, num_kv_heads: 2}
"""
MIXTRAL = """
model:
  {type: mixtral, seq_len: 64, hidden_dim: 64, intermediate_dim: 96, num_layers: 2, num_heads: 4, num_kv_heads: 2,
   num_experts: 4, num_experts_per_token: 2}
"""
GPT2 = """
model:
  {type: gpt2, seq_len: 64, hidden_dim: 64, num_layers: 2, num_heads: 4, embed_pdrop: 0.1, resid_pdrop: 0.1,
   attn_pdrop: 0.1}
"""
PHASES = f"""
phases:
  - {{name: pretrain, num_train_steps: 30}}
  - name: adapt
    num_train_steps: 30
    surgery: [{{type: lora, target: 'attn|mlp', rank: 4, alpha: 8.0, dropout: 0.1}}]
    trainable: ['\\.[ab]$']
    data: {{train_urls: ["stdlib:validation"], cache_dir: ../../{CACHES}/adapt}}
    optimizer: {{learning_rate: 1.0e-2}}
"""
NANO = """
model: {type: nano, seq_len: 64, hidden_dim: 64, num_layers: 4, num_heads: 2}
optimizer:
  groups:
    - {match: ^tokens|value_embedding, learning_rate: 0.3}
    - {match: attn|mlp|value_gates, type: muon, learning_rate: 0.02}
"""
# Records and a tokenizer of characters (`write_task`).
TASK = """
data: {tokenizer: tokenizer, validation_urls: []}
trainer: {train_batch_size: 8}
optimizer: {learning_rate: 1.0e-2, weight_decay: 0.1, warmup: 5}
evals: []
"""
DPO = """
data: {type: pairs, train_urls: [pairs.jsonl], cache_dir: ../../caches/pairs}
objective: {type: dpo}
"""
GRPO = """
data:
  {type: rollouts, train_urls: [prompts.jsonl], cache_dir: ../../caches/prompts, group_size: 4, max_new_tokens: 4,
   rewards: [{type: function, function: "task:score"}]}
objective: {type: grpo, old_policy: rollout}
"""
# Both trees have one teacher: a resumed run refuses other files, and those of Orbax are not byte-deterministic.
DISTILL = """
refs: {teacher: {type: checkpoint, path: ../../before/llama/checkpoints/run/step-50, dtype: float32}}
objective: {type: distill, temperature: 2.0, weight: 0.5}
"""
# Decoupled attention is distilled block by block, then the whole model. It starts as the teacher. The first block is done
# after a few steps, and the learning rate of the second is lowered.
UPCYCLE = """
trainer: {initialize_from: ../../before/llama/checkpoints/run/step-50}
refs: {teacher: {type: checkpoint, path: ../../before/llama/checkpoints/run/step-50, dtype: float32}}
phases:
  - name: blocks
    num_train_steps: 30
    surgery: [{type: decouple, sem_dim: 16, geo_dim: 32}]
    trainable: ['attn\\.[qk]_(sem|geo)']
    objective:
      {type: blockwise, target: attention, convergence: {target: 1.5e-4, min_steps: 5},
       autotune: {mode: active, patience: 10}}
  - {name: all_weights, num_train_steps: 20, objective: {type: distill, weight: 0.5}}
"""
# Branches of 4 steps: one ends before the cut, others begin after it.
ORCHESTRATED = """
optimizer: {type: portfolio, telemetry: {window: 20, mean_steps: 5, reference_steps: 20}}
trainer:
  controllers:
    - {type: orchestrator, interval: 12, horizon: 4, min_steps_between_switches: 4, branch_budget: 1.0, probe_batches: 2,
       safety: {snapshot_interval: 10, quarantine: 2}}
"""
# 14 steps of each of three stacks; all weights train for 4 steps after the second and the third.
PROGRESSIVE = """
model: {use_bidirectional_attention: true}
data:
  tokenizer: {type: bpe, special_tokens: ["<|endoftext|>", "<|mask|>"]}
  masking: {validation_replicas: 2}
  cache_dir: ../../caches/masked
objective: {type: diffusion}
preset:
  {type: progressive, stacks: 3, steps_per_stack: 14, polish_steps: 4, layers_per_stack: 1, carry_optimizer: true}
"""
REWARD = """
def score(completion_ids, digit):
    return [sum(1.0 for token in ids if token == d + 1) / (1 + len(ids)) for ids, d in zip(completion_ids, digit)]
"""


def write_task(home: Path) -> None:
    """A tokenizer of digits, preference pairs and prompts about their successors, and a reward."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokens = {token: number for number, token in enumerate(["<eos>", *"0123456789", " ", "=", "?"])}
    backend = tokenizers.Tokenizer(models.WordLevel(tokens, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.add_special_tokens(["<eos>"])
    (home / "tokenizer").mkdir(exist_ok=True)
    backend.save(str(home / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<eos>", "eos_token": "<eos>"}
    (home / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    pairs = [
        {"prompt": f"{digit} =", "chosen": f" {(digit + 1) % 10}", "rejected": f" {(digit + other) % 10}"}
        for digit in range(10)
        for other in range(2, 8)
    ]
    prompts = [{"prompt": f"{digit} =", "digit": digit} for digit in range(10)]
    for name, records in (("pairs", pairs), ("prompts", prompts)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (home / "task.py").write_text(REWARD)


def merged(*texts: str) -> str:
    """One configuration of several. Sections are merged."""
    import yaml

    whole: dict[str, Any] = {}
    for text in texts:
        for key, value in yaml.safe_load(text).items():
            both = isinstance(value, dict) and isinstance(whole.get(key), dict)
            whole[key] = {**whole[key], **value} if both else value
    return yaml.safe_dump(whole)


@dataclass(frozen=True)
class Case:
    """A run that both trees train.

    Attributes:
        name: name of its folder.
        text: YAML configuration; None uses the quickstart of the tree.
        num_steps: total over all phases.
        devices: number of simulated devices.
        cuts: steps whose checkpoints the working tree resumes from.
        runs_bench: whether to run `jaxlm bench`, which measures only the first phase.
        exports: whether Hugging Face knows the model.
        adapters: whether to also export the adapters without the model.
        has_task: whether it trains on the records of `write_task`.
    """

    name: str
    text: str | None
    num_steps: int = STEPS
    devices: int = 1
    cuts: tuple[int, ...] = ()
    runs_bench: bool = True
    exports: bool = True
    adapters: bool = False
    has_task: bool = False

    @property
    def sections(self) -> dict[str, Any]:
        """The configuration; empty for the quickstart."""
        import yaml

        return yaml.safe_load(self.text or "{}")

    def has(self, key: str) -> bool:
        """Whether the configuration has a key, given as `data.cache_dir`."""
        value: Any = self.sections
        for name in key.split("."):
            if name not in value:
                return False
            value = value[name]
        return True


def on_one_and_eight(name: str, text: str, **keys: Any) -> tuple[Case, Case]:
    """A case on one and on eight devices."""
    return Case(name, text, cuts=(CUT,), **keys), Case(f"{name} 8", text, devices=8, cuts=(CUT,), **keys)


TWO_PHASES = Case("two phases", COMMON + LLAMA + PHASES, 60, cuts=(25, 50), runs_bench=False, adapters=True)
CASES = (
    Case("quickstart", None, cuts=(CUT,)),
    Case("llama", COMMON + LLAMA),  # the teacher of "distill" and "upcycle"
    Case("llama fsdp 8", COMMON + LLAMA, devices=8, cuts=(CUT,)),
    Case("mixtral", COMMON + MIXTRAL),
    Case("gpt2 dropout", COMMON + GPT2),
    TWO_PHASES,
    replace(TWO_PHASES, name="two phases 8", devices=8, cuts=(), adapters=False),
    *on_one_and_eight("nano", merged(COMMON, NANO), exports=False),
    *on_one_and_eight("dpo", merged(TASK, LLAMA, DPO), runs_bench=False, has_task=True),
    *on_one_and_eight("grpo", merged(TASK, LLAMA, GRPO), runs_bench=False, has_task=True),
    *on_one_and_eight("distill", merged(COMMON, LLAMA, DISTILL), runs_bench=False),
    *on_one_and_eight("upcycle", merged(COMMON, LLAMA, UPCYCLE), runs_bench=False),
    *on_one_and_eight("orchestrated", merged(COMMON, LLAMA, ORCHESTRATED), runs_bench=False),
    *on_one_and_eight("progressive", merged(COMMON, LLAMA, PROGRESSIVE), runs_bench=False),
)


class DifferentError(Exception):
    """The trees differ, or a command failed; the message says where."""


@dataclass(frozen=True)
class Side:
    """A source tree and the folder of its runs.

    Attributes:
        name: used in messages.
        tree: root of the sources.
        folder: parent of the run folders.
    """

    name: str
    tree: Path
    folder: Path

    @property
    def caches(self) -> Path:
        """Parent of the token caches."""
        return self.folder.parent / CACHES

    def run(self, case: Case, home: Path, module: str, *arguments: str) -> str:
        """Runs a command in folder `home` and returns its standard output.

        Raises:
            DifferentError: the command failed or timed out.
        """
        flags = f"--xla_force_host_platform_device_count={case.devices}"
        environment = os.environ | {"PYTHONPATH": str(self.tree / "src"), "XLA_FLAGS": flags}
        command = [sys.executable, "-m", "jaxlm", module, *arguments]
        began = time.perf_counter()
        try:
            process = subprocess.run(
                command, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise DifferentError(f"{self.name}: jaxlm.{module} did not finish within {TIMEOUT_S} s") from error
        print(f"  {self.name}: jaxlm.{module} {home.name}, {time.perf_counter() - began:.1f} s", file=sys.stderr)
        if process.returncode:
            output = (process.stderr.strip() or process.stdout.strip())[-3000:]
            print(output, file=sys.stderr)
            raise DifferentError(f"{self.name}: jaxlm.{module} failed: {output.splitlines()[-1] if output else ''}")
        return process.stdout

    def run_configured(self, case: Case, home: Path, module: str, *arguments: str) -> str:
        """Runs a command on the configuration of a case."""
        home.mkdir(parents=True, exist_ok=True)
        config = self.tree / "config" / "quickstart.yaml" if case.text is None else home / "run.yaml"
        if case.text is not None:
            config.write_text(case.text)
        if case.has_task:
            write_task(home)
        keys = OPTIONS | {"trainer.num_train_steps": case.num_steps}
        options = [text for key, value in keys.items() if not case.has(key) for text in (f"--{key}", str(value))]
        return self.run(case, home, module, *arguments, "--config_path", str(config), *options)


@functools.cache
def trained(side: Side, case: Case) -> Path:
    """Trains a case to its end, once, and returns the run folder."""
    home = side.folder / case.name
    side.run_configured(case, home, "train")
    return home


# A name and a comparison, which returns a summary or raises DifferentError.
Check = tuple[str, Callable[[], str]]


def main() -> int:
    """Runs the checks. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="an earlier commit")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(GROUPS), help="comma-separated groups (default: all)"
    )
    parser.add_argument("--folder", type=Path, help="new folder to work in and keep (default: temporary)")
    every = [case.name for case in CASES]
    parser.add_argument("--cases", type=lambda text: text.split(","), default=every, help="(default: all)")
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in GROUPS]:
        parser.error(f"--only: {', '.join(unknown)} given. Allowed: {', '.join(GROUPS)}")
    if unknown := [name for name in options.cases if name not in [case.name for case in CASES]]:
        parser.error(f"--cases: {', '.join(unknown)} given. Allowed: {', '.join(case.name for case in CASES)}")
    cases = [case for case in CASES if case.name in options.cases]
    os.environ["JAX_PLATFORMS"] = "cpu"
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if options.folder is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            root = options.folder.resolve()
            root.mkdir(parents=True)
        earlier = stack.enter_context(checked_out(options.before, root / "tree"))
        sides = Side("before", earlier, root / "before"), Side("now", ROOT, root / "now")
        for side in sides:
            check_is_imported(side.tree)
        verdicts = {
            f"{group}, {name}": verdict(group, name, compare)
            for group, name, compare in checks(options.only, *sides, cases)
        }
    different = {name: text for name, text in verdicts.items() if not text.startswith("same")}
    about = {"before": options.before, "seconds": round(time.perf_counter() - began, 1), "checks": len(verdicts)}
    print(json.dumps({"same": not different, **about, "different": different}))
    return 1 if different else 0


def check_is_imported(tree: Path) -> None:
    """Exits unless PYTHONPATH takes precedence over an installed jaxlm; otherwise both sides could run one tree."""
    command = [sys.executable, "-c", "import jaxlm; print(jaxlm.__path__[0])"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    imported = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if Path(imported) != tree / "src" / "jaxlm":
        raise SystemExit(f"python imports jaxlm from {imported}; expected {tree / 'src' / 'jaxlm'}")


def checks(
    groups: list[str], before: Side, now: Side, cases: Sequence[Case]
) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yields group, name and comparison of each check."""
    for group in (group for group in GROUPS if group in groups):
        for name, compare in GROUPS[group](before, now, cases):
            yield group, name, compare


def verdict(group: str, name: str, compare: Callable[[], str]) -> str:
    """Runs a comparison and prints its line."""
    try:
        text = f"same: {compare()}"
    except DifferentError as difference:
        text = f"DIFFERS: {difference}"
    print(f"{group:13} {name:26} {text}", flush=True)
    return text


def losses(before: Side, now: Side, cases: Sequence[Case]) -> Iterator[Check]:
    """Numbers of every run, and whether the working tree leaves the shared token caches untouched."""
    rewritten: list[str] = []

    def compare(case: Case) -> str:
        first = trained(before, case)
        stamps = modified(before.caches)
        second = trained(now, case)
        rewritten.extend(differing(stamps, modified(before.caches)))
        return same_numbers(first, second, case.num_steps)

    def compare_caches() -> str:
        return same_unless(rewritten, f"{len(modified(before.caches))} files, not written again", "files written again")

    for case in cases:
        yield case.name, functools.partial(compare, case)
    yield "caches taken", compare_caches


def same_numbers(before: Path, now: Path, num_steps: int) -> str:
    """Compares the logged numbers of two runs."""
    first, second = numbers(before), numbers(now)
    steps = [step for step, key in first if key == "train/loss"]
    if steps != list(range(1, num_steps + 1)):
        raise DifferentError(f"expected {num_steps} steps, but the earlier tree logged losses for steps {steps}")
    for (step, key), value in first.items():
        if second.get((step, key)) != value:
            raise DifferentError(f"step {step}: {key}: {value} before, {second.get((step, key))} now")
    if extra := [key for key in second if key not in first]:
        raise DifferentError(f"only now: {extra[:3]}")
    decided = lines_of(decisions_of(before))
    same_text("decisions", decided, lines_of(decisions_of(now)))
    decisions = f"; {len(decided)} decisions" if decided else ""
    return f"{num_steps} losses, the last {first[num_steps, 'train/loss']}; {len(first)} numbers in all{decisions}"


def numbers(home: Path) -> dict[tuple[int, str], str]:
    """(step, key) -> value in hexadecimal, for every logged number except throughput and times."""
    records = [json.loads(line) for line in metrics_of(home).read_text().splitlines()]
    return {
        (record["step"], key): "null" if value is None else float(value).hex()
        for record in records
        for key, value in record.items()
        if not key.startswith("throughput/") and not key.endswith("_seconds")
    }


def metrics_of(home: Path) -> Path:
    """Path of the metrics file of a run."""
    return home / "logs" / "run" / "metrics.jsonl"


def decisions_of(home: Path) -> Path:
    """Path of what the controllers of a run decided; absent if they decided nothing."""
    return home / "logs" / "run" / "decisions.jsonl"


def lines_of(file: Path) -> list[str]:
    """The lines of a file; none if it is absent."""
    return file.read_text().splitlines(keepends=True) if file.exists() else []


def modified(folder: Path) -> dict[str, int]:
    """File -> modification time in ns."""
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in files_in(folder)}


def files_in(folder: Path) -> list[Path]:
    """All files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ or that only one side has."""
    missing = object()
    return [key for key in {**before, **now} if before.get(key, missing) != now.get(key, missing)]


def same_unless(changed: list[str], same: str, what: str) -> str:
    """Returns the text `same` if nothing changed, else raises `DifferentError` with the first changes."""
    if changed:
        raise DifferentError(f"{len(changed)} {what}: {', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}")
    return same


def programs(before: Side, now: Side, cases: Sequence[Case]) -> Iterator[Check]:
    """Optimized HLO of every run, and the counts of `jaxlm bench`."""

    def compare_texts(case: Case) -> str:
        first, second = (programs_of(trained(side, case)) for side in (before, now))
        if first.keys() != second.keys():
            raise DifferentError(f"programs of {', '.join(first)} before, of {', '.join(second)} now")
        for name in first:
            same_text(name, first[name].splitlines(), second[name].splitlines())
        return f"{', '.join(f'{name}: {text.count(chr(10))} lines' for name, text in first.items())}"

    def compare_counts(case: Case) -> str:
        first, second = counts(before, case), counts(now, case)
        changed = [f"{key} {first[key]} before, {second[key]} now" for key in differing(first, second)]
        return same_unless(changed, json.dumps(first), "numbers")

    for case in cases:
        yield f"{case.name}, hlo", functools.partial(compare_texts, case)
    for case in cases:
        if case.runs_bench:
            yield f"{case.name}, bench", functools.partial(compare_counts, case)


def programs_of(home: Path) -> dict[str, str]:
    """Phase -> normalized HLO of a run."""
    texts = {path.name: path.read_text() for path in files_in(home / "logs" / "run" / "artifacts")}
    if not texts:
        raise DifferentError(f"{home}: the run wrote no HLO")
    return {name.removesuffix(".hlo.txt"): normalized(text) for name, text in texts.items()}


_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", re.MULTILINE)
_METADATA = re.compile(r',? *metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_MODULE = re.compile(r"^HloModule [^,]+")
_HEADER = re.compile(r"^((?:ENTRY )?%[\w.\-]+) \(.*\{$", re.MULTILINE)  # the body repeats the parameters
_NAME = re.compile(r"%[\w.\-]+")


def normalized(hlo: str) -> str:
    """HLO without source locations, and with names replaced by numbers in order of appearance."""
    for pattern, replacement in ((_TABLES, ""), (_METADATA, ""), (_MODULE, "HloModule"), (_HEADER, r"\1 {")):
        hlo = pattern.sub(replacement, hlo)
    known: dict[str, int] = {}
    return _NAME.sub(lambda name: f"%{known.setdefault(name[0], len(known))}", hlo)


def same_text(name: str, before: list[str], now: list[str]) -> None:
    """Raises `DifferentError` at the first line that differs."""
    for number, (first, second) in enumerate(zip(before, now, strict=False), 1):
        if first != second:
            common = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
            at = max(common - 60, 0)
            raise DifferentError(
                f"{name}, line {number}: `{first[at : at + 160].strip()}` before, `{second[at : at + 160].strip()}` now"
            )
    if len(before) != len(now):
        raise DifferentError(f"{name}: {len(before)} lines before, {len(now)} now")


@functools.cache
def counts(side: Side, case: Case) -> dict[str, Any]:
    """The numbers of `jaxlm bench` that do not depend on time."""
    printed = side.run_configured(case, side.folder / f"bench {case.name}", "bench", "--steps", "1", "--warmup", "0")
    answer = json.loads(printed.splitlines()[-1])
    return {key: answer[key] for key in ("flops_per_token", "program_bytes", "kernels", "collectives")}


def continuation(before: Side, now: Side, cases: Sequence[Case]) -> Iterator[Check]:
    """Runs that the earlier tree begins and the working tree finishes."""
    for case in cases:
        for step in case.cuts:
            yield f"{case.name} from {step}", functools.partial(continued, before, now, case, step)


def continued(before: Side, now: Side, case: Case, step: int) -> str:
    """Resumes a run of the earlier tree at a step, and compares it with the uninterrupted run."""
    whole, home = trained(before, case), now.folder / f"{case.name} from {step}"
    checkpoint = Path("checkpoints") / "run" / f"step-{step}"
    shutil.copytree(whole / checkpoint, home / checkpoint)
    metrics_of(home).parent.mkdir(parents=True)
    shutil.copy(metrics_of(whole).with_name("config.yaml"), metrics_of(home).parent)
    for path in (metrics_of, decisions_of):
        if lines := [line for line in lines_of(path(whole)) if json.loads(line)["step"] <= step]:
            path(home).write_text("".join(lines))
    earlier = metrics_of(home).read_text()
    now.run_configured(case, home, "train")
    if not metrics_of(home).read_text().startswith(earlier):  # repeated steps would have other times
        raise DifferentError(f"the run did not resume at step {step}: it rewrote the metrics of earlier steps")
    same = same_numbers(whole, home, case.num_steps)
    return f"{same}; {same_arrays(last_checkpoint(whole, case), last_checkpoint(home, case))}"


def last_checkpoint(home: Path, case: Case) -> Path:
    """Checkpoint of the last step of a run."""
    return home / "checkpoints" / "run" / f"step-{case.num_steps}"


def same_arrays(before: Path, now: Path) -> str:
    """Compares all arrays of two checkpoints: parameters, optimizer state, step, keys."""
    first, second = arrays(before), arrays(now)
    return same_unless(differing(first, second), f"{len(first)} arrays", "arrays")


def arrays(checkpoint: Path) -> dict[str, str]:
    """Array path -> dtype, shape and hash."""
    import orbax.checkpoint as ocp

    folder = checkpoint / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        paths = reader.metadata(folder).item_metadata.tree
        as_numpy = dict.fromkeys(paths, ocp.RestoreArgs(restore_type=np.ndarray))
        restored = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return {
        path: f"{array.dtype}{array.shape} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
        for path, array in restored.items()
    }


def files(before: Side, now: Side, cases: Sequence[Case]) -> Iterator[Check]:
    """Checkpoints, exports and token caches of both trees."""

    def compare_checkpoints(case: Case) -> str:
        first, second = (last_checkpoint(trained(side, case), case) for side in (before, now))
        changed = differing(checkpoint_files(first), checkpoint_files(second))
        return f"{same_unless(changed, f'{len(checkpoint_files(first))} names', 'files')}, {same_arrays(first, second)}"

    def compare_exports(case: Case, adapters: str) -> str:
        return same_contents(*(exported(side, case, adapters) for side in (before, now)))

    def compare_caches() -> str:
        trained(before, TWO_PHASES)
        separate = replace(now, folder=now.folder / "apart")
        for case in (TWO_PHASES, *{case.text: case for case in cases if case.has("data.cache_dir")}.values()):
            separate.run_configured(case, separate.folder / case.name, "prepare")
        return same_contents(before.caches, separate.caches)

    for case in cases:
        yield f"{case.name}, checkpoint", functools.partial(compare_checkpoints, case)
        if case.exports:
            yield f"{case.name}, export", functools.partial(compare_exports, case, "merge")
        if case.adapters:
            yield f"{case.name}, adapters", functools.partial(compare_exports, case, "only")
    yield "caches", compare_caches


_RANDOM_NAME = re.compile(r"(/d/)[0-9a-f]{32}$")
# Orbax files, the manifest and the checksums contain times and paths, the environment the commit. config.yaml may spell
# values differently.
_VARYING = re.compile(r"state/|checksums\.json$|run/(manifest|environment)\.json$|run/config\.yaml$")


def checkpoint_files(checkpoint: Path) -> dict[str, str]:
    """File name -> hash, or an empty string for files that differ between identical runs."""
    hashes = {}
    for path in files_in(checkpoint):
        name = _RANDOM_NAME.sub(r"\1*", path.relative_to(checkpoint).as_posix())
        hashes[name] = "" if _VARYING.match(name) else hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


@functools.cache
def exported(side: Side, case: Case, adapters: str) -> Path:
    """Exports the last checkpoint of a run for transformers or PEFT, and returns the folder."""
    home, folder = trained(side, case), f"exported {adapters}"
    source = str(last_checkpoint(home, case).parent.relative_to(home))
    side.run(case, home, "convert", "to-hf", "--checkpoint", source, "--output_dir", folder, "--adapters", adapters)
    return home / folder


def same_contents(before: Path, now: Path) -> str:
    """Compares two folders byte for byte."""
    first, second = contents(before), contents(now)
    return same_unless(differing(first, second), f"{len(first)} files, byte for byte", "files")


def contents(folder: Path) -> dict[str, str]:
    """File -> hash of its bytes."""
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files_in(folder)}
    hashes = {path.relative_to(folder).as_posix(): digest for path, digest in digests.items()}
    if not hashes:
        raise DifferentError(f"{folder} is empty")
    return hashes


GROUPS: dict[str, Callable[[Side, Side, Sequence[Case]], Iterator[Check]]] = {
    "losses": losses,
    "programs": programs,
    "continuation": continuation,
    "files": files,
}


if __name__ == "__main__":
    sys.exit(main())
