"""Reading compiled programs."""

from collections import Counter

from jaxlm.hardware.hlo import Collective, Program


def collectives(hlo: str) -> Counter[Collective]:
    """Counts each collective in the text of a compiled program. Loop bodies count once."""
    instructions = (i for computation in Program.parse(hlo).computations.values() for i in computation.values())
    return Counter(collective for instruction in instructions for collective in instruction.collectives())
