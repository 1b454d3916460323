"""`python -m jaxlm.session.preflight`: checks a configuration where its devices are not, before a launcher starts machines.

It makes the plan for devices that it only describes: keys, sizes, mesh, batches and schedules. It opens no device, compiles
nothing and reads no data. What only the machines can tell is left to `jaxlm train --dry_run true` there.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import load_config, run_id_of
from jaxlm.plan.num_steps import check_num_steps
from jaxlm.plan.plan import make_plan
from jaxlm.session.dry_run import assumed_vocabulary
from jaxlm.session.exit_codes import command


@dataclass(frozen=True)
class AbsentDevice:
    """A device of a machine that does not exist yet, as far as a plan asks. Attributes: as those of `jax.Device`."""

    id: int
    process_index: int
    slice_index: int
    platform: str
    device_kind: str = "absent"


def absent_devices(count: int, slices: int, platform: str) -> list[AbsentDevice]:
    """Devices in slices of the same size, each slice one process."""
    size = count // slices
    return [AbsentDevice(number, number // size, number // size, platform) for number in range(count)]


@command
def main(arguments: Sequence[str]) -> int:
    """The command. Returns the exit code: 0, or 2 after a message."""
    parser = argparse.ArgumentParser(prog="python -m jaxlm.session.preflight", description=__doc__)
    parser.add_argument("--devices", type=int, required=True, help="number of devices of the run; 0 if unknown")
    parser.add_argument("--slices", type=int, default=1, help="number of TPU slices, or of machines with GPUs")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of jaxlm train, after --")
    options = parser.parse_args(list(arguments))
    train = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    jax.config.update("jax_platforms", "cpu")  # this machine's accelerator may be in use, or none of the run's
    config = load_config(train, "jaxlm.train")
    check_num_steps(config)
    if not options.devices:
        print("configuration: the keys are valid. No plan was made: the number of devices is not known here")
        return 0
    if options.slices < 1 or options.devices < 0 or options.devices % options.slices:
        raise ConfigError(
            f"--devices: {options.devices} with --slices: {options.slices} given, a positive multiple of the slices expected"
        )
    devices = absent_devices(options.devices, options.slices, options.platform)
    plan = make_plan(config, run_id_of(config), assumed_vocabulary(config)[0], devices)
    print(f"the configuration is valid for {options.devices} devices, mesh {plan.mesh}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
