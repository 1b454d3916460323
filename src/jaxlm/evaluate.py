"""A checkpoint to numbers: validation loss and bits per byte, by source and in all.

    python -m jaxlm.evaluate --checkpoint checkpoints/quickstart
    python -m jaxlm.evaluate --checkpoint checkpoints/quickstart --data.validation_urls '[other/*.txt]'
    python -m jaxlm.evaluate --checkpoint checkpoints/quickstart --tasks arc_easy,lambada_openai

Reads the text that the run was validated on, so that the total is what training logged (where `max_eval_batches` cut it
short: on as many devices); every token counts for the source, or the URL of a single one, that it is from. Options with
a dot go over the saved configuration; `--data.*` over the data of the phase that the checkpoint stands in. One JSON line
comes last.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.config.decode import decode, encode
from jaxlm.config.overrides import override
from jaxlm.config.yaml import ConfigSource
from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.types import TokenBatch
from jaxlm.data.cache.token_cache import Provenance
from jaxlm.data.config import DataConfig
from jaxlm.data.loader import eval_batches
from jaxlm.data.packing import PackedSequences
from jaxlm.data.sources.named import VALIDATION
from jaxlm.data.tokens import ValidationData
from jaxlm.evals.harness import HarnessEvalConfig
from jaxlm.evals.loss import NOTHING, EvalLoss, LossMeter, by_group, macro
from jaxlm.run.compilation_cache import enable_compilation_cache
from jaxlm.run.exit_codes import run_command
from jaxlm.run.harness_tasks import add_task_options, check_task_options, evaluate_tasks
from jaxlm.run.load_model import AS_TRAINED, LoadedCheckpoint, checkpoint_parser, open_checkpoint, parse_with_keys
from jaxlm.run.plan import Plan

_DATA = "data."
# Keys that say how much is read at once and in all, and where programs are kept.
_EFFECTIVE = tuple(
    f"trainer.{name}" for name in ("per_device_eval_parallelism", "max_eval_batches", "compilation_cache_dir")
)
_INSTEAD = {
    "data.tokenizer": "the model knows the tokens of the tokenizer that it was trained with, which the checkpoint holds",
    "data.vocab_size": "the checkpoint's tokenizer has its size",
    "data.shuffle": "every window is read once, and their order changes no sum",
    **dict.fromkeys(
        ("data.train_weights", "data.stop_strategy", "data.mixture_block_size"),
        "nothing is trained, so nothing is mixed",
    ),
    **dict.fromkeys(
        ("data.train_urls", "data.split"), "nothing is trained; --data.validation_urls names the text to evaluate on"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return run_command(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: Sequence[str]) -> int:
    options, keys = parse_with_keys(_parser(), arguments)
    check_task_options(options)
    if options.tasks is not None:
        evaluate_tasks(options, keys)
        return 0
    for_data = {name: value for name, value in keys.items() if name.startswith(_DATA)}
    others = {name: value for name, value in keys.items() if name not in for_data}
    trained = open_checkpoint(options.checkpoint, others, also=_EFFECTIVE)
    enable_compilation_cache(trained.plan.config.trainer.compilation_cache_dir)
    data = data_with(trained, for_data)
    most = _most(trained.plan, options.max_batches)
    sums = evaluate(trained, data, options.batch_size, most, options.weights)
    _show(trained, sums, {source.name: source.config.tags for source in data.sources()})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = checkpoint_parser(
        "jaxlm.evaluate",
        "Validation loss and bits per byte of a checkpoint, by source. Keys of the saved configuration may follow:"
        " --data.validation_urls '[other/*.txt]' evaluates on other text.",
        or_else="; with --tasks also a folder of Hugging Face, or the hub's name or name@revision",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=None,
        help=f"sequences a batch (default: as in training; with --tasks {HarnessEvalConfig.batch_size})",
    )
    parser.add_argument(
        "--max_batches", default=None, help="evaluate on so many batches, or `all` (default: as in training)"
    )
    add_task_options(parser)
    return parser


def _most(plan: Plan, text: str | None) -> int | None:
    if text is None:
        return plan.config.trainer.max_eval_batches
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--max_batches: '{text}' given, 1 or more, or all, expected")
    return int(text)


def data_with(trained: LoadedCheckpoint, options: Mapping[str, Any]) -> DataConfig:
    """The data that a checkpoint's phase is validated on, with options (`data.validation_urls`, ...) over it.

    Raises:
        ConfigError: an option that evaluating has no use for, or no text.
    """
    changed = override(ConfigSource({"data": encode(trained.data)}), dict(options))
    data = decode(DataConfig, ConfigSource(changed.tree["data"]))
    for name, instead in _INSTEAD.items():
        if name in options:
            raise ConfigError(f"command line: --{name} has no effect here: {instead}. Leave it out")
    if not any(source.has(VALIDATION) for source in data.sources()):
        raise ConfigError("data.validation_urls: the run has none. Name some: --data.validation_urls '[folder/*.txt]'")
    return data


def evaluate(
    trained: LoadedCheckpoint,
    data: DataConfig,
    batch_size: int | None = None,
    max_batches: int | None = None,
    weights: str = AS_TRAINED,
) -> dict[str, EvalLoss]:
    """The sums of each source, or of each of `data.validation_urls` where the section is the one source; over one pass.

    Args:
        batch_size: sequences; None takes the run's.
        max_batches: of each source; None means all.
        weights: which of the checkpoint's, as in `LoadedCheckpoint.load_model`.

    Raises:
        ConfigError: the data is not there, or the batch does not divide over the devices.
    """
    plan = trained.plan
    size = plan.batches.eval if batch_size is None else batch_size
    num_shards = plan.layout.num_shards(BATCH)
    if size < 1 or size % num_shards:
        raise ConfigError(
            f"--batch_size: {size} given; a multiple of the {num_shards} device(s) that share a batch expected"
        )
    other = dataclasses.replace(data, cache_dir=trained.data.cache_dir) != trained.data
    log = lambda line: print(line, file=sys.stderr)  # noqa: E731
    sums: dict[str, EvalLoss] = {}
    with plan.layout.use():
        model, token_bytes = trained.load_model(weights), trained.tokenizer.token_bytes()
        for data_set in data.open_validation(trained.tokenizer, plan.config.model.seq_len, log, separate_cache=other):
            batches = eval_batches(data_set.sequences, batch_size=size, layout=plan.layout, max_batches=max_batches)
            groups = _groups(data_set)
            meter = LossMeter(plan.precision, token_bytes, num_groups=len(groups.urls))
            found = meter.measure(model, with_provenance(batches, data_set.sequences, groups))
            sums |= dict(zip(groups.urls, found, strict=True))
    return sums


def _groups(data_set: ValidationData) -> Provenance:
    """What the tokens of a source are counted by: all together under its name, or by URL."""
    source, windows = data_set.source, data_set.sequences
    if not source.name:
        return source.provenance(VALIDATION, windows)
    return Provenance((source.name,), np.array([windows.cache.num_tokens], np.int64))


def with_provenance(
    batches: Iterator[TokenBatch], windows: PackedSequences, origins: Provenance
) -> Iterator[tuple[TokenBatch, jax.Array]]:
    """Each batch with the number of the URL that every target is from, int32 [batch, position]."""
    row = 0
    for batch in batches:
        targets = batch.targets.array
        starts = windows.starts(np.minimum(row + np.arange(targets.shape[0]), len(windows) - 1))
        numbers = origins.of(starts[:, None] + np.arange(1, windows.seq_len + 1))
        yield batch, jax.make_array_from_callback(targets.shape, targets.sharding, numbers.__getitem__)
        row += targets.shape[0]


def overall(sums: Mapping[str, EvalLoss]) -> EvalLoss:
    """All sources together."""
    return sum(sums.values(), NOTHING)


def _show(trained: LoadedCheckpoint, sums: Mapping[str, EvalLoss], tags: Mapping[str, Sequence[str]]) -> None:
    total = overall(sums)
    tagged = {name: part for name, part in by_group(sums, tags).items() if name not in sums}
    rows = {**sums, **{f"tag {tag}": part for tag, part in tagged.items()}, "total": total}
    width = max(map(len, ["source", *rows]))
    print(f"{'source':<{width}}  {'tokens':>12}  {'bytes':>12}  {'loss':>8}  {'bits a byte':>11}")
    for name, part in rows.items():
        numbers = f"{part.loss:>8.4f}  {part.bits_per_byte:>11.4f}"
        print(f"{name:<{width}}  {part.tokens:>12,.0f}  {part.text_bytes:>12,.0f}  {numbers}")
    about = {"checkpoint": str(trained.found.place), "step": trained.found.cursor.step, **_numbers(total)}
    parts = {"sources": sums, "tags": tagged}
    by_name = {kind: {name: _numbers(part) for name, part in some.items()} for kind, some in parts.items()}
    print(json.dumps({**about, **_known(macro(sums.values())), **by_name}))


def _numbers(part: EvalLoss) -> dict[str, float | None]:
    return _known({"loss": part.loss, "bpb": part.bits_per_byte, "tokens": part.tokens, "bytes": part.text_bytes})


def _known(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in numbers.items()}


if __name__ == "__main__":
    sys.exit(main())
