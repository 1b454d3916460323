"""Keys of Levanter are known to the check that needs no jax."""

from pathlib import Path

import yaml

from jaxlm.reading.outline import unknown_keys
from tests.compat.levanter.test_levanter_published import NOT_PLANNED, PLANNED, published

VECTORS = Path(__file__).parents[2] / "vectors"


def test_keys_of_levanter_are_known():
    spellings = yaml.safe_load((VECTORS / "levanter_spellings.yaml").read_text())
    trees = {name: case["levanter"] for name, case in spellings.items()}
    trees |= {name: published(name) for name in [*PLANNED, *NOT_PLANNED]}
    assert not {name: places for name, tree in trees.items() if (places := list(unknown_keys(tree)))}
