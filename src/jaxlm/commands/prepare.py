"""Tokenizes data ahead of training, and describes the token caches.

    jaxlm prepare --config_path run.yaml --show_batch 0
    jaxlm prepare --config_path chats.yaml --show_example
    jaxlm prepare --core_bundle eval_bundle
    jaxlm prepare --core_bundle eval_bundle --core_files llm-foundry

Takes the same configuration as jaxlm train, builds the tokenizer and the token caches of all phases if they do not exist,
and stops. Training then reuses them. It needs no accelerator and compiles nothing, so you can run it on a CPU machine.
`--core_bundle` downloads the tasks of the evaluation `core`, or copies them from a clone of llm-foundry (`--core_files`), and
needs no configuration.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxlm.core.errors import ConfigError, Parser
from jaxlm.data.base import TRAIN
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.cache.ray_workers import tokenize_on_ray
from jaxlm.data.data import Data
from jaxlm.data.examples import Examples, check_signals
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.phases import Phase
from jaxlm.models.base import token_leaves
from jaxlm.observe.console import Console, table
from jaxlm.plan.batches import BatchPlan
from jaxlm.plan.load_config import load_config, refuse_dry_run
from jaxlm.plan.num_steps import check_num_steps, with_num_steps_of_data
from jaxlm.plan.plan import all_sources, initial_model, plan_phases
from jaxlm.plan.run_config import RunConfig
from jaxlm.session.command_parts import parts_of, run_parts
from jaxlm.session.exit_codes import command
from jaxlm.session.init_from import starts_at_random
from jaxlm.session.leaves_from_tokens import compute_leaves


@dataclass(frozen=True)
class Prepared:
    """The open data of a phase."""

    phase: Phase
    data: Data


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    about = "Tokenizes a run's data ahead of training. Takes the same configuration options as jaxlm train."
    parser = Parser(prog="jaxlm prepare", description=about, allow_abbrev=False)
    batch = "print training batch N, which step N + 1 trains on"
    parser.add_argument("--show_batch", type=int, metavar="N", help=batch)
    example = (
        "for chats and prompts: print an example of each source with the tokens that the loss is computed on in color"
    )
    parser.add_argument("--show_example", action="store_true", help=example)
    parts = parts_of("prepare")
    for part in parts:
        part.add_options(parser)
    options, rest = parser.parse_known_args(arguments)
    if (code := run_parts(parts, options, rest)) is not None:
        return code
    jax.config.update("jax_platforms", "cpu")  # leave accelerators free for other processes
    config = load_config(rest, "jaxlm prepare")
    refuse_dry_run(config, "jaxlm prepare makes caches")
    if options.show_batch is not None:
        check_batch(config, options.show_batch, plan_phases(config)[0])
    console = Console()
    tokenizer, prepared = prepare(config, console)
    for title, rows in _cache_rows(prepared):
        console.log(table(title, rows))
    if options.show_example:
        show_examples(config, tokenizer, console)
    if options.show_batch is not None:
        for text in batch_as_text(config, prepared, tokenizer, options.show_batch):
            console.log(text)
    return 0


def prepare(config: RunConfig, console: Console) -> tuple[Tokenizer, list[Prepared]]:
    """Opens the run's tokenizer and the token caches of all phases, and builds those that do not exist."""
    model = initial_model(config)
    model.check()
    check_num_steps(config)
    phases, sections = plan_phases(config)
    for section in sections:
        section.check()
    tokenizer = sections[0].corpus.load_tokenizer(log=console.log)
    wanted = token_leaves(model, tokenizer.vocab_size)
    seq_lens = [phase.model.seq_len for phase in phases]
    tokenize_on_ray(config.trainer.ray, sections, tokenizer, seq_lens, console.log)
    batches = _batches(config)
    if batches is not None:
        config = with_num_steps_of_data(config, batches, tokenizer, console.log)
    phases = plan_phases(config)[0]
    pairs = zip(sections, seq_lens, strict=True)
    opened = [section.open(tokenizer, seq_len, log=console.log) for section, seq_len in pairs]
    for phase, data in zip(phases, opened, strict=True):
        if phase.objective.facts.sequences_axis is not None:
            check_signals(data.train)
    if wanted is not None and starts_at_random(config, sections[0].tokenizer):
        if batches is None and opened[0].max_train_batches:
            console.log(
                f"{', '.join(wanted.paths)}: left to the run, because the data that max_train_batches leaves depends on the"
                " batch size, and trainer.train_batch_size: -1 on the devices"
            )
        else:
            schedule = BatchSchedule.of([BatchSize(0, 1)]) if batches is None else batches.of(phases[0])
            compute_leaves(wanted, sections[0], opened[0], tokenizer.vocab_size, schedule, console.log)
    return tokenizer, list(map(Prepared, phases, opened))


def show_examples(config: RunConfig, tokenizer: Tokenizer, console: Console) -> None:
    """Prints an example of each source whose format has a loss mask. Raises `ConfigError` if there is no such source."""
    sources = all_sources(*plan_phases(config))
    previews = [
        (source.key, preview)
        for source, seq_len in sources
        if (preview := source.preview(tokenizer, seq_len, copies=console.log)) is not None
    ]
    if not previews:
        raise ConfigError(
            "--show_example: no source has chats or prompts with completions (data.format: chat or supervised). To see what"
            " a batch consists of, use --show_batch 0"
        )
    read = {source.key: source.describe_records(TRAIN, tokenizer) for source, _ in sources}
    for key, preview in previews:
        console.log(f"{key}: trained: {preview.describe()}{f'; {read[key]}' if read[key] else ''}")
        if preview.example:
            console.log(preview.draw(colors=console.has_colors))


def _batches(config: RunConfig) -> BatchPlan | None:
    return BatchPlan.without_devices(config.trainer, config.batches_of_phases())


def check_batch(config: RunConfig, number: int, phases: Sequence[Phase]) -> None:
    """Raises `ConfigError` if the run has no training batch `number`, or what it consists of is not known beforehand."""
    num_steps = phases[-1].end
    if not 0 <= number < num_steps:
        raise ConfigError(f"--show_batch: {number} given, must be between 0 and {num_steps - 1} ({num_steps} steps)")
    if _batches(config) is None:
        raise ConfigError(
            "--show_batch: trainer.train_batch_size is -1, so the batch size depends on the devices. Set it to a number"
        )
    phase, section = next(pair for pair in zip(phases, plan_phases(config)[1], strict=True) if number < pair[0].end)
    if not section.batching.has_examples_per_step:
        raise ConfigError(
            f"--show_batch: {number} given, but in phase '{phase.name}' not every step trains on as many new"
            " prompts (data.updates_per_rollout, dynamic_sampling, curriculum). The run writes the prompts and responses that"
            " steps train on to completions.jsonl"
        )


def batch_as_text(config: RunConfig, prepared: Sequence[Prepared], tokenizer: Tokenizer, number: int) -> Iterator[str]:
    """Formats training batch `number` (from 0). Step `number + 1` trains on it if the configuration is not changed.

    Text in ⟦brackets⟧ is masked: no loss is computed on its tokens.
    """
    check_batch(config, number, [item.phase for item in prepared])
    batch_plan = _batches(config)
    assert batch_plan is not None, "see check_batch"
    phase, data = next((p.phase, p.data) for p in prepared if number < p.phase.end)
    batches = batch_plan.of(phase)
    mixture = data.mixture(batches.starting_at(phase.start), seed=config.order_seed)
    size = batches.at(number).size
    examples = batches.examples_between(phase.start, number) + np.arange(size)
    yield f"batch {number}: step {number + 1}, phase '{phase.name}', {size} rows of {phase.model.seq_len} tokens"
    for row, (source, place) in enumerate(zip(*map(np.ndarray.tolist, mixture.find(examples)), strict=True)):
        sequences, name = mixture.examples_of(source), mixture.names[source]
        summary, *documents = sequences.show(place, tokenizer)
        where = f"sequence {place} of {len(sequences)}{f' of {name}' if name else ''}"
        yield f"=== row {row}: {where}, {summary} ==="
        yield from documents


def _cache_rows(prepared: Sequence[Prepared]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Title and rows of a table for each cache. A cache shared by several phases is listed once."""
    listed: dict[str, str] = {}
    for item in prepared:
        train = [("train", name, examples) for name, examples in item.data.train.items()]
        validation = [("validation", part.source.name, part.examples) for part in item.data.validation]
        for split, source, examples in (*train, *validation):
            if listed.setdefault(str(examples.cache.folder), item.phase.name) == item.phase.name:
                title = f"{source} {split}".strip()
                yield f"phase '{item.phase.name}': {title}", describe_cache(examples)


def describe_cache(examples: Examples) -> list[tuple[str, str]]:
    """Describes a token cache as rows of name and value."""
    cache, where = examples.cache, "" if examples.summary else ", all in the last sequence"
    return [
        ("files", f"{len(cache.documents_of):,}"),
        ("documents", f"{len(cache.offsets) - 1:,}"),
        ("tokens", f"{cache.num_tokens:,} including special tokens (vocabulary size {cache.vocab_size:,})"),
        ("bytes", f"{cache.num_bytes:,} of text"),
        ("bytes per token", f"{cache.num_bytes / cache.num_tokens:.3f}"),
        ("sequences", f"{len(examples):,} of {examples.seq_len:,} tokens"),
        ("padding", f"{examples.padding:.4%} of all positions{where}"),
        *([] if cache.target_mask is None else [("loss on", f"{cache.trained_share:.1%} of all tokens")]),
        ("fingerprint", cache.fingerprint),
        ("folder", cache.location),
    ]


if __name__ == "__main__":
    sys.exit(main())
