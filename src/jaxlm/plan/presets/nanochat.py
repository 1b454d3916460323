"""The two recipes of the depth dial as data: what nanochat sets by hand, and does not derive from the depth.

Source: karpathy/nanochat: `seed` is commit b7629ef of February 2026 (`scripts/base_train.py`, `nanochat/gpt.py`), `head` is
revision 92d63d4 of July 2026. All rates are those at the reference batch of 524,288 tokens and a width of 768.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxlm.models.families.nano.revisions import FEBRUARY_2026, JULY_2026
from jaxlm.reading.decode import encode


@dataclass(frozen=True)
class AdamGroup:
    """Parameters that AdamW updates.

    Attributes:
        match: regular expression for their paths.
        rate: the learning rate of the recipe that theirs is derived from, a field of `Recipe`.
        factor: their learning rate as a multiple of that.
        scales_with_width: whether their learning rate falls with the width.
        scales_with_batch: whether it rises with the batch size.
    """

    match: str
    rate: str
    beta1: float
    beta2: float
    factor: float = 1.0
    weight_decay: float = 0.0
    scales_with_width: bool = False
    scales_with_batch: bool = True


@dataclass(frozen=True)
class Recipe:
    """What a recipe sets by hand.

    Attributes:
        revision: of nanochat, for the start-up table.
        target_param_data_ratio: training tokens per scaling parameter.
        weight_decay: of matrices, at the reference batch and the tokens of the reference depth.
        warmup_steps: of the learning rate.
        warmdown_ratio: share of the steps over which the learning rate falls at the end.
        final_lr_frac: learning rate at the end, as a fraction of the peak.
        model: keys of the model besides its sizes.
        optimizer: keys of Muon besides rates and lengths.
        groups: name -> parameters that AdamW updates; Muon updates all others.
        lookup: keys of lookup layers besides their sizes, for a model that has any.
    """

    revision: str
    target_param_data_ratio: float
    unembedding_lr: float
    weight_decay: float
    warmup_steps: int
    warmdown_ratio: float
    final_lr_frac: float
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    groups: Mapping[str, AdamGroup]
    lookup: Mapping[str, Any] = field(default_factory=dict)
    embedding_lr: float = 0.3
    lookup_lr: float = 0.3
    matrix_lr: float = 0.02
    scalar_lr: float = 0.5
    smear_lr: float = 0.2


_SCALARS = {
    "resid_lambdas": AdamGroup(r"resid_lambdas$", "scalar_lr", 0.8, 0.95, factor=0.01),
    "x0_lambdas": AdamGroup(r"x0_lambdas$", "scalar_lr", 0.96, 0.95),
}
LOOKUP_TABLES = {
    "l3_embeds": AdamGroup(r"lookups\.\d+\.\w+_embedding$", "lookup_lr", 0.8, 0.95, scales_with_width=True)
}
"""The tables of lookup layers in both recipes. nanochat of July 2026 has no such layers."""
MUON_KEYS: dict[str, Any] = {
    "type": "muon",
    "momentum_ema": True,
    "coefficient_type": "polar_express",
    "backend_steps": 5,
    "muon_epsilon": 1e-6,
    "orthogonalization_dtype": "bfloat16",
    "scale_weight_decay": True,
    "cautious_weight_decay": True,
    # Each entry of `groups` says what decays: embeddings too, in the recipe `head`.
    "default_weight_decay_mask": False,
    "lr_schedule": "linear",
    "warmup_from_zero": False,
    "max_grad_norm": None,
}
"""Keys of the optimizer that both recipes have. `nesterov` is not among them: the entries of AdamW would inherit it."""

SEED = Recipe(
    revision="nanochat b7629ef (2026-02)",
    target_param_data_ratio=10.5,
    unembedding_lr=0.004,
    weight_decay=0.2,
    warmup_steps=0,
    warmdown_ratio=0.5,
    final_lr_frac=0.0,
    model={
        **encode(FEBRUARY_2026),
        "embed_init_std": 1.0,
        "mlp_init_scale": 1.0,
        "gate_init_max": 0.0,
        "first_resid_lambda": 1.0,
        "last_resid_lambda": 1.0,
        "first_x0_lambda": 0.1,
        "last_x0_lambda": 0.1,
    },
    optimizer={
        "momentum": 0.95,
        "momentum_schedule": {"initial": 0.85, "warmup": 300, "final": None},
        "norm_factor": 1.02,
        "row_equilibration": False,
        "renormalize": False,
        "normuon_beta2": 0.95,
        "weight_decay_schedule": "linear",
    },
    groups={
        "lm_head": AdamGroup(r"^head\.", "unembedding_lr", 0.8, 0.95, scales_with_width=True),
        "wte": AdamGroup(r"^tokens\.", "embedding_lr", 0.8, 0.95, scales_with_width=True),
        "value_embeds": AdamGroup(r"value_embedding$", "embedding_lr", 0.8, 0.95, scales_with_width=True),
        **_SCALARS,
    },
    lookup={"allocation": "nanochat", "sample_tokens": 204_800, "key_norm": False, "score_scale": 1.0},
)

HEAD = Recipe(
    revision="nanochat 92d63d4 (2026-07)",
    target_param_data_ratio=12.0,
    unembedding_lr=0.008,
    weight_decay=0.28,
    warmup_steps=40,
    warmdown_ratio=0.65,
    final_lr_frac=0.05,
    model={
        **encode(JULY_2026),
        "embed_init_std": 0.8,
        "mlp_init_scale": 0.4,
        "gate_init_max": 0.02,
        "first_resid_lambda": 1.15,
        "last_resid_lambda": 1.05,
        "first_x0_lambda": 0.20,
        "last_x0_lambda": 0.05,
    },
    optimizer={
        "momentum": 0.97,
        "momentum_schedule": {"initial": 0.85, "warmup": 400, "final": 0.90},
        "norm_factor": 1.01,
        "row_equilibration": True,
        "renormalize": True,
        "normuon_beta2": 0.9,
        "weight_decay_schedule": "cosine",
    },
    groups={
        "lm_head": AdamGroup(r"^head\.", "unembedding_lr", 0.8, 0.96, weight_decay=0.01, scales_with_width=True),
        "wte": AdamGroup(r"^tokens\.", "embedding_lr", 0.8, 0.995, weight_decay=0.001, scales_with_width=True),
        "value_embeds": AdamGroup(
            r"value_embedding$", "embedding_lr", 0.8, 0.995, factor=0.5, weight_decay=0.01, scales_with_width=True
        ),
        "resid_lambdas": AdamGroup(r"resid_lambdas$", "scalar_lr", 0.8, 0.95, factor=0.01, weight_decay=0.05),
        "x0_lambdas": _SCALARS["x0_lambdas"],
        "smear_and_backout": AdamGroup(r"^(smear|backout)_", "smear_lr", 0.8, 0.95, scales_with_batch=False),
    },
)
RECIPES = {"seed": SEED, "head": HEAD}
