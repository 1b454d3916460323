"""What the depth dial sets: the two recipes as data, and the optimizer's keys that follow from a batch and a width.

The keys follow from a number of steps too. The recipes are what nanochat sets by hand, and does not derive from the depth.
All rates are those at the reference batch of 524,288 tokens and a width of 768. The weight decay keeps T_epoch = B /
(learning rate x weight decay x D) constant.

Source: karpathy/nanochat: `seed` is commit b7629ef of February 2026 (`scripts/base_train.py`, `nanochat/gpt.py`), as are
the rules for the optimizer's keys; `head` is revision 92d63d4 of July 2026. Weight decay: Wang and Aitchison 2024
(arXiv:2405.13698).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxlm.reading.decode import encode
from jaxlm.systems.nanochat.layers import FEBRUARY_2026, JULY_2026
from jaxlm.systems.nanochat.lookup import lookup_width
from jaxlm.systems.nanochat.model import NanoConfig


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
    """Holds what a recipe sets by hand.

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

BASE_TRAIN = "base_train.py"
REFERENCE_BATCH = 2**19
_REFERENCE_WIDTH = 768
_ADAM_EPSILON = 1e-10
_T_EPOCH = "arXiv:2405.13698"


@dataclass(frozen=True)
class OptimizerKeys:
    """The section `optimizer` of a model.

    Attributes:
        add: adds a number to those that are shown, and returns it.
        recipe: with the rates that you set in the preset in place of its own.
        rate_scale: what the batch multiplies learning rates by.
        section: the section of the configuration, whose keys win.
    """

    add: Callable[..., Any]
    recipe: Recipe
    model: NanoConfig
    rate_scale: float
    num_steps: int
    section: Mapping[str, Any]

    def keys(self, root_of_batch: float, token_ratio: float) -> dict[str, Any]:
        """All keys.

        Args:
            root_of_batch: sqrt(B / 524,288).
            token_ratio: D_ref / D.
        """
        recipe = self.recipe
        rate = self.add(
            "learning rate of Muon",
            recipe.matrix_lr * self.rate_scale,
            f"{recipe.matrix_lr:g} x scale",
            key="optimizer.learning_rate",
        )
        learning_rate = self.section.get("learning_rate")
        by_shape = rates_by_shape(self.model, learning_rate if isinstance(learning_rate, int | float) else rate)
        self.add("  by matrix", by_shape, "learning rate of Muon x sqrt(max(1, outputs / inputs))")
        decay = self.add(
            "weight decay of Muon",
            recipe.weight_decay * root_of_batch * token_ratio,
            f"{recipe.weight_decay:g} x sqrt(B / {REFERENCE_BATCH:,}) x D_ref / D",
            _T_EPOCH,
            "optimizer.weight_decay",
        )
        return {
            **MUON_KEYS,
            **recipe.optimizer,
            "learning_rate": rate,
            "weight_decay": decay,
            "groups": self._groups(),
            **self._schedules(),
        }

    def _groups(self) -> list[dict[str, Any]]:
        width = self.model.hidden_dim
        width_scale = (width / _REFERENCE_WIDTH) ** -0.5
        self.add("scale of AdamW with width", width_scale, f"({width} / {_REFERENCE_WIDTH})^-0.5")
        entries = []
        tables = {} if self.model.lookup is None else LOOKUP_TABLES
        for name, group in {**tables, **self.recipe.groups}.items():
            rate: float = getattr(self.recipe, group.rate)
            formula = f"{rate:g}"
            if group.scales_with_batch:
                rate, formula = rate * self.rate_scale, f"{formula} x scale"
            if group.scales_with_width:
                rate, formula = rate * width_scale, f"{formula} x scale with width"
            if group.factor != 1:
                rate, formula = rate * group.factor, f"{formula} x {group.factor:g}"
            self.add(f"learning rate of {name}", rate, formula, instead=self._instead(group.match, rate))
            entries.append(
                {
                    "match": group.match,
                    "type": "adam",
                    "learning_rate": rate,
                    "beta1": group.beta1,
                    "beta2": group.beta2,
                    "epsilon": _ADAM_EPSILON,
                    "weight_decay": group.weight_decay,
                }
            )
        return entries

    def _instead(self, match: str, rate: float) -> str:
        """Says what a list of your own has in place of an entry with this learning rate; empty if it has the same."""
        entries = self.section.get("groups")
        if not isinstance(entries, list):
            return ""
        group = next((entry for entry in entries if isinstance(entry, Mapping) and entry.get("match") == match), None)
        if group is None:
            return f"not used: you wrote optimizer.groups without an entry that matches {match}"
        learning_rate = group.get("learning_rate", self.section.get("learning_rate", rate))
        return "" if learning_rate == rate else f"{learning_rate}: you wrote optimizer.groups"

    def _schedules(self) -> dict[str, Any]:
        """Keys of the schedules that depend on the number of steps."""
        recipe, origin, num_steps = self.recipe, "the recipe's", self.num_steps
        warmdown = round(recipe.warmdown_ratio * num_steps)
        # nanochat lets a long warmup jump into the warmdown, or end the run.
        warmup = min(recipe.warmup_steps, num_steps - warmdown)
        formula = f"{recipe.warmdown_ratio:g} x N, half a step rounded to the even number"
        self.add("warmdown", warmdown, formula, key="optimizer.decay")
        self.add("warmup", warmup, f"{origin} {recipe.warmup_steps}, at most N - warmdown", key="optimizer.warmup")
        self.add("last learning rate", recipe.final_lr_frac, f"{origin}, x the peak", key="optimizer.min_lr_ratio")
        self.add("momentum of Muon", recipe.optimizer["momentum"], self._momentum(), key="optimizer.momentum")
        decay = "optimizer.weight_decay_schedule"
        self.add("schedule of weight decay", recipe.optimizer["weight_decay_schedule"], "to 0 over N", key=decay)
        return {"warmup": warmup, "decay": warmdown, "min_lr_ratio": recipe.final_lr_frac}

    def _momentum(self) -> str:
        recipe = self.recipe.optimizer["momentum_schedule"]
        schedule = self.section.get("momentum_schedule", recipe)
        used = recipe | schedule if isinstance(schedule, Mapping) else None
        note = "" if used == recipe else ", as you wrote in optimizer.momentum_schedule"
        if used is None:
            return f"constant{note}"
        rises = f"from {used['initial']} over {used['warmup']} steps"
        falls = "" if used["final"] is None else f", to {used['final']} in the warmdown"
        return f"{rises}{falls}{note}"


def rates_by_shape(model: NanoConfig, rate: float) -> dict[str, float]:
    """Outputs x inputs of each kind of matrix -> its learning rate with Muon."""
    width, wide, num_kv_heads = model.hidden_dim, model.Mlp.size, model.KVHeads.size
    kv_width = num_kv_heads * model.HeadSize.size
    shapes = [
        (width, width),
        (kv_width, width),
        (wide, width),
        (width, wide),
        (num_kv_heads, model.value_gate_channels),
    ]
    if model.lookup is not None:
        hidden = lookup_width(model.lookup, width)
        shapes += [(hidden, width), (width, hidden + width)]
    return {f"{rows}x{columns}": rate * max(1.0, rows / columns) ** 0.5 for rows, columns in shapes}
