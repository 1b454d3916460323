"""Translates the section `system` of a target, a tree of layers, to a model of jaxlm.

A stack of pre-norm blocks of attention and SwiGLU is `llama`, or `dba` with decoupled attention. Any other tree is
`topology`. A target that upcycles has the model of its teacher: only the sizes are read, and the attention becomes a surgery.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlm.compat.section import Section, Translated

_GROUPS = {"StackedTopology": "stacked", "NestedTopology": "nested", "ResidualTopology": "residual"}
_NO_SUCH_LAYER = "jaxlm has no such layer"
_DBA_INIT = {"svd": "svd_joint", "random": "random", "fresh": "fresh"}


@dataclass(frozen=True)
class Node:
    """A layer or a group of layers.

    Attributes:
        kind: its `type` in jaxlm.
        width: features of its input, if it says so.
        keys: jaxlm's keys of a layer.
        section: of the manifest.
    """

    kind: str
    width: int | None
    keys: Mapping[str, Any]
    section: Section
    layers: Sequence["Node"] = field(default_factory=list)

    def all_of(self, kind: str) -> list["Node"]:
        """The layers of a kind in this node, from first to last."""
        return [*([self] if self.kind == kind else []), *(one for node in self.layers for one in node.all_of(kind))]

    def tree(self) -> dict[str, Any]:
        """The node of a `topology`."""
        inner = {"layers": [node.tree() for node in self.layers]} if self.kind in _GROUPS.values() else {}
        return {"type": self.kind, **self.keys, **inner}


def put_model(system: Section, out: Translated) -> None:
    """Writes the model of a target that trains from scratch."""
    model = _model(system)
    tied = model.choice("tied_embeddings", (True, False), False)
    vocab, width = _embedder(model)
    root = _node(model.section("topology"))
    model.done()
    if not tied and root.layers and root.layers[-1].kind == "linear":
        vocab = _vocabulary(root.layers[-1], vocab)
        root = Node(root.kind, root.width, root.keys, root.section, root.layers[:-1])
    width = width or next((node.width for node in _layers(root) if node.width), None)
    keys = _as_llama(root) or {"type": "topology", "topology": root.tree()}
    for key, value in (({"hidden_dim": width} if width else {}) | keys).items():
        out.put(f"model.{key}", value, root.section, "layers")
    out.put("model.tie_word_embeddings", tied, model, "tied_embeddings")
    if vocab is not None:
        out.put("data.vocab_size", vocab, model, "embedder")


def put_student(system: Section, init: Section, phase: str, teacher: str, out: Translated) -> None:
    """Writes the model of a target that upcycles: the teacher's, with the sizes that the manifest says, and the surgery.

    Args:
        init: the `train` section of the first run, which says how queries and keys start.
        phase: dotted path of the phase that begins with the surgery.
    """
    model = _model(system)
    method = _DBA_INIT[init.choice("dba_init", _DBA_INIT, "svd")]
    if method == "svd_joint":
        init.note(
            "dba_init", "svd is the surgery's svd_joint, which keeps the teacher's scores as well as the rank allows"
        )
    for key in ("teacher_rope_base", "teacher_rope_dim"):
        init.ignore(key, f"the config.json of {teacher} says it")
    model.ignore("tied_embeddings", f"as in {teacher}")
    _, width = _embedder(model)
    root = _node(model.section("topology"))
    model.done()
    attention = root.all_of("attention")
    if len({str(node.keys) for node in attention}) != 1:
        raise root.section.error(
            "layers", f"{len(attention)} different attention layers given, one kind for all layers expected"
        )
    keys, where = dict(attention[0].keys), attention[0].section
    if keys.pop("mode") != "decoupled":
        raise where.error("mode", "no decoupled attention given, which is what a target with a teacher is upcycled to")
    sizes = {"hidden_dim": attention[0].width or width, "num_layers": _num_layers(root)}
    sizes |= {name: keys.pop(name, None) for name in ("num_heads", "num_kv_heads")}
    sizes["intermediate_dim"] = next((node.keys["intermediate_dim"] for node in root.all_of("swiglu")), None)
    for name, size in sizes.items():
        if size is not None:  # another size than the teacher's is an error when its weights are loaded
            out.put(f"model.{name}", size, where, "d_model")
    rope = keys.pop("rope", {})
    if rope:
        where.note("rope_base", f"frequencies are those of {teacher}, {rope} is not read")
    for name in ("sliding_window", "bias", "dropout", "head_dim", "rope_semantic", "tie_qk"):
        if keys.pop(name, None):
            raise where.error(name, f"given for a student, whose other keys are those of {teacher}. Remove it")
    for name, value in {"type": "decouple", "method": method, **keys}.items():
        out.put(f"{phase}.surgery.0.{name}", value, where, "mode")


def _model(system: Section) -> Section:
    system.choice("ref", ("system.language_model",), "system.language_model")
    config = system.section("config")
    model = config.section("model")
    config.done()
    system.done()
    model.choice("type", ("TransformerModel",), "TransformerModel")
    return model


def _embedder(model: Section) -> tuple[Any, Any]:
    """The vocabulary and the width, where they are given."""
    if "embedder" not in model:
        return None, None
    embedder = model.section("embedder")
    embedder.choice("type", ("token",), "token")
    sizes = embedder.take("vocab_size"), embedder.take("d_model")
    embedder.done()
    return sizes


def _vocabulary(head: Node, embedded: Any) -> Any:
    """The size of the vocabulary. Args: head: the last layer; embedded: the size that the embedder has, if given."""
    if head.keys["bias"]:
        raise head.section.error("bias", "true given for the head, which has no bias in jaxlm. Set bias: false")
    size = head.keys["output_dim"]
    if None not in (size, embedded) and size != embedded:
        raise head.section.error(
            "d_out", f"{size} given for the head, but the embedder has a vocab_size of {embedded}. Set one"
        )
    return embedded if size is None else size


def _layers(node: Node) -> list[Node]:
    return [one for inner in node.layers for one in (inner, *_layers(inner))]


def _num_layers(node: Node) -> int:
    own = 1 if node.kind == "attention" else sum(_num_layers(inner) for inner in node.layers)
    return own * (node.keys.get("repeat", 1) if node.kind == "nested" else 1)


def _node(section: Section) -> Node:
    kind = section.take("type")
    if kind in _GROUPS:
        keys = {"repeat": section.take("repeat", 1)} if kind == "NestedTopology" else {}
        layers = [_node(inner) for inner in section.sections("layers")]
        section.done()
        return Node(_GROUPS[kind], None, keys, section, layers)
    if not isinstance(kind, str) or kind not in _LAYERS:
        raise section.error("type", f"{kind!r} given: {_NO_SUCH_LAYER}. Known: {', '.join((*_GROUPS, *_LAYERS))}")
    node = _LAYERS[kind](section)
    section.done()
    return node


def _rms_norm(section: Section) -> Node:
    width, weight = section.take("d_model"), section.choice("elementwise_affine", (True, False), True)
    keys = {"epsilon": section.take("eps", 1e-5)} | ({} if weight else {"weight": False})
    return Node("rms_norm", width, keys, section)


def _linear(section: Section) -> Node:
    keys = {
        "output_dim": section.take("d_out"),
        "bias": _bias(section, "linear layers have a bias in caramba by default"),
    }
    return Node("linear", section.take("d_in"), keys, section)


def _bias(section: Section, note: str) -> bool:
    """The key `bias`. Caramba's default is true, which few mean: manifests leave it out where Llama has none."""
    if "bias" not in section and section.take("bias") is None:
        section.note("bias", f"{note}; none is added. Set bias: true to have one")
        return False
    return section.choice("bias", (True, False), False)


def _mlp(kind: str, section: Section) -> Node:
    keys: dict[str, Any] = {"intermediate_dim": section.take("d_ff")}
    if kind == "glu":
        keys["activation_function"] = section.take("activation", "silu")
    keys["bias"] = _bias(section, "MLPs have biases in caramba by default")
    return Node(kind, section.take("d_model"), keys, section)


def _moe(section: Section) -> Node:
    keys = {"num_experts": section.take("num_experts", 8), "num_experts_per_token": section.take("top_k", 2)}
    keys["intermediate_dim"] = section.take("d_ff")
    section.refuse("bias", "experts have no biases. Set bias: false")
    balanced = section.choice("load_balancing", (True, False), False)
    weight = section.take("load_balancing_loss_weight", 1.0)
    for key in ("loss_type", "loss_temperature", "loss_temperature_schedule", "loss_temperature_schedule_params"):
        section.ignore(f"load_balancing_{key}", "the loss of the Switch Transformer balances experts")
    for key in ("gate_requires_grad", "up_requires_grad", "down_requires_grad"):
        section.refuse(key, "freeze parameters with `trainable` of a phase", True)
    return Node("moe", section.take("d_model"), {**keys, "router_aux_loss_coef": weight if balanced else 0.0}, section)


def _attention(section: Section) -> Node:
    width, mode = section.take("d_model"), section.choice("mode", ("standard", "gqa", "decoupled"), "standard")
    heads, kv_heads = section.number("n_heads"), section.number("n_kv_heads")
    if heads is None:
        raise section.error("n_heads", "missing. Set the number of query heads")
    keys: dict[str, Any] = {
        "mode": "gqa" if mode == "standard" and kv_heads not in (None, heads) else mode,
        "num_heads": heads,
    }
    if kv_heads is not None:
        keys["num_kv_heads"] = kv_heads
    if (size := section.number("attn_dim")) not in (None, width):
        keys["head_dim"] = size // heads
    _rope(section, keys)
    if mode == "decoupled":
        _decoupled(section, keys)
    else:
        for key in (
            "sem_dim",
            "geo_dim",
            "rope_semantic",
            "tie_qk",
            "null_attn",
            "decoupled_gate",
            "decoupled_gate_dynamic",
        ):
            section.ignore(key, f"no effect in mode {mode}")
    if window := section.take("local_window"):
        keys["sliding_window"] = window
    if section.choice("bias", (True, False), False):
        keys["bias"] = True
    if rate := section.take("dropout_p", 0.0):
        keys["dropout"] = rate
    section.refuse("learned_temp", "scores have a fixed scale")
    if section.take("is_causal", True) is not True:
        raise section.error(
            "is_causal", "false given, but a language model that predicts the next token is causal. Remove it"
        )
    for key in ("mem_block", "mem_activation_threshold"):
        section.refuse(key, "past tokens are not summarized")
    section.ignore("mem_summarize", "no effect without mem_block")
    section.ignore("q_chunk", "attention chooses its block size itself (model.attn_backend)")
    for key in ("dba_train_backend", "debug_fused_decode"):
        section.ignore(key, "XLA and its kernels compute attention; see model.attn_backend")
    return Node("attention", width, keys, section)


def _rope(section: Section, keys: dict[str, Any]) -> None:
    scaling = section.take("rope_scaling")
    base = section.number("rope_base", 10_000.0)
    if not section.choice("rope_enabled", (True, False), True):
        keys["rope"] = None
    elif isinstance(scaling, Mapping):
        renamed = {"rope_type": "type", "type": "type"}
        keys["rope"] = {"theta": base, **{renamed.get(key, key): value for key, value in scaling.items()}}
    elif scaling is not None:
        raise section.error("rope_scaling", f"{scaling!r} given, the section of a config.json expected, or null")
    else:
        keys["rope"] = {"theta": base}


def _decoupled(section: Section, keys: dict[str, Any]) -> None:
    keys["sem_dim"], keys["geo_dim"] = section.take("sem_dim"), section.take("geo_dim")
    dynamic = section.choice("decoupled_gate_dynamic", (True, False), False)
    if section.choice("decoupled_gate", (True, False), False) or dynamic:
        keys["gate"] = "dynamic" if dynamic else "static"
    for new, old in (("rope_semantic", "rope_semantic"), ("tie_qk", "tie_qk"), ("null_slot", "null_attn")):
        if section.choice(old, (True, False), False):
            keys[new] = True


_LAYERS: dict[str, Any] = {
    "RMSNormLayer": _rms_norm,
    "LayerNormLayer": lambda one: Node("layer_norm", one.take("d_model"), {"epsilon": one.take("eps", 1e-5)}, one),
    "LinearLayer": _linear,
    "AttentionLayer": _attention,
    "SwiGLULayer": lambda section: _mlp("swiglu", section),
    "GLULayer": lambda section: _mlp("glu", section),
    "MoELayer": _moe,
    "DropoutLayer": lambda one: Node("dropout", None, {"probability": one.take("p", 0.0)}, one),
}


def _as_llama(root: Node) -> dict[str, Any] | None:
    """The keys of `llama` or `dba` for a stack of their blocks; None for any other tree."""
    if [node.kind for node in root.layers] != ["nested", "rms_norm"] or root.kind != "stacked":
        return None
    unit, final_norm = root.layers
    shape = [[inner.kind for inner in node.layers] for node in unit.layers]
    if shape != [["rms_norm", "attention"], ["rms_norm", "swiglu"]] or any(
        node.kind != "residual" for node in unit.layers
    ):
        return None
    norms = [*unit.all_of("rms_norm"), final_norm]
    attention, mlp = unit.layers[0].layers[1].keys, unit.layers[1].layers[1].keys
    decoupled = attention["mode"] == "decoupled"
    unlike = {"dropout"} | ({"sliding_window"} if decoupled else {"rope_semantic"})
    if len({str(norm.keys) for norm in norms}) > 1 or attention["rope"] is None or unlike & attention.keys():
        return None
    keys = {key: value for key, value in attention.items() if key not in ("mode", "bias")}
    if attention.get("bias"):
        keys["attention_bias"] = True
    if mlp["bias"]:
        keys["mlp_bias"] = True
    if norms[0].keys.get("weight") is False:
        keys["use_layer_norm_weight"] = False
    keys |= {"num_layers": unit.keys["repeat"], "intermediate_dim": mlp["intermediate_dim"]}
    keys["layer_norm_epsilon"] = norms[0].keys["epsilon"]
    return {"type": "dba" if decoupled else "llama", **keys}
