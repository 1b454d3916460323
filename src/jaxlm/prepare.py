"""Text to token caches ahead of training, and what is in them, to look at.

    python -m jaxlm.prepare --config_path run.yaml --show_batch 0

Reads what jaxlm.train reads, makes the tokenizer and all phases' caches where they are missing, and stops. Training then
finds them. Needs no accelerator and compiles nothing, so it runs where time is cheap.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxlm.config.load import load_config, refuse_dry_run
from jaxlm.config.run import RunConfig
from jaxlm.core.batch_schedule import BatchSchedule
from jaxlm.core.errors import ConfigError
from jaxlm.data.cache.ray_workers import tokenize_on_ray
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.packing import PackedSequences
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.data.tokens import TokenData
from jaxlm.engine.phases import Phase
from jaxlm.observe.console import Console, table
from jaxlm.run.batch_plan import batch_sizes
from jaxlm.run.exit_codes import run_command
from jaxlm.run.num_steps import check_num_steps, with_num_steps_of_data
from jaxlm.run.plan import plan_phases

_NO_TARGET = ("⟦", "⟧")


@dataclass(frozen=True)
class Prepared:
    """A phase's data, ready.

    Attributes:
        phase: which one.
        data: open.
    """

    phase: Phase
    data: TokenData


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return run_command(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxlm.prepare",
        description="Tokenizes a run's data ahead. All keys of its configuration may follow, as for jaxlm.train.",
        allow_abbrev=False,
    )
    parser.add_argument("--show_batch", type=int, metavar="N", help="print what step N + 1 will be trained on")
    options, rest = parser.parse_known_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # accelerators are left to others
    config = load_config(rest, "jaxlm.prepare")
    refuse_dry_run(config, "jaxlm.prepare makes caches")
    if options.show_batch is not None:
        check_batch(config, options.show_batch, plan_phases(config)[0])
    console = Console()
    tokenizer, prepared = prepare(config, console)
    for title, rows in _cache_rows(prepared):
        console.log(table(title, rows))
    if options.show_batch is not None:
        for text in batch_as_text(config, prepared, tokenizer, options.show_batch):
            console.log(text)
    return 0


def prepare(config: RunConfig, console: Console) -> tuple[Tokenizer, list[Prepared]]:
    """The run's tokenizer and all its phases' caches, made where they are missing.

    Raises:
        ConfigError: as training would raise it.
    """
    config.model.check()
    check_num_steps(config)
    sections = plan_phases(config)[1]
    for section in sections:
        section.check()
    tokenizer = sections[0].load_tokenizer(log=console.log)
    tokenize_on_ray(config.trainer.ray, sections, tokenizer, config.model.seq_len, console.log)
    sizes = batch_sizes(config.trainer)
    if sizes is not None:
        config = with_num_steps_of_data(config, BatchSchedule.of(sizes), tokenizer, console.log)
    phases = plan_phases(config)[0]
    prepared = []
    for phase, section in zip(phases, sections, strict=True):
        prepared.append(Prepared(phase, section.open(tokenizer, config.model.seq_len, log=console.log)))
    return tokenizer, prepared


def check_batch(config: RunConfig, number: int, phases: Sequence[Phase]) -> None:
    """Raises `ConfigError` unless the run has a training batch `number`, whose size is known without its devices."""
    last = phases[-1].end
    if not 0 <= number < last:
        raise ConfigError(f"--show_batch: {number} given; the run's {last} steps have batches 0 to {last - 1}")
    if batch_sizes(config.trainer) is None:
        raise ConfigError("--show_batch: needs trainer.train_batch_size, which is -1: devices would decide it")


def batch_as_text(config: RunConfig, prepared: Sequence[Prepared], tokenizer: Tokenizer, number: int) -> Iterator[str]:
    """The rows of training batch `number`, from 0: what step `number + 1` is trained on if nothing is changed on the way.

    Tokens stand in ⟦brackets⟧ where no target is: they are read, and not asked for.

    Raises:
        ConfigError: as `check_batch`.
    """
    check_batch(config, number, [one.phase for one in prepared])
    sizes = batch_sizes(config.trainer)
    assert sizes is not None, "check_batch has looked"
    phase, data = next((p.phase, p.data) for p in prepared if number < p.phase.end)
    batches = BatchSchedule.of(sizes)
    mixture = data.examples(batches.counted_from(phase.start), seed=config.trainer.seed)
    size = batches.at(number).size
    examples = batches.examples_between(phase.start, number) + np.arange(size)
    columns = mixture.read(examples)
    yield f"batch {number}: step {number + 1}, phase '{phase.name}', {size} rows of {mixture.seq_len} tokens"
    for row, (source, place) in enumerate(zip(*map(np.ndarray.tolist, mixture.find(examples)), strict=True)):
        own = {name: column[row] for name, column in columns.items()}
        windows, name = mixture.sequences(source), mixture.names[source]
        where = f"window {place} of {len(windows)}{f' of {name}' if name else ''}"
        targets = int(own["loss_mask"].sum())
        yield f"=== row {row}: {where}, {targets} targets in {windows.seq_len} tokens ==="
        first = int(windows.starts(np.array([place]))[0])
        for start, text in _documents(own, tokenizer):
            yield f"--- {windows.cache.source_of(first + start)} ---\n{text}"


def _documents(row: dict[str, np.ndarray], tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Where each document of a row begins, and its text."""
    # A row's tokens and its last target, which follows them; each is a target where the place before it counts.
    ids = np.append(row["tokens"], row["targets"][-1])
    asked = np.append(False, row["loss_mask"] > 0)
    used = np.append(row["segment_ids"], row["segment_ids"][-1] * asked[-1])
    for segment in range(1, int(used.max()) + 1):
        (inside,) = np.nonzero(used == segment)
        runs = itertools.groupby(inside.tolist(), key=lambda place: bool(asked[place]))
        texts = [(is_target, tokenizer.decode(ids[list(places)].tolist(), special=True)) for is_target, places in runs]
        yield int(inside[0]), "".join(text if kept else text.join(_NO_TARGET) for kept, text in texts)


def _cache_rows(prepared: Sequence[Prepared]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A table for each cache; phases may share one."""
    shown: dict[str, str] = {}
    for one in prepared:
        train = [("train", name, windows) for name, windows in one.data.train.items()]
        held_out = [("validation", part.source.name, part.sequences) for part in one.data.validation]
        for split, source, windows in (*train, *held_out):
            if shown.setdefault(str(windows.cache.folder), one.phase.name) == one.phase.name:
                title = f"{source} {split}".strip()
                yield f"phase '{one.phase.name}': {title}", describe_cache(windows)


def describe_cache(windows: PackedSequences) -> list[tuple[str, str]]:
    """What is in a cache, for people."""
    cache: TokenCache = windows.cache
    return [
        ("files", f"{len(cache.documents_of):,}"),
        ("documents", f"{len(cache.offsets) - 1:,}"),
        ("tokens", f"{cache.num_tokens:,} of a vocabulary of {cache.vocab_size:,}, special ones included"),
        ("bytes", f"{cache.num_bytes:,} of text"),
        ("bytes per token", f"{cache.num_bytes / cache.num_tokens:.3f}"),
        ("windows", f"{len(windows):,} of {windows.seq_len:,} tokens"),
        ("padding", f"{windows.padding:.4%} of their places{'' if windows.packed else ', all in the last one'}"),
        ("fingerprint", cache.fingerprint),
        ("folder", str(cache.folder)),
    ]


if __name__ == "__main__":
    sys.exit(main())
