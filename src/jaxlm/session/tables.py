"""Measures the tables of a run, its model beside its references, and writes them as CSV, LaTeX and pictures."""

import contextlib
import csv
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.core.precision import Precision
from jaxlm.core.publish import Location, PublishError, child_of, location_of
from jaxlm.core.redaction import write_text
from jaxlm.core.runtime import all_processes, from_main, main_first, main_only
from jaxlm.core.safe_io import atomic_file, parse_json, read_bytes, read_text
from jaxlm.core.stores import open_store, put_folder, storage_errors
from jaxlm.data.base import Log
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.state import RunState
from jaxlm.evals.base import ValidationSet
from jaxlm.evals.tables import Column, Picture, Row, Subject, Table, TableConfig, check_tables, file_name
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.next_token import score_batch
from jaxlm.plan.plan import Plan
from jaxlm.plan.refs.base import Ref
from jaxlm.reading.decode import encode
from jaxlm.session.load_model import LoadedModel
from jaxlm.session.references import check_reference
from jaxlm.session.verification import validation_sets

_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def write_table(table: Table, folder: Path) -> list[str]:
    """Writes the files of a table, and returns their names."""
    with (folder / f"{table.name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [column.name for column in table.columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.rows)
    write_text(folder / f"{table.name}.tex", latex(table))
    names = [f"{table.name}.csv", f"{table.name}.tex"]
    if table.picture is not None:
        names.append(f"{table.name}{table.picture.suffix}.png")
        _draw(table, table.picture, folder / names[-1])
    return names


def latex(table: Table) -> str:
    """A `table` environment with rules of the package booktabs. It is for `\\input`."""
    is_text = [any(isinstance(row[column.name], str) for row in table.rows) for column in table.columns]
    lines = [" & ".join(_escaped(column.title) for column in table.columns)]
    lines += [" & ".join(_cell(row[column.name], column) for column in table.columns) for row in table.rows]
    head, *body = (rf"    {line} \\" for line in lines)
    return "\n".join(
        (
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_escaped(table.caption)}}}",
            rf"  \label{{tab:{table.name}}}",
            rf"  \begin{{tabular}}{{{''.join('l' if text else 'r' for text in is_text)}}}",
            r"    \toprule",
            head,
            r"    \midrule",
            *body,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        )
    )


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return "--"
    if isinstance(value, str):
        return _escaped(value)
    return r"$\infty$" if value == math.inf else format(value, column.spec)


def _escaped(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _draw(table: Table, picture: Picture, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(picture.y), 4.2), dpi=120, layout="constrained")
    columns = {column.name: column for column in table.columns}
    for name, axes in zip(picture.y, figure.subplots(1, len(picture.y), squeeze=False)[0], strict=True):
        for label, style, points in _lines(table, picture, name):
            axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
        lengths = sorted({value for row in table.rows if isinstance(value := row[picture.x], int)})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length}" for length in lengths])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel=columns[picture.x].meaning, ylabel=columns[name].title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    with path.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)


def _lines(table: Table, picture: Picture, y: str) -> Iterator[tuple[str, dict[str, Any], list[tuple[Any, Any]]]]:
    """Label, style and points of each line. A model has one color."""
    varying = [name for name in picture.lines if len({row[name] for row in table.rows}) > 1]
    models = list(dict.fromkeys(row["model"] for row in table.rows))
    keys = list(dict.fromkeys(tuple(row[name] for name in varying) for row in table.rows))
    titles = {column.name: column.title for column in table.columns}
    for number, model in enumerate(models):
        for key, style in zip(keys, itertools.cycle(_STYLES)):
            of = {"model": model, **dict(zip(varying, key, strict=True))}
            rows = [row for row in table.rows if all(row[name] == value for name, value in of.items())]
            points = [(row[picture.x], row[y]) for row in rows if isinstance(row[y], int | float)]
            if points := sorted(point for point in points if math.isfinite(point[1])):
                label = ", ".join([str(model), *(f"{titles[n]} {v}" for n, v in zip(varying, key, strict=True))])
                yield label, {"color": f"C{number % 10}", **style}, points


_STYLES = [{"linestyle": line, "marker": marker} for line, marker in (("-", "o"), ("--", "s"), (":", "^"), ("-.", "d"))]


FOLDER = "tables"
"""The folder of the tables, in the run's log folder."""
ABOUT = "tables.json"
"""Says what the tables show. It is written last."""


@dataclass(frozen=True)
class TableModels:
    """The models of the tables.

    Attributes:
        name: of the run's model.
        trained: the run's model.
        refs: the others, by name.
    """

    name: str
    trained: LoadedModel
    refs: Mapping[str, Ref]

    def check(self, tables: Sequence[TableConfig], log: Log) -> None:
        """Raises `ConfigError` if the models do not go together, or the tables do not suit them. Reads no weights."""
        trained, plan = self.trained, self.trained.plan
        check_names(self.name, self.refs)
        for name, ref in self.refs.items():
            abstract = ref.abstract(plan.state_builder.Vocab)
            check_reference(f"refs.{name}", ref, abstract, trained.tokenizer, plan.layout, 0, log)
        check_tables(tables, self.seq_lens, has_validation=trained.data.has_validation)

    @property
    def seq_lens(self) -> dict[str, int]:
        """Name of each model -> tokens that it can read."""
        return {self.name: self.trained.model.seq_len} | {n: r.model_config().seq_len for n, r in self.refs.items()}

    def opened(self, log: Log) -> Iterator[tuple[str, Precision, LanguageModel]]:
        """Name, dtypes and weights of each model, one after another: two need not be in memory together."""
        yield self.name, self.trained.plan.precision, self.trained.for_inference()
        plan = self.trained.plan
        for name, ref in self.refs.items():
            yield name, ref.precision, ref.load(plan.state_builder.Vocab, plan.layout, log)

    def about(self, tables: Sequence[TableConfig]) -> dict[str, Any]:
        """Describes what the tables show. Plain JSON."""
        trained = self.trained
        return {
            "models": {
                self.name: {"path": str(trained.location), "step": trained.step},
                **{name: {"path": ref.location, "dtype": ref.config.dtype} for name, ref in self.refs.items()},
            },
            "tables": [encode(table) for table in tables],
            "devices": [jax.devices()[0].device_kind, jax.device_count()],
            "columns": {file_name(t): {column.name: column.meaning for column in t.columns} for t in tables},
        }


def check_names(name: str, refs: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if a reference is called like the run. Args: name: of the run."""
    if name in refs:
        raise ConfigError(
            f"refs.{name}: the run is called '{name}' too, so their rows in the tables could not be told apart. Rename one:"
            " trainer.id is the name of the run"
        )


def check_run_tables(plan: Plan, log: Log) -> None:
    """Raises `ConfigError` if the tables of a run could not be measured after its last phase. Reads no weights. All processes
    must call it.

    A run may go on without a reference that only its past phases read. It warns that the tables will lack it.
    """
    tables = plan.config.tables
    if not tables:
        return
    check_names(plan.run_id, plan.refs)
    readable, missing = _readable({name: plan.refs[name] for name in plan.retired_refs})
    for name, reason in missing.items():
        log(f"warning: the tables will lack refs.{name}, which cannot be read: {reason}")
    seq_lens = {name: ref.model_config().seq_len for name, ref in {**plan.active_refs, **readable}.items()}
    seq_lens[plan.run_id] = plan.phases[-1].model.seq_len
    data = plan.data[-1]
    check_tables(tables, seq_lens, has_validation=data.has_validation)
    spec = data.batch_spec(seq_lens[plan.run_id])
    batch = spec.make(**dict.fromkeys(spec.columns))
    if any(table.reads_validation for table in tables) and not hasattr(batch, "supervised"):
        raise ConfigError(
            f"tables: type perplexity reads `supervised()` of a batch, which {type(batch).__name__} does not define. Remove"
            " the table, or end the run with a phase whose data.type is tokens"
        )


def _readable(refs: Mapping[str, Ref]) -> tuple[dict[str, Ref], dict[str, str]]:
    """The references that all processes can still find, and why the others cannot be read, by name."""
    readable: dict[str, Ref] = {}
    missing: dict[str, str] = {}
    for name, ref in refs.items():
        again, reason = ref.config.open(ref.key), ""  # the reference itself remembers what it has read
        try:
            again.model_config()
        except (ConfigError, PeerError, OSError) as error:
            reason = str(error)
        if all_processes(not reason):
            readable[name] = ref
        else:
            missing[name] = reason or "another process does not find it"
    return readable, missing


def measure_tables(models: TableModels, tables: Sequence[TableConfig], log: Log) -> list[Table]:
    """Measures all models. All processes must call it."""
    plan = models.trained.plan
    rows: list[list[Row]] = [[] for _ in tables]
    max_tokens = min(models.seq_lens.values())
    with plan.layout.use():
        for name, precision, model in models.opened(log):
            validation = _validation(models.trained, log)
            subject = Subject(name, model, precision, plan.layout, max_tokens, validation, score_batch, log)
            for table, measured in zip(tables, rows, strict=True):
                log(f"tables: measuring {file_name(table)} of {name} ...")
                measured += table.rows(subject)
            del model, subject  # the next one may need the memory
    return [
        Table(file_name(table), table.caption, table.columns, tuple(measured), table.picture)
        for table, measured in zip(tables, rows, strict=True)
    ]


def write_tables(models: TableModels, tables: Sequence[TableConfig], folder: Location, log: Log) -> None:
    """Measures and writes. All processes must call it; process 0 writes.

    Raises:
        ConfigError: the tables do not suit the models or the data, or a model cannot be read.
        PublishError: the files cannot be written.
    """
    models.check(tables, log)
    measured = measure_tables(models, tables, log)
    about = models.about(tables)
    main_only(lambda: _write(measured, about, folder))
    log(f"tables: {folder}")


def tables_after_training(plan: Plan, state: RunState, tokenizer: Tokenizer, checkpoint: Location, log: Log) -> None:
    """Writes the tables of a run that has trained to its end, unless they are there. References that are gone are left out.
    All processes must call it.

    The run is complete, so a failure is logged, and ends nothing. With several processes, an unexpected one ends all: it may
    be that of one process, which the others would wait for.
    """
    config, phase, data = plan.config, plan.phases[-1], plan.data[-1]
    if not config.tables:
        return
    trained = LoadedModel(
        checkpoint,
        lambda: tokenizer,
        plan,
        phase.model,
        plan.state_builder.surgeries_until(phase),
        data,
        plan.num_steps,
        load=lambda: state.model,
        adds_bos=data.corpus.prompt_bos,
        eval_batch=plan.batches.eval_of(phase),
    )
    models, folder = TableModels(plan.run_id, trained, plan.refs), plan.log_folder / FOLDER
    try:
        if _are_written(models, config.tables, folder, log):
            return
        refs, missing = _readable(plan.refs)
        for name, reason in missing.items():
            log(f"warning: the tables lack refs.{name}, which cannot be read: {reason}. Write them again: jaxlm tables")
        models = replace(models, refs=refs)
        if missing and _are_written(models, config.tables, folder, log):
            return
        write_tables(models, config.tables, folder, log)
    except Exception as error:
        if jax.process_count() > 1 and not isinstance(error, ConfigError | PeerError | PublishError):
            raise
        log(f"warning: no tables ({type(error).__name__}: {error}). The run is complete. Write them with jaxlm tables")


def _are_written(models: TableModels, tables: Sequence[TableConfig], folder: Path, log: Log) -> bool:
    """Tells whether the tables of exactly these models are there."""
    about = models.about(tables)

    def found() -> bool:
        with contextlib.suppress(OSError, ValueError):
            return parse_json(read_text(folder / ABOUT)) == about
        return False

    if are_written := from_main(found):
        log(f"tables: {folder}, written before")
    return are_written


def _validation(trained: LoadedModel, log: Log) -> Callable[[int], list[ValidationSet]]:
    tokenizer = trained.tokenizer

    def opened(seq_len: int) -> list[ValidationSet]:
        opened = main_first(lambda: trained.data.open_validation(tokenizer, seq_len, log))
        return [*validation_sets(opened, batch_size=trained.eval_batch, layout=trained.plan.layout, max_batches=None)]

    return opened


def _write(tables: Sequence[Table], about: Mapping[str, Any], folder: Location) -> None:
    """Writes the files of all tables. Each is complete or absent, and those of earlier tables are replaced."""
    with tempfile.TemporaryDirectory(prefix="jaxlm-") as name:
        unfinished = Path(name)
        try:
            for table in tables:
                write_table(table, unfinished)
            write_text(unfinished / ABOUT, json.dumps(about, indent=1))
            if isinstance(folder, Path):
                folder.mkdir(parents=True, exist_ok=True)
                for path in sorted(unfinished.iterdir(), key=lambda path: path.name == ABOUT):
                    with atomic_file(folder / path.name) as copy:
                        copy.write_bytes(read_bytes(path))
        except OSError as error:
            raise PublishError(
                f"cannot write {folder} ({error}). Free up disk space, or choose a writable folder"
            ) from error
        except Exception as error:  # of matplotlib: all processes must hear of it
            raise PublishError(f"cannot draw the tables for {folder} ({type(error).__name__}: {error})") from error
        if isinstance(folder, str):
            fs, root = open_store(folder, folder)
            with storage_errors(lambda reason: PublishError(f"cannot upload to {folder} ({reason})"), local=unfinished):
                put_folder(fs, unfinished, root, ABOUT)


def default_folder(plan: Plan) -> Location:
    """Returns where `jaxlm tables` writes those of a run."""
    return child_of(plan.log_folder if plan.log_url is None else location_of(plan.log_url), FOLDER)
