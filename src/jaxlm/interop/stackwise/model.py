"""The section `model`, without the keys of its masks and of its tokenizer."""

from jaxlm.interop.section import Section
from jaxlm.interop.stackwise.objective import Objective
from jaxlm.interop.translated import Translated

_SIZES = {"d_model": "hidden_dim", "d_ff": "intermediate_dim", "n_heads": "num_heads"}
_BIDIRECTIONAL = {"bert_style": True, "efficient_gqa": True, "gpt_style": False}
_OTHER_ATTENTION = ("mla_attention", "kernel_attention", "mlgka", "full_featured")
_MODES = ("bidirectional", "causal")


def put_model(model: Section, objective: Objective, out: Translated) -> None:
    """Writes the model: a Llama, whose attention is causal or looks both ways."""
    out.put("model.type", "llama", model, "attention_preset")
    for old, new in _SIZES.items():
        if (size := model.take(old)) is not None:
            out.put(f"model.{new}", size, model, old)
    if (heads := model.take("n_kv_heads")) is not None:
        out.put("model.num_kv_heads", heads, model, "n_kv_heads")
    if (size := model.take("vocab_size")) is not None:
        out.put("data.vocab_size", size, model, "vocab_size")
    out.put("model.use_bidirectional_attention", _looks_both_ways(model, objective), model, "attention_preset")
    out.put("model.tie_word_embeddings", model.choice("tie_embeddings", (True, False), True), model, "tie_embeddings")
    if not model.choice("use_rope", (True, False), True):
        raise model.error("use_rope", "false given, but the model (llama) has no other positions. Set it to true")
    out.put("model.rope.theta", model.number("rope_theta", 10_000.0), model, "rope_theta")
    model.refuse(
        "dropout", "the model (llama) has none. Set it to 0, or regularize with optimizer.weight_decay", 0, 0.0
    )
    model.ignore(
        "freeze_up_proj",
        "up-projections train: those that are frozen would stay random. To freeze them, write `phases` with `trainable`",
    )
    model.note("attention_preset", "the model is jaxlm's llama: RMSNorm where StackWise has LayerNorm")


def _looks_both_ways(model: Section, objective: Objective) -> bool:
    preset = model.choice("attention_preset", (*_BIDIRECTIONAL, *_OTHER_ATTENTION, "custom"))
    key = "attention_preset"
    if preset in _OTHER_ATTENTION:
        raise model.error(
            key,
            f"'{preset}' given, which jaxlm cannot do: a model that grows has plain or grouped-query attention. Set"
            " bert_style or gpt_style, with n_kv_heads below n_heads for grouped queries",
        )
    if preset == "custom":
        custom = model.section("attention_custom")
        both, key = _custom(custom), "attention_custom"
        custom.done()
    else:
        model.ignore("attention_custom", "no effect without attention_preset: custom")
        both = objective.looks_both_ways is not False if preset is None else _BIDIRECTIONAL[preset]
    if objective.looks_both_ways not in (None, both):
        why = (
            "a token would see the one that it predicts. Set gpt_style"
            if both
            else "hidden tokens are predicted from both sides. Set bert_style"
        )
        raise model.error(
            key, f"{_MODES[not both]} attention given with training_objective: {objective.name}, but then {why}"
        )
    return both


def _custom(custom: Section) -> bool:
    if custom.choice("attention_type", ("mha", "mla"), "mha") == "mla":
        raise custom.error("attention_type", "'mla' given, which jaxlm cannot do in a model that grows. Set mha")
    custom.refuse("kernel_type", "attention is a softmax of dot products. Set it to linear", "linear")
    for key, what in {
        "mla_rq": "attention_type: mla",
        "mla_rkv": "attention_type: mla",
        "kernel_dim": "kernels",
    }.items():
        custom.ignore(key, f"no effect without {what}")
    return custom.choice("attention_mode", _MODES, "bidirectional") == "bidirectional"
