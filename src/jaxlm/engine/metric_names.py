"""Names of the metrics of a training step, as in `metrics.jsonl`, for those who write and those who read them. Needs no jax.

`core/guards.py` names those that decide whether an update is skipped. The metric `x` of an objective is `train/x`, that of an
evaluation `eval/x`.
"""

from jaxlm.core.guards import EVAL_PREFIX as EVAL_PREFIX

TRAIN_LOSS = "train/loss"
"""Mean over the targets of the batch, in nats."""

SMOOTHED_LOSS = "train/smoothed_loss"
"""Moving average of `train/loss` over all steps so far (decay 0.9, without bias towards zero), also of earlier starts."""

EVAL_LOSS = "eval/loss"
"""Mean over the targets of the validation data, in nats per token."""
EVAL_BPB = "eval/bpb"
"""Bits per byte of the validation text."""
BEST_BPB = "eval/best_bpb"
"""The lowest `eval/bpb` of the run so far, also of earlier starts."""
EVAL_CORE = "eval/core"
"""The CORE metric. Each of its tasks has `eval/core/<task>`, centered, and `eval/core/<task>/accuracy`."""

LEARNING_RATE = "optim/learning_rate"
"""Of the update that the step made. That of a parameter group is `optim/learning_rate/<name>`."""

GLOBAL_STEP = "global_step"
"""Steps done, with this one."""
PROGRESS = "run_progress"
"""`global_step` as a fraction of the steps of the whole run."""

TOTAL_TOKENS = "throughput/total_tokens"
"""Tokens trained on since the start of the run, with padding."""
TOTAL_GFLOPS = "throughput/total_gflops"
"""Model FLOPs since the start of the run, in units of 1e9."""

DURATION = "throughput/duration"
"""Seconds of the step. Only records of training steps have it, not those of evaluations."""
TRAINING_TIME = "throughput/training_time"
"""Seconds of all steps so far, also of earlier starts, without evaluations, saves and compiling."""
LOADING_TIME = "throughput/loading_time"
"""Seconds that the host waited for the batch."""
HOOK_TIME = "throughput/hook_time"
"""Seconds of evaluations and saves before the step; they are not in its duration."""

EXAMPLES_PER_SECOND = "throughput/examples_per_second"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
GFLOPS_PER_SECOND = "throughput/gflops_per_second"
MFU = "throughput/mfu"
"""Model FLOP/s as a fraction of the peak of all devices. Missing if the peak is not known."""

GOODPUT = "throughput/goodput"
"""Share of the run's wall time, since its first start, in which training made progress that is kept."""
RESUMED_FROM = "throughput/resumed_from"
"""Steps of the checkpoint that the process resumed from. Only its first training record has it."""
