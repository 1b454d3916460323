"""Converts a checkpoint to a folder for transformers, vLLM or PEFT.

jaxlm convert to-hf --checkpoint checkpoints/mine --output_dir mine-hf --dtype bfloat16 --verify true
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import location_of
from jaxlm.interop.hf.folder import DTYPES, parse_dtype
from jaxlm.interop.hf.verify import verify_folder
from jaxlm.run.exit_codes import command
from jaxlm.run.export import export_model
from jaxlm.run.load_model import add_checkpoint_options, open_checkpoint
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.lora import save_peft


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse_args(arguments)
    trained = open_checkpoint(options.checkpoint)
    plan, folder = trained.plan, location_of(options.output_dir)
    if options.verify == "true" and not isinstance(folder, Path):
        raise ConfigError(f"--verify: true given, but {folder} is a URL. Verify a local folder, and copy it there")
    dtype = plan.precision.params if options.dtype is None else parse_dtype(options.dtype, "--dtype")
    with plan.layout.use():
        model = trained.load_model(options.weights)
        if options.adapters == "only":
            base = str(plan.config.initialize_from_hf)
            save_peft(folder, model, plan.config.model, plan.layout, dtype=dtype, base=base)
            print(f"wrote the adapters of {trained.checkpoint.location} to {folder}")
            return 0
        model = merge_surgeries(model, trained.surgeries)
        export_model(folder, model, plan, trained.tokenizer, dtype)
        print(f"wrote {trained.checkpoint.location} to {folder} as {jax.numpy.dtype(dtype).name}")
        if options.verify == "true" and isinstance(folder, Path):
            print(verify_folder(folder, model, plan.config.model, plan.layout))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxlm convert", description="Exports a trained model to another format.")
    to_hf = parser.add_subparsers(dest="direction", metavar="to-hf", required=True).add_parser(
        "to-hf", help="write a folder for transformers and vLLM or, with --adapters only, for PEFT"
    )
    add_checkpoint_options(to_hf)
    to_hf.add_argument("--output_dir", required=True, help="folder or URL to create; it must not exist")
    to_hf.add_argument("--dtype", default=None, help=f"dtype of the weights: {', '.join(DTYPES)} (default: as trained)")
    to_hf.add_argument(
        "--verify",
        choices=("true", "false"),
        default="false",
        help="load the written folder again and compare its logits and tokens with the checkpoint's (default false)",
    )
    to_hf.add_argument(
        "--adapters",
        choices=("merge", "only"),
        default="merge",
        help="merge LoRA adapters into the weights, or write only the adapters (default merge)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
