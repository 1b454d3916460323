"""Gives a trained Llama decoupled attention in several ways: what is lost at once, and how soon it is regained.

    python benchmarks/upcycling.py --folder runs/upcycling [--seeds 0,1,2] [--only teachers,starts,recovery]
        [--methods transmla,svd_joint,random,svd_independent,"from scratch"]

1. `teachers`: for each seed, trains a Llama with 4 layers on Python's standard library, and exports it.
2. `starts`: for each teacher, size and method of the surgery `decouple`, the loss right after it, on 131,072 held-out tokens.
   `transmla` has one key for all heads, of as many features as the two keys of the others together: the same cache.
3. `recovery`: trains each start with the objective `distill` on all weights until its perplexity is at most 1.05 times that
   of its teacher, measured every 10 steps, and a new model of the student's architecture, as its teacher was trained,
   measured every 100.

Runs are processes of their own. Start the same command again after an interruption: finished ones are not repeated. Each
teacher takes 4 minutes on 2 quiet CPU cores, a recovery 1 to 10.

Writes `upcycling.json` and `upcycling.png` into the folder, and prints tables.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxlm.core.imports import gc_paused  # noqa: F401  # before haliax

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import yaml
from training_runs import LLAMA, Figures, start, trainer

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.data.base import TRAIN, VALIDATION
from jaxlm.data.sources.stdlib import library_files
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.models.base import Inputs, LanguageModel, vocab_axis
from jaxlm.models.loss import token_losses
from jaxlm.systems.upcycle.decouple import DecoupleConfig

SEQ_LEN, ROWS, TEACHER_STEPS = 256, 8, 1200
EVALUATED, CALIBRATED = 64, 8  # batches
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
SIZES = ((2, 4), (4, 8), (8, 8), (12, 12), (16, 16))  # features of a head, semantic and geometric
METHODS: dict[str, dict] = {
    "transmla": {"method": "transmla"},
    "svd_joint": {"method": "svd_joint"},
    "svd_joint, pairs: contribution": {"method": "svd_joint", "pairs": "contribution"},
    "whitened": {"method": "whitened"},
    "svd_independent": {"method": "svd_independent"},
    "random": {"method": "random"},
    "fresh": {"method": "fresh"},
}
RATIO, EVERY = 1.05, 10
STUDENT = (4, 8)  # what `recovery` trains: a cache that is 31 % smaller
SCRATCH = "from scratch"
# Largest number of steps, and learning rates to try on the first seed; the other seeds have the better one.
RECOVERIES: dict[str, tuple[int, tuple[float, ...]]] = {
    "transmla": (400, (1e-3,)),
    "svd_joint": (400, (1e-3,)),
    "random": (400, (1e-3, 3e-3)),
    "svd_independent": (400, (1e-3, 3e-3)),
    SCRATCH: (TEACHER_STEPS, (6e-3,)),
}
DATA = {"train_urls": ["stdlib:train"], "validation_urls": ["stdlib:validation"], "cache_dir": "cache"}
TEACHER = LLAMA | {"seq_len": SEQ_LEN, "hidden_dim": HEADS * HEAD_SIZE, "num_layers": 4}
TEACHER |= {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
TEACHER_OPTIMIZER = {
    "learning_rate": 6e-3,
    "weight_decay": 0.1,
    "warmup": 50,
    "lr_schedule": "linear",
    "decay": 0.7,
    "min_lr_ratio": 0.0,
}


def main() -> None:
    """Trains and measures what is not there yet, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for runs, caches and results")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds of the teachers (default 0,1,2)")
    parser.add_argument("--only", default="teachers,starts,recovery", help="comma-separated parts (default all)")
    parser.add_argument("--methods", default=",".join(RECOVERIES), help="comma-separated, of `recovery` (default all)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds, parts = list(map(int, options.seeds.split(","))), options.only.split(",")
    results = Figures(options.folder / "upcycling.json")
    if "teachers" in parts:
        for seed in seeds:
            run(options.folder, f"teacher-{seed}", teacher_config(seed))
    if "starts" in parts:
        for seed in seeds:
            measure_starts(teacher_folder(options.folder, seed), seed, results)
    if "recovery" in parts:
        for method, seed in itertools.product(options.methods.split(","), seeds):
            measure_recovery(options.folder, method, seed, seeds[0], results)
    report_starts(results, options.folder / "upcycling.png")
    report_recovery(results)


def of_seeds(results: Figures, name: str) -> list:
    """The figures whose names are this one followed by a seed."""
    return [figure for key, figure in results.by_name.items() if key.rpartition(" of teacher ")[0] == name]


def teacher_folder(folder: Path, seed: int) -> Path:
    """Where the export of a teacher is."""
    return folder / f"teacher-{seed}-hf" / f"step-{TEACHER_STEPS}"


def teacher_config(seed: int, model: dict = TEACHER) -> dict:
    """The run of a teacher."""
    return {
        "data": DATA | {"vocab_size": 4096},
        "model": model,
        "trainer": trainer_of(seed, TEACHER_STEPS, TEACHER_STEPS // 2),
        "evals": [{"type": "loss"}],
        "optimizer": TEACHER_OPTIMIZER,
        "hf_save_path": f"teacher-{seed}-hf",
        "hf_save_steps": TEACHER_STEPS,
    }


def trainer_of(seed: int, steps: int, every: int) -> dict:
    return trainer(seed, ROWS, every) | {"num_train_steps": steps, "max_eval_batches": EVALUATED}


def run(folder: Path, name: str, config: dict, ends: Callable[[Path], bool] = lambda _: False) -> None:
    """Trains a run to its last step, or until `ends` says so of its metrics, unless it is there already."""
    metrics = folder / "logs" / name / "metrics.jsonl"
    steps = config["trainer"]["num_train_steps"]
    if ends(metrics) or any(record["step"] >= steps for record in records(metrics)):
        return
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config | {"trainer": config["trainer"] | {"id": name}}))
    start(folder, name, "--config_path", f"{name}.yaml", ends=lambda: ends(metrics))


def records(metrics: Path) -> list[dict]:
    """The metrics of a run so far. The last line may be incomplete."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
    return [json.loads(line) for line in lines]


def measure_starts(teacher: Path, seed: int, results: Figures) -> None:
    """The teacher's loss, and that right after each surgery."""
    texts = Texts(teacher)
    model = loaded_lazily(teacher)
    results.get(f"loss of teacher {seed}", lambda: texts.loss(model()))
    for (semantic, geometric), (name, keys) in itertools.product(SIZES, METHODS.items()):
        shared = KV_HEADS if keys["method"] == "transmla" else 1
        sizes = {"sem_dim": semantic * shared * HEADS, "geo_dim": geometric * shared * HEADS}
        surgery = DecoupleConfig(**sizes, **keys, calibration_batches=CALIBRATED)
        figure = f"loss with {name}, {semantic} + {geometric}, of teacher {seed}"
        results.get(figure, lambda surgery=surgery: texts.loss(texts.student(model(), surgery, seed)))


def loaded_lazily(folder: Path) -> Callable[[], LanguageModel]:
    """A function that loads the model of a folder at its first call."""
    models: list[LanguageModel] = []

    def model() -> LanguageModel:
        if not models:
            config = open_folder(folder).config
            vocab = vocab_axis(open_folder(folder).vocab_size)
            shapes = jax.eval_shape(lambda: config.build(vocab, key=jax.random.key(0)))
            layout = make_layout(mesh_shape(1, replica=1, model=1), AxisMappings("batch", (), (), {}, {}), {})
            models.append(load_model(folder, shapes, config, layout))
        return models[0]

    return model


class Texts:
    """The data that the teacher learned from, to calibrate surgeries on, and the held-out part, to measure losses on."""

    def __init__(self, teacher: Path):
        tokenizer = load_tokenizer(str(teacher))
        self.tokens = {split: _tokens(tokenizer, split) for split in (TRAIN, VALIDATION)}
        self.nll = jax.jit(_mean_nll)

    def batch(self, split: str, number: int) -> TokenBatch:
        """{batch, position}."""
        axes = hax.Axis("batch", ROWS), hax.Axis("position", SEQ_LEN)
        starts = (number * ROWS + np.arange(ROWS)) * SEQ_LEN
        rows = self.tokens[split][starts[:, None] + np.arange(SEQ_LEN + 1)]
        named = lambda array: hax.named(jnp.asarray(array, jnp.int32), axes)  # noqa: E731
        positions = np.broadcast_to(np.arange(SEQ_LEN), (ROWS, SEQ_LEN))
        ones = np.ones((ROWS, SEQ_LEN))
        return TokenBatch(named(rows[:, :-1]), named(rows[:, 1:]), hax.ones(axes), named(ones), named(positions))

    def loss(self, model: LanguageModel) -> float:
        """Nats a token."""
        batches = (self.batch(VALIDATION, number) for number in range(EVALUATED))
        return statistics.fmean(float(self.nll(model, batch)) for batch in batches)

    def student(self, teacher: LanguageModel, surgery: DecoupleConfig, seed: int) -> LanguageModel:
        """The teacher after a surgery."""
        keys = jax.random.split(jax.random.key(seed))
        student = jax.jit(lambda model: surgery.apply(model, key=keys[0]))(teacher)
        wants = surgery.wants
        if wants.measure is None or not wants.num_batches:
            return student
        measure = jax.jit(wants.measure)
        sums = [measure(teacher, self.batch(TRAIN, number)) for number in range(wants.num_batches)]
        total = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)
        fill = jax.jit(lambda new, old, sums: surgery.fill(new, old, refs={}, sums=sums, key=keys[1]))
        return fill(student, teacher, total)


def _tokens(tokenizer: Tokenizer, split: str) -> np.ndarray:
    """Tokens of as many files as are needed, in a random order."""
    files = library_files(split, "split")
    needed, tokens = max(EVALUATED, CALIBRATED) * ROWS * SEQ_LEN + 1, []
    for place in np.random.default_rng(0).permutation(len(files)):
        if len(tokens) < needed:
            tokens += tokenizer.encode(files[place][1].read_text())
    assert len(tokens) >= needed, (split, len(tokens))
    return np.asarray(tokens[:needed], np.int32)


def _mean_nll(model: LanguageModel, batch: TokenBatch) -> jax.Array:
    final = model.hidden(Inputs.of(batch)).final
    return jnp.mean(token_losses(final, model.lm_head(), batch.targets).array)


def measure_recovery(folder: Path, method: str, seed: int, first_seed: int, results: Figures) -> None:
    """Trains until the perplexity is near the teacher's: [steps or None, learning rate, last ratio]."""
    steps, rates = RECOVERIES[method]
    if seed != first_seed:
        rates = (min(recoveries(results, method, first_seed), key=recovery_order)[1],)
    for rate in rates:
        name = f"{method.replace(' ', '_')}-{rate:g}-{seed}"
        metrics = folder / "logs" / name / "metrics.jsonl"
        run(folder, name, recovery_config(folder, method, seed, steps, rate), lambda path: reached(path) is not None)
        results.get(
            f"recovery of {method}, learning rate {rate:g}, of teacher {seed}",
            lambda metrics=metrics, rate=rate: [reached(metrics), rate, ratios(metrics)[-1][1]],
        )


def recoveries(results: Figures, method: str, seed: int) -> list[list]:
    """The figures of a method and a teacher, one for each learning rate."""
    rates = RECOVERIES[method][1]
    names = [f"recovery of {method}, learning rate {rate:g}, of teacher {seed}" for rate in rates]
    return [results.by_name[name] for name in names if name in results.by_name]


def recovery_order(figures: list) -> tuple[float, float]:
    """Fewer steps first; without an end, smaller ratios."""
    steps, _, ratio = figures
    return (float("inf") if steps is None else steps), ratio


def recovery_config(folder: Path, method: str, seed: int, steps: int, rate: float) -> dict:
    """A run that ends near its teacher."""
    teacher = str(teacher_folder(folder, seed).relative_to(folder))
    surgery = METHODS.get(method, {})
    shared = KV_HEADS if method == "transmla" else 1
    sizes = {"sem_dim": STUDENT[0] * shared * HEADS, "geo_dim": STUDENT[1] * shared * HEADS}
    common = {
        "data": DATA | {"tokenizer": teacher},
        "refs": {"teacher": {"type": "hf", "path": teacher, "dtype": "float32"}},
        "trainer": trainer_of(seed, steps, 10 * EVERY if method == SCRATCH else EVERY),
        "evals": [{"type": "fidelity", "batches": 4, "every": 1, "max_delta_nll": None, "max_ppl_ratio": None}],
    }
    if method == SCRATCH:
        return common | {"model": TEACHER | {"type": "dba"} | sizes, "optimizer": TEACHER_OPTIMIZER}
    return common | {
        "initialize_from_hf": teacher,
        "use_hf_model_config": True,
        "optimizer": {"learning_rate": rate, "weight_decay": 0.0, "warmup": 10, "lr_schedule": "constant"},
        "objective": {"type": "distill", "weight": 0.5},
        "phases": [
            {"name": "recovery", "num_train_steps": steps, "surgery": [{"type": "decouple", **surgery, **sizes}]}
        ],
    }


def ratios(metrics: Path) -> list[tuple[int, float]]:
    """(step, perplexity divided by the teacher's) of each evaluation."""
    name = "eval/fidelity/ppl_ratio"
    return [(record["step"], record[name]) for record in records(metrics) if name in record]


def reached(metrics: Path) -> int | None:
    """The first step at which the ratio is small enough; None if it never was."""
    return next((step for step, ratio in ratios(metrics) if ratio <= RATIO), None)


def cache_values(semantic: int, geometric: int) -> int:
    """Values of a token and layer in the student's cache, by the features of a head."""
    return KV_HEADS * (semantic + geometric + HEAD_SIZE)


def report_starts(results: Figures, picture: Path) -> None:
    """Prints the losses right after each surgery, as means and ranges over teachers, and draws them."""
    teachers = of_seeds(results, "loss")
    if not teachers:
        return
    whole = 2 * KV_HEADS * HEAD_SIZE
    print(f"\nLoss right after the surgery; teachers: {', '.join(f'{loss:.3f}' for loss in teachers)}\n")
    print("| features of a head | cache |" + "".join(f" `{name}` |" for name in METHODS))
    print("|---" * (2 + len(METHODS)) + "|")
    curves: dict[str, list[Sequence[float]]] = {name: [] for name in METHODS}
    for size in SIZES:
        cells = []
        for name in METHODS:
            losses = of_seeds(results, f"loss with {name}, {size[0]} + {size[1]},")
            curves[name].append(losses)
            cells.append(f" {statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}) |")
        print(f"| {size[0]} + {size[1]} | {cache_values(*size) / whole - 1:+.0%} |" + "".join(cells))
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 4.5))
    places = [cache_values(*size) for size in SIZES]
    for name, losses in curves.items():
        means = [statistics.fmean(by_teacher) for by_teacher in losses]
        (line,) = axes.plot(places, means, marker="o", label=name)
        axes.fill_between(places, [min(x) for x in losses], [max(x) for x in losses], color=line.get_color(), alpha=0.2)
    axes.axhline(statistics.fmean(teachers), color="black", linestyle="--", label="teacher")
    axes.set_xlabel(f"values in the cache for each token and layer (teacher: {whole})")
    axes.set_ylabel("loss right after the surgery, nats")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def report_recovery(results: Figures) -> None:
    """Prints the steps and tokens until the perplexity was near the teacher's."""
    names = [key for key in results.by_name if key.startswith("recovery of ")]
    if not names:
        return
    print(f"\n| start, {STUDENT[0]} + {STUDENT[1]} features | teacher | learning rate | steps | tokens | last ratio |")
    print("|---|---|---|---|---|---|")
    for name in names:
        steps, rate, ratio = results.by_name[name]
        method, _, rest = name.removeprefix("recovery of ").partition(", learning rate")
        tokens = "not reached" if steps is None else f"{steps * ROWS * SEQ_LEN:,}"
        number = f"> {RECOVERIES[method][0]}" if steps is None else f"{steps}"
        print(f"| {method} | {rest.rpartition(' ')[2]} | {rate:g} | {number} | {tokens} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
