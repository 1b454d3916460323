"""Telemetry: running means, spikes and plateaus of the loss and the gradient norm, computed in the step."""
