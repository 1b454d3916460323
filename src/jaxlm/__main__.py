"""`python -m jaxlm`: which commands there are."""

import sys

import jaxlm

COMMANDS = {
    "train": "trains what a YAML file describes, and goes on where an earlier process stopped",
    "sample": "continues prompts with the model of a checkpoint or a Hugging Face folder",
    "evaluate": "its loss and bits per byte on any text, source by source",
    "convert": "writes a checkpoint as a folder for transformers, vLLM or PEFT",
    "prepare": "tokenizes ahead, and shows what is in a cache of tokens",
    "bench": "measures a configuration's step, here or on paper for a machine that is not here",
}


def main() -> int:
    """Prints the version and every command in a line."""
    print(f"jaxlm {jaxlm.__version__}\n")
    for name, meaning in COMMANDS.items():
        print(f"  python -m jaxlm.{name:10} {meaning}")
    print("\nEach says more with --help. First steps: python -m jaxlm.train --config_path config/quickstart.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
