"""Fine-tunes and aligns a small Llama on real instructions, preferences and questions, and reports what held-out data says.

    python benchmarks/post_training.py --data FOLDER --folder runs/post_training [--folds 3] [--seed 0] [--picture FILE.svg]

FOLDER has wikitext2_valid.txt, tinyshakespeare.txt, dolly_instructions_700.jsonl (`prompt`, `response`),
hh_harmless_pairs_1200.jsonl (`chosen`, `rejected`: dialogues that differ in the last answer) and gsm8k_train_2000.jsonl
(`question`, `answer`). Nothing is downloaded.

1. One run pretrains on the two texts, then fine-tunes on 600 instructions; 100 are held out.
2. The pairs are split into folds, by the first turn of their dialogues, so that no dialogue is in two folds. For each fold, a
   run of DPO starts from the fine-tuned model, trains on the other folds and is evaluated on this one. So every pair is
   judged once, by a model that was not trained on it. The accuracy is the fraction of pairs whose chosen answer has the
   larger reward; the standard error is that of a fraction. Prompts keep their last 200 characters, so that every pair fits;
   long answers are truncated.
3. The model is fine-tuned on GSM8K's solutions. Then GRPO samples answers while it trains, and rewards their form. Two
   short runs are its controls. See gsm8k_format.py.

Start the same command again after an interruption: finished runs are not repeated. Writes `post_training.json` into the
folder, and the curves to `--picture`. The last line printed is JSON.
"""

import argparse
import hashlib
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gsm8k_format
from training_runs import LLAMA, Records, averaged, read, series, train, trainer, write

TEXTS, INSTRUCTIONS, PAIRS = (
    ("wikitext2_valid.txt", "tinyshakespeare.txt"),
    "dolly_instructions_700.jsonl",
    "hh_harmless_pairs_1200.jsonl",
)
BASE, HELD_OUT_INSTRUCTIONS, PROMPT_CHARACTERS = "base", 100, 200
PRETRAIN_STEPS, SFT_STEPS, DPO_EPOCHS, BATCH, PAIRS_PER_BATCH = 500, 300, 2, 8, 16
SEQ_LEN, PAIR_SEQ_LEN = 256, 128
MODEL = LLAMA | {"seq_len": SEQ_LEN, "num_layers": 4}
_ASSISTANT = "\n\nAssistant:"
_SHAPE = {"weight_decay": 0.1, "warmup": 0.05, "lr_schedule": "linear", "decay": 0.7, "min_lr_ratio": 0.0}


def main() -> None:
    """Runs what has not run yet, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the five files")
    parser.add_argument("--folder", type=Path, required=True, help="folder for runs, caches and results")
    parser.add_argument("--folds", type=int, default=3, help="number of folds of the pairs, 2 or more (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the splits and the runs (default 0)")
    parser.add_argument("--picture", type=Path, help="where to write the curves, as SVG")
    options = parser.parse_args()
    if options.folds < 2:
        parser.error(f"--folds: {options.folds} given, at least 2 expected")
    options.folder.mkdir(parents=True, exist_ok=True)
    split_instructions(options.data / INSTRUCTIONS, options.folder, options.seed)
    runs = {BASE: train(options.folder, BASE, base_config(options.data, options.seed))}
    export = f"exports/{BASE}/step-{PRETRAIN_STEPS + SFT_STEPS}"
    sizes = split_pairs(options.data / PAIRS, options.folder, options.folds, options.seed)
    for fold, size in enumerate(sizes):
        steps = DPO_EPOCHS * (sum(sizes) - size) // PAIRS_PER_BATCH
        runs[f"fold-{fold}"] = train(options.folder, f"fold-{fold}", dpo_config(fold, export, steps, options.seed))
    grpo = gsm8k_format.run_all(options.data, options.folder, export, _SHAPE, options.seed)
    found = summary(runs, options.folder, sizes) | {"gsm8k": gsm8k_format.summary(grpo, options.folder)}
    (options.folder / "post_training.json").write_text(json.dumps(found, indent=1))
    if options.picture is not None:
        plot(options.picture, runs, grpo, found["gsm8k"])
    print(json.dumps(found))


def split_instructions(path: Path, folder: Path, seed: int) -> None:
    """Writes the instructions to train on and those that are held out."""
    records = path.read_text(encoding="utf-8").splitlines()
    random.Random(seed).shuffle(records)
    write(folder / "sft_held_out.jsonl", records[:HELD_OUT_INSTRUCTIONS])
    write(folder / "sft_train.jsonl", records[HELD_OUT_INSTRUCTIONS:])


def split_pairs(path: Path, folder: Path, folds: int, seed: int) -> list[int]:
    """Writes for each fold its pairs and the others. Returns the folds' sizes."""
    by_fold: list[list[dict[str, str]]] = [[] for _ in range(folds)]
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        first_turn = record["chosen"].split(_ASSISTANT)[0]
        digest = hashlib.sha256(f"{seed} {first_turn}".encode()).digest()
        if (pair := as_pair(record)) is not None:
            by_fold[int.from_bytes(digest[:8]) % folds].append(pair)
    for fold, held_out in enumerate(by_fold):
        others = [pair for number, part in enumerate(by_fold) if number != fold for pair in part]
        random.Random(seed).shuffle(others)
        write(folder / f"held_out-{fold}.jsonl", map(json.dumps, held_out))
        write(folder / f"train-{fold}.jsonl", map(json.dumps, others))
    return list(map(len, by_fold))


def as_pair(record: Mapping[str, str]) -> dict[str, str] | None:
    """The last answers of two dialogues, and what is before them; None if one answer is empty."""
    chosen, rejected = record["chosen"], record["rejected"]
    same = itertools.takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))
    end = "".join(character for character, _ in same).rfind(_ASSISTANT) + len(_ASSISTANT)
    answers = {"chosen": chosen[end:].rstrip(), "rejected": rejected[end:].rstrip()}
    return {"prompt": chosen[:end][-PROMPT_CHARACTERS:], **answers} if all(answers.values()) else None


def base_config(data: Path, seed: int) -> dict[str, Any]:
    """The run that pretrains and fine-tunes."""
    texts = [str((data / name).resolve()) for name in TEXTS]
    sft = {
        "train_urls": ["sft_train.jsonl"],
        "validation_urls": ["sft_held_out.jsonl"],
        "cache_dir": "cache/sft",
        "format": {"type": "supervised", "input_field": "prompt", "output_field": "response"},
    }
    return {
        "data": {"train_urls": texts, "cache_dir": "cache/text", "vocab_size": 4096},
        "model": MODEL,
        "phases": [
            {"name": "pretrain", "num_train_steps": PRETRAIN_STEPS},
            {"name": "sft", "num_train_steps": SFT_STEPS, "data": sft, "optimizer": {"learning_rate": 1e-3}},
        ],
        "optimizer": {"learning_rate": 6e-3, **_SHAPE},
        "trainer": trainer(seed, BATCH, 60),
        "hf_save_path": f"exports/{BASE}",
        "evals": [{"type": "loss"}],
    }


def dpo_config(fold: int, export: str, steps: int, seed: int) -> dict[str, Any]:
    """A run of DPO that holds one fold out."""
    return {
        "initialize_from_hf": export,
        "use_hf_model_config": True,
        "model": {"seq_len": PAIR_SEQ_LEN},
        "data": {
            "type": "pairs",
            "train_urls": [f"train-{fold}.jsonl"],
            "validation_urls": [f"held_out-{fold}.jsonl"],
            "cache_dir": f"cache/fold-{fold}",
            "tokenizer": export,
        },
        "objective": {"type": "dpo", "beta": 0.1},
        "optimizer": {"learning_rate": 5e-4, **_SHAPE, "weight_decay": 0.0},
        "trainer": {**trainer(seed, PAIRS_PER_BATCH, max(1, steps // 4)), "num_train_steps": steps},
        "evals": [{"type": "objective"}, {"type": "preference", "every": 4}],
    }


def summary(runs: Mapping[str, Records], folder: Path, sizes: Sequence[int]) -> dict[str, Any]:
    """The figures, with the accuracy of two rules that know nothing of the model to compare with."""
    held_out = [s for s in series(runs[BASE], "eval/loss") if s[0] > PRETRAIN_STEPS]
    folds = [runs[f"fold-{fold}"] for fold in range(len(sizes))]
    last = {name: [series(run, f"eval/{name}")[-1][1] for run in folds] for name in _MEASURED}
    pairs = [pair for fold in range(len(sizes)) for pair in read(folder / f"held_out-{fold}.jsonl")]
    shorter = sum(len(pair["chosen"]) < len(pair["rejected"]) for pair in pairs) / len(pairs)
    return {
        "sft": {"first": held_out[0], "best": min(held_out, key=lambda item: item[1]), "last": held_out[-1]},
        "pairs": len(pairs),
        "dpo": {name: pooled(values, sizes) for name, values in last.items()},
        "accuracy": fraction(pooled(last["rewards/accuracies"], sizes), len(pairs)),
        "by_fold": last,
        "train_margin": [[series(run, "train/rewards/margins")[at][1] for at in (0, -1)] for run in folds],
        "held_out_margin": [[v for _, v in series(run, "eval/rewards/margins")] for run in folds],
        "shorter_is_chosen": fraction(shorter, len(pairs)),
    }


_MEASURED = ("rewards/accuracies", "rewards/margins", "objective", "preference/accuracy")


def pooled(values: Sequence[float], sizes: Sequence[int]) -> float:
    """The mean over all pairs of the means over the folds."""
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def fraction(share: float, number: int) -> dict[str, float]:
    """A fraction, its standard error, and its distance from 1/2 in standard errors."""
    error = math.sqrt(share * (1 - share) / number)
    return {"fraction": share, "standard_error": error, "standard_errors_above_half": (share - 0.5) / error}


def plot(path: Path, runs: Mapping[str, Records], grpo: Mapping[str, Records], found: Mapping[str, Any]) -> None:
    """Plots the losses of fine-tuning, accuracy and margin of DPO for each fold, and GRPO. Args: found: GRPO's figures."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "jaxlm"}
    figure = Figure(figsize=(9, 6), layout="constrained")
    (losses, accuracies, margins), axes_of_grpo = figure.subplots(2, 3)
    for name, label in (("train/loss", "training"), ("eval/loss", "held out")):
        points = [(step - PRETRAIN_STEPS, value) for step, value in series(runs[BASE], name) if step > PRETRAIN_STEPS]
        losses.plot(*zip(*averaged(points), strict=True), label=label)
    for fold, records in ((name, run) for name, run in runs.items() if name != BASE):
        for axes, metric in ((accuracies, "rewards/accuracies"), (margins, "rewards/margins")):
            (line,) = axes.plot(
                *zip(*series(records, f"eval/{metric}"), strict=True), ".-", label=fold.replace("-", " ")
            )
            trained = averaged(series(records, f"train/{metric}"))
            axes.plot(*zip(*trained, strict=True), color=line.get_color(), alpha=0.3)
    accuracies.axhline(0.5, color="0.5", linestyle="--")
    losses.set(title="SFT", xlabel="step", ylabel="loss (nats per token)")
    accuracies.set(title="DPO: accuracy", xlabel="step")
    margins.set(title="DPO: margin", xlabel="step")
    losses.legend()
    accuracies.legend(title="held out")
    gsm8k_format.plot(axes_of_grpo, grpo, found)
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
