"""What every other part stands on and what knows none of them."""

from jaxlm.core.collector import resting

with resting():  # the two that bring the most with them; every part of jaxlm needs both
    import haliax as haliax
    import optax as optax

    from jaxlm.core import compat as compat  # must run before anything uses haliax
