"""Writes an HTML page with the curves, samples and settings of one or several runs.

    jaxlm report mine
    jaxlm report logs/mine gs://bucket/logs/other --output_path page.html
    jaxlm report mine --price_per_hour 24

A run is the folder or URL of its logs, or its id below ./logs. It may still be running: write the page again to see more. The
page of one run goes to its log folder, another one to this folder.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxlm.core.errors import EXIT_CONFIG, ConfigError, Parser
from jaxlm.core.stores import is_url
from jaxlm.observe.logged_run import local_folder, read_runs
from jaxlm.observe.page.page import write_page
from jaxlm.observe.records import REPORT_PAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. It needs no jax."""
    options = _parser().parse_args(arguments)
    try:
        print(_write(options.runs, options.output_path, options.price_per_hour))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def _write(locations: Sequence[str], output_path: Path | None, price_per_hour: float | None) -> Path:
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise ConfigError(f"--price_per_hour: {price_per_hour} given, a finite number of 0 or more expected")
    runs = read_runs(locations)
    for run in runs:
        for sentence in run.unread:
            print(f"warning: {run.name}: {sentence}", file=sys.stderr)
    is_one_folder = len(locations) == 1 and not is_url(locations[0])
    path = output_path or (local_folder(locations[0]) / REPORT_PAGE if is_one_folder else Path(REPORT_PAGE))
    try:
        write_page(runs, path, price_per_hour)
    except OSError as error:
        raise ConfigError(
            f"--output_path: {path} cannot be written ({error.strerror}). Give a file in a writable folder"
        ) from error
    return path


def _parser() -> argparse.ArgumentParser:
    parser = Parser("jaxlm report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="log folder, its URL, or a run's id below ./logs")
    price = "price of all machines of a run together, to show what each run cost"
    parser.add_argument("--price_per_hour", type=float, help=price)
    parser.add_argument("--output_path", type=Path, help=f"the file to write; by default {REPORT_PAGE}, see above")
    return parser


if __name__ == "__main__":
    sys.exit(main())
