"""A program around jaxlm's training: `python -m acme_lm.program --config_path run.yaml --greeting hi`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxlm.plan.load_config import load_config
from jaxlm.plan.run_config import RunConfig
from jaxlm.session.exit_codes import command
from jaxlm.train import train


@dataclass(frozen=True)
class AcmeConfig(RunConfig):
    """A run, and the keys that this program adds.

    Attributes:
        greeting: printed first.
    """

    greeting: str = "hello"


@command
def main(arguments: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    config = load_config(arguments, "acme_lm.program", AcmeConfig)
    print(config.greeting)
    train(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
