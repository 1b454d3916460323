"""`--dry_run true`: plans and compiles a run without training. Needs no data, tokenizer or writable folder.

Of chats and prompts on this machine, it reads the first records, and draws one with the tokens that the loss is computed on.
It looks for everything that a start needs, at URLs too, and lists what a start would end with. It opens rewards and
environments, and asks sampling servers once. If a start would fail, the dry run fails with the same message, after it has
printed the memory: you may want that number on a machine without the data. It only writes the compiled steps to
`trainer.compilation_cache_dir`, where a start finds them, and the plot of the learning-rate schedule to the run's log folder;
if that fails, it logs a line.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxlm.core.errors import ConfigError, bounded
from jaxlm.core.runtime import all_processes, is_main_process
from jaxlm.core.stores import is_url
from jaxlm.data.base import TRAIN, VALIDATION
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.preview import MaskPreview
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from jaxlm.data.tokenizer.train_bpe import DEFAULT_VOCAB_SIZE, bpe_config
from jaxlm.engine.checkpoint.restore import resolve_checkpoints
from jaxlm.interop.hf.folder import ReadOptions
from jaxlm.interop.pretrained import check_pretrained, hf_name, open_pretrained
from jaxlm.observe.console import Console, table
from jaxlm.observe.logged_run import LoggedRun
from jaxlm.observe.plots import schedule_curve
from jaxlm.optim.groups import group_schedules
from jaxlm.optim.schedules import Schedule
from jaxlm.plan.plan import Plan, all_sources
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import choice_name
from jaxlm.session.compilation.options import enable_compilation_cache
from jaxlm.session.compilation.step import compile_steps, gib
from jaxlm.session.init_from import check_init_from, import_notes
from jaxlm.session.references import check_references
from jaxlm.session.resume_checks import with_past_references
from jaxlm.session.startup import check_exports_are_new, describe

_DEFAULT_VOCAB_SIZE = 50_257  # GPT-2's
_ANSWER_S = 10.0  # client libraries repeat an unanswered request for up to a minute
# Time in which this process computes is not counted, as long as all of it is not too long.
_SLICE_S, _WORKING, _BUSY_S = 0.1, 0.01, 120.0
_REFUSED = "a start would end with: "
_UNCHECKED = "not checked: "
_MAX_CORNERS = 16  # corner points of a schedule to list


def assumed_vocabulary(config: RunConfig) -> tuple[int, str]:
    """The vocabulary size to plan with before a run has opened its tokenizer, and a description of where it comes from."""
    data = config.phases[0].data if config.phases and config.phases[0].data else config.data
    by_default = (_DEFAULT_VOCAB_SIZE, "GPT-2's, assumed because data.vocab_size is not set")
    size, source = next(_vocabularies(config, data), by_default)
    return size, f"{size:,} ({source})"


def _vocabularies(config: RunConfig, data: DataConfig) -> Iterator[tuple[int, str]]:
    """Yields the sizes that a configuration and what it names tell. Mistakes are listed below the plan, or end the start."""
    if data.vocab_size is not None:
        yield data.vocab_size, "data.vocab_size"
    if bpe_config(data.tokenizer) is not None:
        yield DEFAULT_VOCAB_SIZE, "of a tokenizer that is trained without data.vocab_size"
    with contextlib.suppress(ConfigError, OSError):
        size = open_tokenizer(str(data.tokenizer), data.added_tokens, None).vocab_size
        yield size, f"tokens of {data.tokenizer}{' and data.added_tokens' if data.added_tokens else ''}"
    with contextlib.suppress(ConfigError, OSError):
        name = hf_name(config.initialize_from_hf, str(data.tokenizer))
        if name is not None and Path(name).exists():
            opened = open_pretrained(Path(name), ReadOptions(skip_keys=config.hf_skip_keys))
            yield opened.vocab_size, f"rows of the embedding in {name}"
    trainer = config.trainer
    for path in (path for path in trainer.starts.values() if not is_url(path)):
        with contextlib.suppress(ConfigError, OSError):
            for newest in resolve_checkpoints(path, Path(trainer.checkpointer.staging_dir))[-1:]:
                with newest.local("run/tokenizer") as folder:
                    size = load_tokenizer(str(folder), of_run=True).vocab_size
                yield size, f"tokens of {newest.location}"


def dry_run(plan: Plan, console: Console) -> None:
    """Logs the plan, compiles the training step of every phase, and logs its memory use.

    Raises:
        ConfigError: a start would end with it. On all processes.
    """
    if not is_url(plan.config.trainer.checkpointer.base_path):
        plan = with_past_references(plan)
    rows = [*describe(plan), ("vocabulary", assumed_vocabulary(plan.config)[1]), *_caches(plan)]
    previews: list[MaskPreview] = []
    together = _answers if jax.process_count() == 1 else _answers_in_turn  # threads have no order that processes share
    answers = [*_answers([*_checks(plan), *_previews(plan, previews)]), *together(list(_agreed_checks(plan)))]
    answers += _answers_in_turn(list(_openings(plan))) if is_main_process() else []
    refusals = list(dict.fromkeys(answers))
    console.log(table("plan (dry run: nothing is tokenized, no training)", [*rows, *refusals]))
    for preview in previews:
        console.log(preview.draw(colors=console.has_colors))
    for note in import_notes(plan):
        console.log(f"note: {note}")
    enable_compilation_cache(plan.config.trainer.compilation_cache_dir)
    with plan.layout.use():
        for phase in plan.phases:
            steps = compile_steps(plan, phase, phase.start, console.log)
            phase_rows = [("schedule", _corners(phase.first_scheduled, phase.optimizer.schedule(phase.num_steps)))]
            for name, schedule in group_schedules(phase.optimizer, phase.num_steps).items():
                phase_rows.append((f"schedule of {name}", _corners(phase.first_scheduled, schedule)))
            for shape, step in steps.by_shape.items():
                phase_rows += _memory_rows(shape, step.call.memory_analysis())
            too_large = list(_answers([_Question("memory", steps.check_fits_memory, "the compiler")]))
            refusals += too_large
            console.log(table(f"phase '{phase.name}'", [*phase_rows, *too_large]))
    console.log(f"schedule: {_plot_schedule(plan)}")
    console.log(f"dry run complete: all training steps compile{_caveats(rows + refusals)}")
    refused = [answer for _, answer in rows + refusals if answer.startswith(_REFUSED)]
    if not all_processes(not refused):
        raise ConfigError("\n".join(dict.fromkeys(refused)) or "a start would end on another process; see its output")


def _caveats(rows: Sequence[tuple[str, str]]) -> str:
    """Says what qualifies that all training steps compile."""
    but, not_all = "", ". Not everything was checked"
    for prefix, says in ((_REFUSED, ", but a start would not get that far"), (_UNCHECKED, not_all)):
        names = list(dict.fromkeys(name for name, answer in rows if answer.startswith(prefix)))
        but += f"{says}: see {', '.join(names)} in the table" if names else ""
    return but


class _UncheckedError(Exception):
    """Says what was not checked, and why."""


class _Question(NamedTuple):
    """Something to ask in a thread.

    Attributes:
        name: of the row with the answer.
        ask: returns the answer, or None for no row. Raises `ConfigError` for what would end a start.
        whom: who answers.
    """

    name: str
    ask: Callable[[], str | None]
    whom: str


def _caches(plan: Plan) -> Iterator[tuple[str, str]]:
    sources = {source.folder: source for data in plan.data for source in data.corpus.sources}.values()
    splits = [(source, split) for source in sources for split in (TRAIN, VALIDATION) if source.has(split)]
    names = [f"token cache {f'{source.name} {split}'.strip()}" for source, split in splits]
    asks = [functools.partial(source.describe_cache, split) for source, split in splits]
    return _answers(list(map(_Question, names, asks, [str(source.store.url) for source, _ in splits])))


def _checks(plan: Plan) -> Iterator[_Question]:
    """Lists what a start checks, as far as that neither writes nor reads text."""
    config = plan.config
    for data in {id(data): data for data in plan.data}.values():
        yield _Question("tokenizer", data.corpus.check_tokenizer, f"the disk with {data.tokenizer}")
        for source in data.corpus.sources:
            check = functools.partial(source.check, caches=False)
            yield _Question(f"text of {source.key}", check, "what has the text")
    for evaluation in config.evals:
        yield _Question(f"evaluation {choice_name(type(evaluation))}", evaluation.check, "the disk")
    yield _Question("run", plan.checkpoints.check_free, "the disk")
    name = hf_name(config.initialize_from_hf, plan.data[0].tokenizer)
    if name is None:
        return
    if not Path(name).exists():
        yield _unchecked("weights", f"{name} is not on this disk")
    elif config.hf_weight_names:
        yield _unchecked("weights", "hf_weight_names gives them other names")
    else:
        options = ReadOptions(skip_keys=config.hf_skip_keys)
        num_tokens = plan.state_builder.Vocab.size - len(plan.data[0].added_tokens)
        check = functools.partial(check_pretrained, Path(name), num_tokens, options)
        yield _Question("weights", check, f"the disk with {name}")


def _agreed_checks(plan: Plan) -> Iterator[_Question]:
    """Lists what all processes of a start check together."""
    trainer = plan.config.trainer
    if plan.refs and bpe_config(plan.data[0].tokenizer) is not None:
        yield _unchecked("references", "whether they have the run's tokens, because a start trains its tokenizer")
    elif plan.refs:
        tokenizer = functools.partial(plan.data[0].corpus.load_tokenizer, log=lambda _: None)
        yield _Question("references", lambda: check_references(plan, tokenizer(), lambda _: None), "the disk")
    urls = [path for path in (trainer.checkpointer.base_path, *trainer.starts.values()) if is_url(path)]
    if urls:
        yield _unchecked("start", f"the checkpoints at {' and '.join(urls)}, which a start may download")
    else:
        yield _Question("start", functools.partial(check_init_from, plan), "the disk")


def _openings(plan: Plan) -> Iterator[_Question]:
    """Lists what a start opens on process 0. Rewards have time limits of their own: they may import large libraries."""

    def tokenizer() -> Tokenizer:
        if bpe_config(plan.data[0].tokenizer) is not None:
            raise _UncheckedError("whether it opens, because a start trains its tokenizer")
        return plan.data[0].corpus.load_tokenizer(log=lambda _: None)

    for data in {id(data): data for data in plan.data}.values():
        check = functools.partial(data.check_opens, tokenizer, dry=True)
        yield _Question(f"data {choice_name(type(data))}", check, "")
    for evaluation in plan.config.evals:
        check = functools.partial(evaluation.check_opens, tokenizer, plan.phases[0].model.seq_len, dry=True)
        yield _Question(f"evaluation {choice_name(type(evaluation))}", check, "")
    exports = plan.config.hf_save_path
    if exports is not None and not is_url(exports) and not is_url(plan.config.trainer.checkpointer.base_path):
        yield _Question("exports", functools.partial(check_exports_are_new, plan, 0), "the disk")


def _previews(plan: Plan, drawn: list[MaskPreview]) -> Iterator[_Question]:
    """Describes how the records on this machine are read, and the share of tokens that the loss is computed on, for chats
    and prompts. Adds these to `drawn`."""
    if bpe_config(plan.data[0].tokenizer) is not None:
        return

    def shares(source: NamedSource, seq_len: int) -> str | None:
        try:
            tokenizer = plan.data[0].corpus.load_tokenizer(log=lambda _: None)
            source.check(caches=False)
        except ConfigError:
            return None  # other rows say what is wrong with the tokenizer, or with the list of files
        preview = source.preview(tokenizer, seq_len)
        if preview is not None and preview.example:
            drawn.append(preview)
        parts = (preview and preview.describe(), source.describe_records(TRAIN, tokenizer))
        return "; ".join(filter(None, parts)) or None

    for source, seq_len in all_sources(plan.phases, plan.data):
        name = "trained tokens" if source.config.format.has_loss_mask else "records"
        yield _Question(f"{name} of {source.key}", functools.partial(shares, source, seq_len), "what has the text")


def _unchecked(name: str, what: str) -> _Question:
    return _Question(name, lambda: f"{_UNCHECKED}{what}", "")


def _answers(questions: Sequence[_Question]) -> Iterator[tuple[str, str]]:
    """The rows with the answers to questions that are asked at the same time."""
    answers: dict[int, str | None] = {}

    def ask(number: int, question: _Question) -> None:
        answers[number] = _answer(question)

    # A thread that is still waiting must not delay the end of the process.
    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in enumerate(questions)]
    for thread in threads:
        thread.start()
    waited_s, until = 0.0, time.monotonic() + _BUSY_S
    for number, (thread, question) in enumerate(zip(threads, questions, strict=True)):
        while thread.is_alive() and waited_s < _ANSWER_S and time.monotonic() < until:
            used_s = time.process_time()
            thread.join(_SLICE_S)
            # Else this process computes, or waits for a busy processor.
            if time.process_time() - used_s < _WORKING * _SLICE_S:
                waited_s += _SLICE_S
        answer = answers.get(number, f"{_UNCHECKED}{question.whom} has not answered for {_ANSWER_S:g} s")
        if answer is not None:
            yield question.name, answer


def _answers_in_turn(questions: Sequence[_Question]) -> Iterator[tuple[str, str]]:
    """The same for questions that are asked one after another, however long each takes."""
    for question in questions:
        if (answer := _answer(question)) is not None:
            yield question.name, answer


def _answer(question: _Question) -> str | None:
    try:
        return question.ask()
    except _UncheckedError as error:
        return f"{_UNCHECKED}{error}"
    except (ConfigError, OSError) as error:
        return bounded(f"{_REFUSED}{error}")
    except Exception as error:  # of your own classes too; a thread's traceback would be lost between the lines
        return bounded(f"{_REFUSED}{type(error).__name__}: {error}")


def _plot_schedule(plan: Plan) -> str:
    """Plots the schedule to the log folder, and returns its path or why it could not be written."""
    path = plan.log_folder / "schedule.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        schedule_curve(plan.phases, LoggedRun(plan.run_id, {}), path, f"{plan.run_id}: {plan.num_steps} steps")
    except OSError as error:
        return f"not plotted: {error}"
    return str(path)


def _memory_rows(shape: tuple[int, int], memory: Any) -> list[tuple[str, str]]:
    label = f"memory per device, {shape[0]} x {shape[1]} sequences:"
    if memory is None:
        return [(label, "unknown on this platform")]
    sizes = {"state and batch": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes}
    return [(f"{label} {part}", gib(size)) for part, size in sizes.items()]


def _corners(start: int, schedule: Schedule) -> str:
    texts = [f"step {start + step}: {name} at {rate:.3g}" for step, rate, name in schedule.corner_points()]
    if len(texts) > _MAX_CORNERS:
        texts = [*texts[: _MAX_CORNERS - 2], f"... {len(texts) - _MAX_CORNERS + 1} more", texts[-1]]
    return ", ".join(texts)
