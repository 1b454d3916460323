"""jaxlm's part of benchmarks/nanochat.py. Arguments: rows, evaluate or step, and a JSON file with the options.

rows       records the rows that `jaxlm train` would read, of both splits.
evaluate   imports nanochat's checkpoints: logits of each. Loads jaxlm's own: logits, bits per byte and the answers to CORE.
step       times the compiled step of `jaxlm train` for benchmarks/cpu_peers.py, from nanochat's initial weights.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from jaxlm.core.imports import gc_paused

import common
import jax
import numpy as np

with gc_paused():
    from jaxlm_steps import take_steps

    import jaxlm
    from jaxlm.commands.evaluate import evaluate as evaluate_loss
    from jaxlm.data.batch_schedule import BatchSchedule, BatchStage
    from jaxlm.interop.pretrained import load_pretrained, open_pretrained
    from jaxlm.models.base import vocab_axis
    from jaxlm.plan.load_config import read_config
    from jaxlm.plan.plan import make_plan
    from jaxlm.session.compilation.options import enable_compilation_cache, step_options
    from jaxlm.session.inference_model import InferenceModel
    from jaxlm.systems.nanochat.core_eval import CoreEvalConfig, open_core


def imported(folder, changes, layout):
    """The model in a folder of nanochat. Args: changes: keys that its files do not say."""
    opened = open_pretrained(Path(folder))
    config = dataclasses.replace(opened.config, **changes)
    abstract = jax.eval_shape(lambda: config.build(vocab_axis(opened.vocab_size), key=jax.random.key(0)))
    return load_pretrained(Path(folder), abstract, config, layout)


def rows(options):
    run = read_config(Path(options["config"]))
    data = run.data.open(run.data.corpus.load_tokenizer(print), options["batch"][1], print)
    batches = BatchSchedule((BatchStage(0, options["batch"][0], 1, options["batch"][0]),))
    numbers = np.arange(options["num_batches"] * options["batch"][0])
    read = {"train": data.mixture(batches, seed=0).read(numbers), "val": data.validation[0].examples.read(numbers)}
    found = {name: np.append(columns["tokens"], columns["targets"][:, -1:], axis=1) for name, columns in read.items()}
    np.savez(options["output"], allow_pickle=False, **found)


def evaluate(options):
    own = jaxlm.load(options["checkpoint"])
    loaded, layout = own.loaded, own.loaded.plan.layout
    rows = np.load(options["rows"])["rows"].tolist()
    found = {"own": np.stack(own.logits(rows))}
    for name, folder in options["checkpoints"].items():
        with layout.use():
            model = imported(folder, options["changes"], layout)
        found[name] = np.stack(InferenceModel(loaded, model).logits(rows))
    losses = evaluate_loss(loaded, loaded.data, options["batch"][0], options["num_batches"])
    (sums,) = losses.values()
    answers = {}
    if options["questions"]:
        config = CoreEvalConfig(options["bundle"], options["tasks"], options["questions"])
        with layout.use():
            results = open_core(config, loaded.tokenizer).run(own.model)
        answers = {name: result.correct.tolist() for name, result in results.items()}
    about = {"bpb": sums.bits_per_byte, "answers": answers}
    Path(options["output"]).with_suffix(".json").write_text(json.dumps(about))
    np.savez(options["output"], allow_pickle=False, **found)


def step(options):
    enable_compilation_cache(options["cache"])
    run = read_config(Path(options["config"]))
    rows, length, vocab = options["shape"]
    with tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, log_dir=folder))
        plan = make_plan(run, "peer", vocab)
        named = ", ".join(filter(None, step_options(plan).texts))
        clock = common.Clock(version=jax.__version__, options=named, **options["facts"])
        with plan.layout.use():
            abstract = plan.state_builder.abstract_initial_model
            weights = load_pretrained(Path(options["start"]), abstract, run.model, plan.layout)
            take_steps(plan, clock, lambda number: common.batch(number, rows, length, vocab), weights=weights)


def main():
    mode, file = sys.argv[1:]
    {"rows": rows, "evaluate": evaluate, "step": step}[mode](json.loads(Path(file).read_text()))


main()
