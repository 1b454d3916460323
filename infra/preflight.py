"""Checks a run's configuration on this machine before a launcher starts others, with `python -m jaxlm.session.preflight`."""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from attempts import config_path

SOURCE = Path(__file__).resolve().parents[1] / "src"
SKIP = "To start without this check: --no_check"


def check_configuration(arguments: Sequence[str], *, devices: int, platform: str, slices: int = 1) -> int:
    """Returns 0, or the exit code to end with. Prints to stderr what is wrong, or why it was not checked.

    Args:
        arguments: of `jaxlm train`.
        devices: of the whole run; 0 if unknown, which checks the keys alone.
        platform: gpu or tpu.
        slices: groups of devices with fast links between them.
    """
    path = config_path(arguments)
    reason = None
    if path is not None and not path.startswith("jaxlm:") and not Path(path).is_file():
        reason = f"{path} is not on this machine"
    elif importlib.util.find_spec("jax") is None:
        reason = f"{sys.executable} has no jax. Start this program with the Python that jaxlm is installed for"
    if reason is not None:
        print(f"infra: the configuration is not checked before the start: {reason}", file=sys.stderr, flush=True)
        return 0
    what = ["--devices", str(devices), "--slices", str(slices), "--platform", platform]
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "jaxlm.session.preflight", *what, "--", *arguments]
    code = subprocess.run(command, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": paths}).returncode
    if code:
        print(f"infra: nothing was started. {SKIP}", file=sys.stderr, flush=True)
    return code


def main() -> int:
    """For launchers that are shell scripts: `python infra/preflight.py --devices 8 --slices 2 -- ARGUMENTS`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    return check_configuration(options.arguments[1:], devices=options.devices, slices=options.slices, platform="gpu")


if __name__ == "__main__":
    sys.exit(main())
