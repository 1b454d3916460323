"""Writes tables and pictures of a run's model beside its references, for a paper.

    jaxlm tables --config_path run.yaml
    jaxlm tables --config_path run.yaml --checkpoint checkpoints/run/step-500 --output_dir paper/tables
    jaxlm tables --config_path run.yaml --tables '[{type: latency, prompt_tokens: [128]}]'

The configuration is that of the run. Its section `tables` says what to measure, and `refs` which models besides the run's.
The newest checkpoint of the run is read, with the configuration that it was saved with.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxlm.core.errors import ConfigError, Parser
from jaxlm.core.publish import location_of
from jaxlm.core.runtime import configure_jax, is_main_process
from jaxlm.core.stores import AT_START_S, retried
from jaxlm.engine.peers import connect_if_it_fails, watch_peers
from jaxlm.optim.averaging import AS_TRAINED
from jaxlm.plan.load_config import given_distributed, load_config, refuse_dry_run, run_id_of
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.reading.overrides import parse_arguments
from jaxlm.session.compilation.options import enable_compilation_cache
from jaxlm.session.dry_run import assumed_vocabulary
from jaxlm.session.exit_codes import command
from jaxlm.session.load_model import open_model, placing_keys
from jaxlm.session.tables import FOLDER, TableModels, check_run_tables, default_folder, write_tables


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options, rest = _parser().parse_known_args(arguments)
    connect_if_it_fails(lambda: given_distributed(rest))
    config = load_config(rest, "jaxlm tables")
    refuse_dry_run(config, "jaxlm tables measures models")
    if not config.tables:
        raise ConfigError(
            "tables: empty, so there is nothing to measure. Set it, for example tables: [{type: perplexity}, {type: latency}]"
        )
    configure_jax(config.trainer.jax_config)
    config.trainer.distributed.join()
    watch_peers(config.trainer.distributed.heartbeat_timeout.total_seconds())
    plan = make_plan(config, run_id_of(config), assumed_vocabulary(config)[0])
    check_run_tables(plan, _log)
    enable_compilation_cache(config.trainer.compilation_cache_dir)
    keys = placing_keys(parse_arguments(rest).options)
    trained = open_model(options.checkpoint or _checkpoints(plan), keys, weights=options.weights)
    if trained.step is None:
        raise ConfigError(
            f"--checkpoint: {trained.location} is a Hugging Face model, but a checkpoint of the run expected. To compare the"
            f" model with the run's, name it in the configuration: refs: {{name: {{type: hf, path: {trained.location}}}}}"
        )
    folder = default_folder(plan) if options.output_dir is None else location_of(options.output_dir)
    write_tables(TableModels(plan.run_id, trained, plan.refs), config.tables, folder, _log)
    return 0


def _checkpoints(plan: Plan) -> str:
    """The location of the run's checkpoints, of which there are some."""
    folder = plan.checkpoints
    if not retried(folder.checkpoints, AT_START_S):
        raise ConfigError(
            f"{folder.location} has no checkpoint of this run. Train it first (jaxlm train), set trainer.id to the name of"
            " another run, or give --checkpoint"
        )
    return str(folder.location)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "jaxlm tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options are keys of the configuration, as for jaxlm train.",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", help="a checkpoint, or a folder of checkpoints (default: the run's newest)")
    parser.add_argument(
        "--weights", default=AS_TRAINED, help="`trained` (default), or `ema` for the average of trainer.model_averaging"
    )
    parser.add_argument(
        "--output_dir", help=f"folder or URL to write to (default: {FOLDER} in the run's log folder, or at its URL)"
    )
    return parser


def _log(line: str) -> None:
    if is_main_process():
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
