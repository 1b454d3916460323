"""Measures loss and bits per byte on any text, by source, or runs tasks of lm-evaluation-harness.

    jaxlm evaluate --checkpoint checkpoints/quickstart
    jaxlm evaluate --checkpoint checkpoints/quickstart --data.validation_urls '[other/*.txt]'
    jaxlm evaluate --checkpoint model-folder --data.validation_urls '[other/*.txt]' --model.seq_len 512
    jaxlm evaluate --checkpoint checkpoints/quickstart --tasks arc_easy,lambada_openai
    jaxlm evaluate --checkpoint checkpoints/quickstart --tasks core --core_bundle eval_bundle --limit 500
    jaxlm evaluate --checkpoint checkpoints/upcycled --gates

Uses the run's validation data, so the total matches what training logged (with `max_eval_batches`, only on the same number
of devices). A Hugging Face model has no data of its own. Losses are reported per source, or per URL if there is only one
source. Options with a dot override the saved configuration; `--data.*` overrides the data section of the checkpoint's
phase. The last line of output is JSON.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.core.axes import BATCH
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import VALIDATION
from jaxlm.data.cache.token_cache import Provenance
from jaxlm.data.config import DataConfig
from jaxlm.data.data import ValidationData
from jaxlm.evals.harness import HarnessEvalConfig
from jaxlm.evals.loss import NOTHING, EvalLoss, LossMeter, by_group, macro
from jaxlm.objectives.next_token import score_batch
from jaxlm.observe.records import finite
from jaxlm.plan.plan import Plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode, drop_stale_keys, encode
from jaxlm.reading.overrides import option_tree, override
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.command_parts import CommandPart, parts_of, run_parts
from jaxlm.session.compilation.options import enable_compilation_cache
from jaxlm.session.exit_codes import command
from jaxlm.session.generation_options import add_quantize_option
from jaxlm.session.harness_tasks import add_task_options, check_task_options, evaluate_tasks
from jaxlm.session.load_model import (
    LoadedModel,
    checkpoint_parser,
    inference_form,
    open_model,
    parse_with_keys,
    to_stderr,
)
from jaxlm.session.verification import add_gate_option, evaluate_gates

_DATA = "data."
_SEQ_LEN = "model.seq_len"
# Keys of the trainer section that have an effect here.
_EFFECTIVE = ("trainer.per_device_eval_parallelism", "trainer.max_eval_batches", "trainer.compilation_cache_dir")
# Keys of the data section without effect -> why.
_NO_EFFECT = {
    "data.tokenizer": "the checkpoint's own tokenizer is used",
    "data.vocab_size": "the checkpoint's own tokenizer is used",
    "data.shuffle": "all data is read once, in any order",
    **dict.fromkeys(
        ("data.train_weights", "data.stop_strategy", "data.mixture_block_size"), "it only affects training"
    ),
    **dict.fromkeys(
        ("data.train_urls", "data.split"),
        "it only affects training; use --data.validation_urls for the text to evaluate",
    ),
}


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parts = parts_of("evaluate")
    options, keys = parse_with_keys(_parser(parts), arguments)
    if (code := run_parts(parts, options, keys)) is not None:
        return code
    check_task_options(options)
    if options.tasks is not None:
        evaluate_tasks(options, keys)
        return 0
    for_data = {name: value for name, value in keys.items() if name.startswith(_DATA)}
    others = {name: value for name, value in keys.items() if name not in for_data}
    opened = open_model(options.checkpoint, others, options.adapter, options.weights, also=_EFFECTIVE)
    enable_compilation_cache(opened.plan.config.trainer.compilation_cache_dir)
    data = data_with(opened, for_data)
    max_batches = _max_batches(opened.plan, options.max_batches)
    if opened.step is None and _SEQ_LEN not in others:
        length = opened.model.seq_len
        to_stderr(f"note: sequences of {length} tokens, the model's longest. Compare losses with the same --{_SEQ_LEN}")
    if options.gates is not None:
        _check_batch_size(opened, options.batch_size)
        evaluate_gates(opened, data, options, max_batches)
        return 0
    sums = evaluate(opened, data, options.batch_size, max_batches, options.quantize)
    _print_results(opened, sums, {source.name: source.config.tags for source in data.corpus.sources}, options.quantize)
    return 0


def _parser(parts: Sequence[CommandPart]) -> argparse.ArgumentParser:
    parser = checkpoint_parser(
        "evaluate",
        "Computes validation loss and bits per byte of a model, by source. You can override keys of the saved"
        " configuration: --data.validation_urls '[other/*.txt]' evaluates on other text.",
        or_else="; or a Hugging Face folder, or a hub repository name or name@revision",
    )
    size = f"sequences per batch (default: as in training; with --tasks {HarnessEvalConfig.batch_size})"
    parser.add_argument("--batch_size", type=int, help=size)
    most = "maximum number of batches per source, or `all` (default: as in training)"
    parser.add_argument("--max_batches", help=most)
    add_gate_option(parser)
    add_task_options(parser)
    add_quantize_option(parser)
    for part in parts:
        part.add_options(parser)
    return parser


def _max_batches(plan: Plan, text: str | None) -> int | None:
    if text is None:
        return plan.config.trainer.max_eval_batches
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--max_batches: '{text}' given, must be at least 1, or all")
    return int(text)


def data_with(opened: LoadedModel, options: Mapping[str, Any]) -> DataConfig:
    """The model's data section, overridden by options (`data.validation_urls`, ...)."""
    saved = {"data": encode(opened.data)}
    drop_stale_keys(RunConfig, saved, option_tree(dict(options)))
    changed = override(ConfigSource(saved), dict(options))
    data = decode(DataConfig, ConfigSource(changed.tree["data"]))
    for name, reason in _NO_EFFECT.items():
        for option in options:
            if option == name or option.startswith(f"{name}."):
                raise ConfigError(f"command line: --{option} has no effect here: {reason}. Remove it")
    if not data.has_validation:
        subject = "the run has" if opened.step is not None else f"{opened.location} is a Hugging Face model, which has"
        raise ConfigError(
            f"data.validation_urls: {subject} no validation data. Set --data.validation_urls '[folder/*.txt]'"
        )
    return data


def evaluate(
    opened: LoadedModel,
    data: DataConfig,
    batch_size: int | None = None,
    max_batches: int | None = None,
    quantize: str | None = None,
) -> dict[str, EvalLoss]:
    """Measures losses over one pass of the data: by source, or by `data.validation_urls` if there is only one source.

    Args:
        batch_size: sequences per batch; None uses the run's.
        max_batches: maximum number of batches per source; None means all.
        quantize: how to store the weights, as in `LoadedModel.for_inference`.
    """
    plan, size = opened.plan, _check_batch_size(opened, batch_size)
    places = {key: getattr(opened.data, key) for key in ("cache_dir", "cache_mirror_gb")}
    differs = dataclasses.replace(data, **places) != opened.data
    sums: dict[str, EvalLoss] = {}
    with plan.layout.use():
        token_bytes = opened.tokenizer.known_token_bytes(to_stderr)
        model = opened.load()
        dummy_prefix = opened.tokenizer.dummy_prefix()
        model = model if quantize is None else inference_form(model, opened.surgeries, plan, quantize)
        for data_set in data.open_validation(opened.tokenizer, opened.model.seq_len, to_stderr, separate_cache=differs):
            groups = _groups(data_set)
            options = {"batch_size": size, "layout": plan.layout, "max_batches": max_batches}
            meter = LossMeter(plan.precision, score_batch, token_bytes, len(groups.urls), dummy_prefix=dummy_prefix)
            losses = meter.measure(model, data_set.batches_by_group(groups, **options))
            sums |= dict(zip(groups.urls, losses, strict=True))
    return sums


def _check_batch_size(opened: LoadedModel, batch_size: int | None) -> int:
    """The number of sequences per batch. Raises `ConfigError` if they do not divide over the devices."""
    size = opened.eval_batch if batch_size is None else batch_size
    num_shards = opened.plan.layout.num_shards(BATCH)
    if size < 1 or size % num_shards:
        raise ConfigError(
            f"--batch_size: {size} given, must be a positive multiple of {num_shards}, the number of devices that share a"
            " batch"
        )
    return size


def _groups(data_set: ValidationData) -> Provenance:
    """The groups by which a source's losses are summed: one with the source's name, or one for each URL."""
    source, cache = data_set.source, data_set.examples.cache
    if not source.name and data_set.split == VALIDATION:
        return source.provenance(VALIDATION, cache)
    return Provenance((source.name or "held out",), np.array([cache.num_tokens], np.int64))


def _print_results(
    opened: LoadedModel, sums: Mapping[str, EvalLoss], tags: Mapping[str, Sequence[str]], quantize: str | None
) -> None:
    total = sum(sums.values(), NOTHING)
    tagged = {name: part for name, part in by_group(sums, tags).items() if name not in sums}
    rows = {**sums, **{f"tag {tag}": part for tag, part in tagged.items()}, "total": total}
    width = max(map(len, ["source", *rows]))
    print(f"{'source':<{width}}  {'tokens':>12}  {'bytes':>12}  {'loss':>8}  {'bits/byte':>11}")
    for name, part in rows.items():
        numbers = f"{part.loss:>8.4f}  {part.bits_per_byte:>11.4f}"
        print(f"{name:<{width}}  {part.tokens:>12,.0f}  {part.text_bytes:>12,.0f}  {numbers}")
    about = {"checkpoint": str(opened.location), "step": opened.step, **_numbers(total)}
    about |= {} if quantize is None else {"quantize": quantize}
    parts = {"sources": sums, "tags": tagged}
    by_name = {kind: {name: _numbers(part) for name, part in group.items()} for kind, group in parts.items()}
    print(json.dumps({**about, **_as_json(macro(sums.values())), **by_name}))


def _numbers(part: EvalLoss) -> dict[str, float | None]:
    return _as_json({"loss": part.loss, "bpb": part.bits_per_byte, "tokens": part.tokens, "bytes": part.text_bytes})


def _as_json(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in numbers.items()}


if __name__ == "__main__":
    sys.exit(main())
