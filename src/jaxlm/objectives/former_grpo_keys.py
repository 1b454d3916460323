"""The keys of GRPO in earlier versions, which were all in one section."""

from jaxlm.reading.choices import FormerKey

_SAMPLING = "old_policy.importance_sampling"
FORMER_GRPO_KEYS = {
    "policy_loss": FormerKey("clip", ("loss.type",)),
    "clip_eps": FormerKey(0.2, ("loss.epsilon",)),
    "clip_eps_high": FormerKey(None, ("loss.epsilon_high",)),
    "dual_clip": FormerKey(None, ("loss.dual_clip",)),
    "cispo_cap": FormerKey(5.0, ("loss.cap",)),
    "sapo_positive_temperature": FormerKey(1.0, ("loss.positive_temperature",)),
    "sapo_negative_temperature": FormerKey(1.05, ("loss.negative_temperature",)),
    "vespo_positive_power": FormerKey(2.0, ("loss.positive_power",)),
    "vespo_positive_decay": FormerKey(3.0, ("loss.positive_decay",)),
    "vespo_negative_power": FormerKey(3.0, ("loss.negative_power",)),
    "vespo_negative_decay": FormerKey(2.0, ("loss.negative_decay",)),
    "importance": FormerKey("token", ("loss.importance",)),
    "tis_cap": FormerKey(None, (f"{_SAMPLING}.cap",)),
    "tis_floor": FormerKey(0.0, (f"{_SAMPLING}.floor",)),
    "tis_mode": FormerKey("token_truncate", (f"{_SAMPLING}.mode",)),
    "aggregation": FormerKey("sum_then_normalize", ("advantage.type",)),
    "scale": FormerKey(
        "group",
        ("advantage.type",),
        (
            ("none", {"advantage.type": "unscaled"}),
            ("batch_advantages", {"advantage.type": "batch", "advantage.std_of": "advantages"}),
        ),
    ),
    "baseline": FormerKey("mean", ("advantage.baseline",)),
    "std_ddof": FormerKey(0, ("advantage.std_ddof",)),
    "eps": FormerKey(1e-8, ("advantage.eps",)),
    "overlong_cache": FormerKey(None, ("overlong.cache",)),
    "max_response_tokens": FormerKey(None, ("loss_agg.max_response_tokens", "overlong.max_response_tokens")),
    "entropy_coef": FormerKey(0.0, ("entropy.coef",)),
    "entropy_target": FormerKey(None, ("entropy.adaptive.target",)),
    "entropy_coef_delta": FormerKey(0.005, ("entropy.adaptive.delta",)),
    "entropy_coef_min": FormerKey(0.0, ("entropy.adaptive.min",)),
    "entropy_coef_max": FormerKey(1.0, ("entropy.adaptive.max",)),
    "kl_in_reward": FormerKey(False, ("kl.type",), ((True, {"kl.type": "reward"}),)),
    "kl_coef": FormerKey(0.01, ("kl.coef",), ((0, {"kl": None}),)),
    "kl_estimator": FormerKey("k3", ("kl.estimator",)),
    "kl_level": FormerKey("token", ("kl.level",)),
    "kl_unbiased": FormerKey(False, ("kl.unbiased",)),
}
