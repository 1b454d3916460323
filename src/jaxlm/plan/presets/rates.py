"""The optimizer's keys that follow from a batch, a width and a number of steps, for the depth dial.

Source: karpathy/nanochat (`scripts/base_train.py`, commit b7629ef). Weight decay: Wang and Aitchison 2024 (arXiv:2405.13698),
which keeps T_epoch = B / (learning rate x weight decay x D) constant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.models.families.nano import NanoConfig
from jaxlm.models.families.nano.lookup import lookup_width
from jaxlm.plan.presets.nanochat import LOOKUP_TABLES, MUON_KEYS, Recipe

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
        """What a list of your own has in place of an entry with this learning rate; empty if it has the same."""
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
