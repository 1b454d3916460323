"""What TRL computes of fixed likelihoods: its losses of pairs and of groups and their gradients, with its own trainers.

    python -m tests.objectives.trl_losses > tests/vectors/trl_losses.json

Needs torch and trl. `test_trl_vectors.py` compares ours with the file, without either.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import nanstd

NUM_PAIRS, NUM_GROUPS, SIZE, LENGTH = 6, 2, 4, 8
BETA, SEED, UNIT = 0.3, 16, 64  # numbers are multiples of 1 / 64, so that sums are exact in float32 too
ENTROPY_FACTORS = (0.5, 1.5, 0.75, 0.9, 0.5, 2.0, 3.0, 2.0)
ONE_PROCESS = SimpleNamespace(
    sync_gradients=True,
    device="cpu",
    num_processes=1,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    pad_across_processes=lambda x, dim, pad_index: x,
)


def inputs() -> dict[str, dict[str, Any]]:
    """Likelihoods, masks and rewards, by kind of batch and name."""
    rng = np.random.default_rng(SEED)

    def multiples(low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(round(low * UNIT), round(high * UNIT), shape) / UNIT

    pairs, groups = (NUM_PAIRS, 2, LENGTH), (NUM_GROUPS, SIZE, LENGTH)
    starts, lengths = rng.integers(0, 3, pairs[:-1]), rng.integers(2, 6, pairs[:-1])
    at = np.arange(LENGTH)
    of_pairs = (at >= starts[..., None]) & (at < (starts + lengths)[..., None])
    of_groups = at < rng.integers(3, LENGTH + 1, groups[:-1])[..., None]
    policy = multiples(-1.5, -0.1, groups)
    entropy = rng.permutation(np.prod(groups)).reshape(groups) / UNIT  # no two are equal
    return {
        "pairs": {
            "mask": of_pairs.astype(float),
            "policy": multiples(-1.5, -0.1, pairs) * of_pairs,
            "reference": multiples(-1.5, -0.1, pairs) * of_pairs,
            "collision": multiples(0.1, 2.0, pairs) * of_pairs,
        },
        "groups": {
            "mask": of_groups.astype(float),
            "policy": policy * of_groups,
            "old": (policy + multiples(-0.5, 0.5, groups)) * of_groups,
            "reference": (policy + multiples(-0.5, 0.5, groups)) * of_groups,
            "entropy": entropy * of_groups,
            "rewards": multiples(-1, 2, groups[:-1]),
            **of_several_rewards(groups[:-1]),
        },
    }


def of_several_rewards(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Which responses have ended, and three rewards of each: one of large numbers, one that is the same for a group, and one
    that does not apply to some. None applies to the last response."""
    rng = np.random.default_rng(SEED + 1)
    parts = np.stack(
        [rng.integers(0, 9, shape) * 8.0, rng.integers(0, 3, shape) / 4, rng.integers(0, 5, shape) / 8], -1
    )
    parts[0, :, 1] = 0.5
    parts[0, 1, 2] = parts[1, 0, 2] = parts[1, 2, 2] = np.nan
    parts[-1, -1] = np.nan
    finished = np.ones(shape)
    finished[0, 2] = finished[1, 0] = 0
    return {"parts": parts, "finished": finished}


def tensor(array: Any) -> torch.Tensor:
    """Float64. A tensor stays as it is, with its gradient."""
    return array if isinstance(array, torch.Tensor) else torch.tensor(np.asarray(array), dtype=torch.float64)


class _Model(torch.nn.Module):
    """What the trainers ask of a model besides its outputs."""

    is_gradient_checkpointing = False


def trainer(**attributes: Any) -> SimpleNamespace:
    usual = {
        "model": _Model().eval(),
        "accelerator": ONE_PROCESS,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "_metrics": {"eval": defaultdict(list), "train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "beta": BETA,
    }
    return SimpleNamespace(**usual | attributes)


def loss_of_pairs(
    arrays: dict[str, Any], *names: str, weights: Any = None, dtype: Any = torch.float64, **keys: Any
) -> torch.Tensor:
    """DPOTrainer's. Args: names: its loss types; keys: its attributes."""
    flat = {name: torch.cat(tensor(values).unbind(1)) for name, values in arrays.items()}
    mask = np.pad(flat["mask"].numpy(), ((0, 0), (1, 0)))
    integers = {"input_ids": np.zeros_like(mask), "completion_mask": mask, "attention_mask": np.ones_like(mask)}
    nothing = torch.zeros(flat["mask"].shape)

    def model(name: str) -> Any:
        log_probs = flat[name] * flat["mask"]  # as TRL's models, which have none where the label is -100
        outputs = {"log_probs": log_probs.to(dtype), "log_sum_sq_probs": -flat["collision"]}
        unused = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool()}
        return lambda **_: SimpleNamespace(**outputs, **unused)

    usual = {
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "loss_types": names,
        "loss_weights": weights or [1.0] * len(names),
        "label_smoothing": 0.0,
        "use_weighting": False,
        "ref_model": model("reference"),
        "args": SimpleNamespace(discopop_tau=0.5, gradient_checkpointing_kwargs=None),
    }
    stub = trainer(**usual | keys)
    ids = {name: torch.tensor(values.astype(np.int64)) for name, values in integers.items()}
    return DPOTrainer._compute_loss(stub, model("policy"), ids, False)


def loss_without_reference(arrays: dict[str, Any], *, averages: bool, nll: float = 0.0, **keys: Any) -> torch.Tensor:
    """CPOTrainer's. Args: nll: weight of the chosen completions' next-token loss."""
    mask = tensor(arrays["mask"])
    sums, lengths = (tensor(arrays["policy"]) * mask).sum(-1), mask.sum(-1)
    chosen, rejected = (sums / lengths if averages else sums).unbind(1)
    stub = trainer(**{"alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.3} | keys)
    losses, _, _ = CPOTrainer.cpo_loss(stub, chosen, rejected)
    return losses.mean() - nll * sums[:, 0].sum() / lengths[:, 0].sum()


def odds_ratio_loss(arrays: dict[str, Any]) -> torch.Tensor:
    mask = tensor(arrays["mask"])
    means = (tensor(arrays["policy"]) * mask).sum(-1) / mask.sum(-1)
    return -ORPOTrainer.odds_ratio_loss(trainer(), *means.unbind(1))[0].mean()


def losses_of_pairs(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    of, alpha = functools.partial(loss_of_pairs, arrays), "alpha_divergence"
    plain = ("sigmoid", "hinge", "apo_zero", "apo_down", "nca_pair", "bco_pair", "sigmoid_norm", "ipo", "sppo_hard")
    smoothed = {"robust": 0.2, "exo_pair": 0.1, "aot": 0.1, "aot_unpaired": 0.1}
    # TRL has no float64 of the alpha divergence.
    in_alpha = {"f_divergence_type": alpha, "dtype": torch.float32}
    without = functools.partial(loss_without_reference, arrays)
    return {
        **{name: of(name) for name in (*plain, "discopop")},
        **{name: of(name, label_smoothing=epsilon) for name, epsilon in smoothed.items()},
        "mixed": of("sigmoid", "hinge", "sft", weights=[0.75, 0.5, 0.25]),
        "sigmoid forward_kl": of("sigmoid", f_divergence_type="forward_kl"),
        "sigmoid js_divergence": of("sigmoid", f_divergence_type="js_divergence"),
        "sigmoid alpha_divergence": of("sigmoid", f_alpha_divergence_coef=0.25, **in_alpha),
        "sigmoid_norm alpha_divergence": of("sigmoid_norm", **in_alpha),
        "ipo js_divergence": of("ipo", f_divergence_type="js_divergence"),
        "hinge forward_kl": of("hinge", f_divergence_type="forward_kl"),
        "sigmoid ld_alpha": of("sigmoid", ld_alpha=0.25),
        "apo_zero ld_alpha": of("apo_zero", ld_alpha=0.0),
        "sigmoid_norm ld_alpha": of("sigmoid_norm", ld_alpha=0.5),
        "sigmoid wpo": of("sigmoid", use_weighting=True),
        "hinge wpo": of("hinge", use_weighting=True),
        "cpo sigmoid": without(averages=False, nll=1.0, loss_type="sigmoid", label_smoothing=0.1),
        "cpo hinge": without(averages=False, nll=1.0, loss_type="hinge"),
        "cpo ipo": without(averages=True, nll=1.0, loss_type="ipo"),
        "cpo simpo": without(averages=True, loss_type="simpo", label_smoothing=0.1),
        "cpo alphapo": without(averages=True, loss_type="simpo", label_smoothing=0.1, alpha=0.2),
        "orpo": odds_ratio_loss(arrays),
    }


def advantages_of(rewards: np.ndarray, scale: str) -> np.ndarray:
    """As GRPOTrainer and RLOOTrainer compute them, in a method that also samples."""
    others = (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    centered = rewards - (others if scale.startswith("rloo") else rewards.mean(1, keepdims=True))
    std = {
        "group": rewards.std(1, ddof=1, keepdims=True) + 1e-4,
        "batch": rewards.std(ddof=1) + 1e-4,
        "rloo_normalized": centered.std(ddof=1) + 1e-4,
    }
    return (centered / std.get(scale, 1.0)).ravel()


def advantages_of_parts(parts: np.ndarray, weights: tuple[float, ...]) -> np.ndarray:
    """As GRPOTrainer computes those of `normalize_then_sum`, in a method that also samples."""
    grouped = tensor(parts)
    normalized = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    sums = (normalized * tensor(weights)).nansum(-1).flatten()
    sums[grouped.isnan().all(-1).flatten()] = torch.nan
    return torch.nan_to_num((sums - sums.nanmean()) / (nanstd(sums) + 1e-4)).numpy()


def sampler_ratios(arrays: dict[str, Any], mode: str, low: float | None, high: float | None) -> torch.Tensor:
    """As GRPOTrainer computes vLLM's importance sampling ratios, in a method that also samples. `old` is the sampler."""
    mask = tensor(arrays["mask"])
    differences = ((tensor(arrays["policy"]).detach() - tensor(arrays["old"])) * mask).reshape(NUM_GROUPS * SIZE, -1)
    ratios = torch.exp(differences.sum(-1, keepdim=True) if mode.startswith("sequence") else differences)
    if mode.endswith("truncate"):
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < (low or 0.0)) | (ratios > (high or np.inf)), 0.0)


def loss_of_groups(
    arrays: dict[str, Any],
    loss_type: str,
    *,
    scale: str = "group",
    kind: Any = GRPOTrainer,
    kl_in_reward: float = 0.0,
    weights: tuple[float, ...] = (),
    ratios: tuple[str, float | None, float | None] | None = None,
    mask_truncated_completions: bool = False,
    training: bool = False,
    keep: Callable[[SimpleNamespace], None] = lambda trainer: None,
    **keys: Any,
) -> torch.Tensor:
    """The trainer's.

    Args:
        weights: of several rewards, whose sum is normalized; empty takes one reward.
        ratios: mode and limits of the importance sampling of vLLM's responses; None samples without vLLM.
        keep: called with the trainer.
        keys: its attributes, or those of its `args`.
    """
    flat = {name: tensor(values).reshape(NUM_GROUPS * SIZE, -1) for name, values in arrays.items()}
    mask = flat["mask"] * flat["finished"] if mask_truncated_completions else flat["mask"]
    kl = ((arrays["old"] - arrays["reference"]) * arrays["mask"]).sum(-1)
    stub = trainer(
        **{
            "beta": 0.0,
            "loss_type": loss_type,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": "token",
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "use_vllm": ratios is not None,
            "vllm_importance_sampling_correction": ratios is not None,
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": 9,
            "tools": None,
            "_entropy_bonus_enabled": "entropy_coef" in keys,
            "use_adaptive_entropy": False,
            "_entropy_window_stats": None,
        }
        | keys,
        args=SimpleNamespace(
            **{
                "delta": None,
                "use_bias_correction_kl": False,
                "sapo_temperature_pos": 0.8,
                "sapo_temperature_neg": 1.3,
                "steps_per_generation": 1,
            }
            | {f"vespo_{name}": value for name, value in (("k_pos", 2.0), ("lambda_pos", 3.0))}
            | {f"vespo_{name}": value for name, value in (("k_neg", 3.0), ("lambda_neg", 2.0))}
            | keys
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (flat["policy"], flat["entropy"], None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    stub.model.train(training)
    keep(stub)
    stub.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, stub)
    nothing = torch.zeros(len(mask), 0, dtype=torch.long)
    batch = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": tensor(
            advantages_of_parts(arrays["parts"], weights)
            if weights
            else advantages_of(arrays["rewards"] - kl_in_reward * kl, scale)
        ),
        "old_per_token_logps": flat["old"],
        "old_logps": (flat["old"] * mask).sum(1),
        "ref_per_token_logps": flat["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if ratios is not None:  # the policy is the old one
        batch |= {"sampling_per_token_logps": flat["old"], "importance_sampling_ratio": sampler_ratios(arrays, *ratios)}
        del batch["old_per_token_logps"]
    return kind._compute_loss(stub, None, batch)


def losses_of_groups(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    of, sequence = functools.partial(loss_of_groups, arrays), {"importance_sampling_level": "sequence"}
    rloo = functools.partial(of, "rloo", kind=RLOOTrainer)
    powers = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 0.5, "vespo_lambda_neg": 0.75}
    return {
        "grpo": of("grpo", beta=0.04),
        "bnpo": of("bnpo"),
        "dapo": of("dapo", epsilon_high=0.28),
        "two-sided": of("dapo", delta=1.5),
        "dr_grpo": of("dr_grpo", scale="none"),
        "gspo": of("grpo", **sequence),
        "luspo": of("luspo", **sequence),
        "cispo": of("cispo", epsilon_high=1.25),
        "cispo sequence": of("cispo", epsilon_high=1.05, **sequence),
        "sapo": of("sapo"),
        "vespo": of("vespo"),
        "vespo powers": of("vespo", beta=0.04, **powers),
        "gmpo": of("gmpo", kind=GMPOTrainer, epsilon_low=0.15, epsilon_high=0.25, beta=0.04),
        "gmpo top_entropy": of("gmpo", kind=GMPOTrainer, top_entropy_quantile=0.4),
        "batch": of("dapo", scale="batch"),
        "kl_unbiased": of("dapo", beta=0.04, use_bias_correction_kl=True),
        "kl_unbiased sequence": of("grpo", beta=0.04, use_bias_correction_kl=True, **sequence),
        "off_policy": of("dapo", off_policy_mask_threshold=0.01),
        "top_entropy": of("dapo", top_entropy_quantile=0.4),
        "entropy_coef": of("dapo", entropy_coef=0.02),
        "top_entropy entropy_coef": of("dapo", top_entropy_quantile=0.4, entropy_coef=0.02),
        "tis token_truncate": of("dapo", ratios=("token_truncate", 0.8, 1.1)),
        "tis token_mask": of("dapo", ratios=("token_mask", 0.75, 1.25)),
        "tis sequence_truncate": of("grpo", ratios=("sequence_truncate", None, 1.1)),
        "tis sequence_mask": of("grpo", ratios=("sequence_mask", 0.6, 2.0), beta=0.04),
        "tis vespo": of("vespo", ratios=("token_mask", None, 1.3)),
        "mask_truncated": of("dapo", mask_truncated_completions=True),
        "mask_truncated grpo": of("grpo", mask_truncated_completions=True, beta=0.04),
        "mask_truncated entropy": of(
            "dapo", mask_truncated_completions=True, top_entropy_quantile=0.5, entropy_coef=0.02
        ),
        "gdpo": of("dapo", weights=(1.0, 0.5, 2.0)),
        "rloo": rloo(scale="rloo"),
        "rloo normalized": rloo(scale="rloo_normalized"),
        "rloo kl": rloo(scale="rloo", kl_in_reward=0.05),
    }


def expected(kind: str, arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each case's loss, and its gradient by the likelihoods of the policy, in their shape. Args: arrays: of `kind`."""
    policy = tensor(arrays["policy"]).requires_grad_()
    losses_of = {"pairs": losses_of_pairs, "groups": losses_of_groups}[kind]
    # TRL multiplies the hinge loss by WPO's weights in place, which autograd refuses without this.
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        losses = losses_of({**arrays, "policy": policy})
        gradients = {case: torch.autograd.grad(loss, policy)[0].numpy().round(10) for case, loss in losses.items()}
    return {
        "expected": {case: loss.item() for case, loss in losses.items()},
        "gradients": {case: (gradient + 0.0).tolist() for case, gradient in gradients.items()},  # no -0.0
    }


def adaptive_entropy(arrays: dict[str, Any]) -> list[dict[str, float]]:
    """The loss of each of some updates with adaptive entropy control, and the coefficient after it, for the entropies of
    `arrays` times a factor."""
    held: dict[str, Any] = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "_last_world_entropy": float("inf")}
    target = float((arrays["entropy"] * arrays["mask"]).sum() / arrays["mask"].sum())
    limits = {
        "entropy_coef_min": 0.004,
        "entropy_coef_max": 0.012,
        "entropy_coef_delta": 0.0035,
        "entropy_target": target,
    }
    steps = []
    for factor in ENTROPY_FACTORS:
        stub: list[SimpleNamespace] = []
        scaled = {**arrays, "entropy": arrays["entropy"] * factor}
        loss = loss_of_groups(scaled, "dapo", training=True, keep=stub.append, **limits, **held)
        held = {name: getattr(stub[0], name) for name in held}
        steps.append({"loss": loss.item(), "entropy_coef": held["entropy_coef"]})
    return steps


def without_nan(values: np.ndarray) -> list[Any]:
    """As lists, with None for NaN, which JSON does not have."""
    return np.where(np.isnan(values), None, values).tolist()  # pyright: ignore[reportCallIssue, reportArgumentType]


if __name__ == "__main__":
    written = {
        kind: {"inputs": {name: without_nan(values) for name, values in arrays.items()}, **expected(kind, arrays)}
        for kind, arrays in inputs().items()
    }
    written["adaptive_entropy"] = adaptive_entropy(inputs()["groups"])
    print(json.dumps(written))
