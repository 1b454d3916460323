"""What the code of nanochat computes in the two revisions that the model covers, as fields of `NanoConfig`.

Source: karpathy/nanochat (`nanochat/gpt.py`): commit b7629ef of February 2026, and revision 92d63d4 of July 2026.
"""

from typing import Any

from jaxlm.models.rope import DefaultRotary

FEBRUARY_2026: dict[str, Any] = {
    "short_window_fraction": 0.5,
    "short_window_multiple": None,
    "rope": DefaultRotary(theta=10_000.0),
    "qk_scale": 1.0,
    "value_gate_channels": 32,
    "value_gate_scale": 2.0,
    "smear_channels": 0,
    "backout": None,
}
JULY_2026: dict[str, Any] = {
    "short_window_fraction": 0.25,
    "short_window_multiple": 128,
    "rope": DefaultRotary(theta=100_000.0),
    "qk_scale": 1.2,
    "value_gate_channels": 12,
    "value_gate_scale": 3.0,
    "smear_channels": 24,
    "backout": 0.2,
}
