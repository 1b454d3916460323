"""Names of the metrics of `optimizer.telemetry`, which controllers read.

Each is a float32 scalar of every step. docs/design/0033 says what they mean.
"""

TELEMETRY = "telemetry"
"""Name of the guard that measures them, and of its slot."""
LOSS = "telemetry/loss"
LOSS_REFERENCE = "telemetry/loss_reference"
LOSS_SCORE = "telemetry/loss_score"
GRAD_NORM_SCORE = "telemetry/grad_norm_score"
GRAD_NORM_RATIO = "telemetry/grad_norm_ratio"
IS_SPIKE = "telemetry/is_spike"
NUM_SPIKES = "telemetry/num_spikes"
IS_PLATEAU = "telemetry/is_plateau"
SLOPE = "telemetry/slope"
LAYER_RATIO = "telemetry/layer_ratio"
UPDATE_RATIO = "telemetry/update_ratio"
