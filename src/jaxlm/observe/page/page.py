"""Writes the page of one or several runs: one HTML file that needs no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.redaction import write_text
from jaxlm.core.safe_io import atomic_file
from jaxlm.observe.logged_run import LoggedRun
from jaxlm.observe.page.charts import charts
from jaxlm.observe.page.sections import (
    completions,
    config_values,
    core_table,
    decisions,
    differences,
    goodput,
    layers,
    needles,
    phases,
    report_card,
    samples,
    skipped,
)

_TEMPLATE = "page.html.j2"


def write_page(runs: Sequence[LoggedRun], path: Path, price_per_hour: float | None = None) -> None:
    """Writes the page of some runs, atomically.

    Args:
        price_per_hour: of the machines of each run together, for the report card; None shows no cost.

    Raises:
        OSError: the file cannot be written.
    """
    text = render(runs, price_per_hour)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as unfinished:
        write_text(unfinished, text)


def render(runs: Sequence[LoggedRun], price_per_hour: float | None = None) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Texts of samples, configurations and logs are not to be trusted.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(**_content(runs, price_per_hour))


def _content(runs: Sequence[LoggedRun], price_per_hour: float | None) -> Mapping[str, Any]:
    shown = charts(runs)
    several = len(runs) > 1
    shown_samples, num_prompts_left_out = samples(runs)
    configs = [config_values(run.config) for run in runs]
    environments = [run.environment for run in runs]
    return {
        "runs": runs,
        "title": ", ".join(run.name for run in runs),
        "report_card": report_card(runs, price_per_hour),
        "core": core_table(runs),
        "needles": needles(runs),
        "unread": [(run.name, sentence) for run in runs for sentence in run.unread],
        **shown._asdict(),
        "figures": {f"chart-{n}": chart.figure for n, chart in enumerate((*shown.main, *shown.further))},
        "goodput": [(run.name, goodput(run.goodput)) for run in runs if run.goodput],
        "skipped": skipped(runs),
        "decisions": decisions(runs),
        "layers": layers(runs),
        "phases": phases(runs),
        "samples": shown_samples,
        "num_prompts_left_out": num_prompts_left_out,
        "completions": completions(runs),
        "config_differences": differences(configs, runs) if several else None,
        "environment_differences": differences(environments, runs) if several else None,
    }
