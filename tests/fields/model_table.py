"""The fields of models: the effect of each on the parameters or on the training step's program."""

import dataclasses
import math

from tests.fields.proofs import (
    RANDOM_BITS,
    Allowed,
    Change,
    Constant,
    Entry,
    Initial,
    Program,
    Refused,
    Section,
    Shapes,
    ShownIn,
    Table,
    Value,
)
from tests.fields.trees import NODES

BFLOAT16 = {"trainer": {"mp": "p=f32,c=bfloat16"}}


def frequencies(theta: float, factor: float = 1.0, size: int = 8) -> Constant:
    """The table of rotary frequencies, Su et al. 2021, section 3.2.2, divided by a factor."""
    return Constant(*(theta ** (-i / size) / factor for i in range(0, size, 2)))


COMMON: dict[str, Entry] = {
    "model.seq_len": Change(32, Program(gains=r"tensor<1x16x32xi32>", alone=False)),
    "model.gradient_checkpointing": Change("full", Program(gains=r"stablehlo.dot_general", part="step")),
    "model.scan_layers": Change(False, Program(loses=r"stablehlo.while")),
    "model.attn_backend": Change("reference", Constant(-3.40282347e38)),
    "model.mlp_tile_tokens": Change(8, Program(gains=r"stablehlo\.while")),
    "model.pad_vocab_to_multiple_of": Change(80, Program(gains=r"stablehlo\.pad.*tensor<80x32x\w+>", alone=False)),
}
WINDOW = Change(5, Constant(5))
BIDIRECTIONAL = Change(True, Refused("next_token predicts each token from those before it, but with"))
LEARNED = {"type": "learned", "num_time_steps": 4}
TIMED = Change({"type": "sinusoidal"}, Refused("no tokens are hidden from a causal"))
WINDOWED = Change(True, Refused("given together with use_bidirectional_attention"))
SCALED_ROPE = Change({"type": "linear", "theta": 77.0, "factor": 2.0}, frequencies(77.0, 2.0))
EXPERTS: dict[str, Entry] = {
    "model.num_experts": Change(8, Shapes({r"^model.*router": (2, 8, 32)})),
    "model.router_aux_loss_coef": Change(0.3, Constant(0.3)),
    "model.router_z_loss_coef": Change(0.3, Constant(0.3)),
    "model.expert_dispatch": Change("padded", Program(gains=r"stablehlo.constant dense<-1> : tensor<i32>")),
    "model.expert_products": Change("ragged_dot", Program(loses=r"stablehlo.while")),
    "model.expert_capacity": Change(1.5, Program(gains=r"call @cumsum")),
    "model.expert_parts": Change(2, Program(gains=r"stablehlo.concatenate")),
}
_NO_EXPERTS = Shapes({r"^model.*router": None})
DENSE: dict[str, Entry] = {
    "model.decoder_sparse_step": Change(
        2, _NO_EXPERTS, also={"model": {"mlp_only_layers": [1], "dense_intermediate_dim": 24}}
    ),
    "model.mlp_only_layers": Change(
        [1], _NO_EXPERTS, also={"model": {"decoder_sparse_step": 2, "dense_intermediate_dim": 24}}
    ),
    "model.dense_intermediate_dim": Change(
        56,
        Shapes({r"^model\.body\.0\..*mlp\.up_proj\.weight": (1, 56, 32)}),
        also={"model": {"decoder_sparse_step": 2, "dense_intermediate_dim": 24}},
    ),
}

BALANCED: dict[str, Entry] = {
    **EXPERTS,
    "model.num_experts": Change(12, Shapes({r"^model.*router\.weight": (1, 12, 32)})),
    "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
    "model.decoder_sparse_step": Change(2, _NO_EXPERTS, also={"model": {"mlp_only_layers": [1]}}),
    "model.mlp_only_layers": Change([1], Shapes({r"^model\.body\.0\..*router\.weight": (1, 6, 32)})),
    "model.dense_intermediate_dim": Change(56, Shapes({r"^model\.body\.0\..*mlp\.up_proj\.weight": (1, 56, 32)})),
    "model.shared_expert_intermediate_dim": Change(40, Shapes({r"^model.*shared_expert.*up_proj": (1, 40, 32)})),
    "model.norm_topk_prob": Change(False, Program(loses=r"stablehlo.divide")),
    "model.routed_scaling_factor": Change(0.3, Constant(0.3)),
    "model.num_expert_groups": Change(3, Program(gains=r"dense<0xFF800000>")),
    "model.num_groups_per_token": Change(
        2,
        Program(gains=r"chlo.top_k\(%\w+, k = 2\)"),
        also={"model": {"num_expert_groups": 3}},
    ),
    "model.router_bias_step": Change(0.3, Constant(-0.3, part="step")),
}
FURTHER: dict[str, Entry] = {
    "model.mtp": Change(
        True,
        Allowed(
            "but the model has no layer that predicts the token after the next one",
            Value(lambda plan: plan.state_builder.abstract_initial_model.mtp.proj.weight.array.shape, (32, 64)),
        ),
        also={"objective": {"mtp_weight": 0.3}},
    ),
}
LATENT: dict[str, Entry] = {
    "model.rope": Change({"type": "linear", "theta": 77.0, "factor": 2.0}, frequencies(77.0, 2.0, 4)),
    **BALANCED,
    **FURTHER,
    "model.q_lora_rank": Change(None, Shapes({r"^model.*q_a_proj": None})),
    "model.kv_lora_rank": Change(16, Shapes({r"^model\.body\.1\..*kv_b_proj\.weight": (1, 4, 10, 16)})),
    "model.qk_nope_head_dim": Change(6, Shapes({r"^model\.body\.1\..*kv_b_proj\.weight": (1, 4, 12, 8)})),
    "model.qk_rope_head_dim": Change(6, Shapes({r"^model\.body\.1\..*with_mqa\.weight": (1, 14, 32)})),
    "model.v_head_dim": Change(8, Shapes({r"^model\.body\.1\..*o_proj\.weight": (1, 32, 4, 8)})),
    "model.rope_interleave": Change(False, Program(loses=r"tensor<\S*2x2xf32>")),
    "model.attention_bias": Change(True, Shapes({r"^model\.body\.1\..*with_mqa\.bias": (1, 12)})),
}

STATES: dict[str, Entry] = {
    "model.rope": SCALED_ROPE,
    "model.attention_interval": Change(1, Shapes({r"^model.*A_log": None})),
    "model.attention_layers": Change(
        [0, 1],
        Shapes({r"^model.*A_log": None}),
        also={"model": {"attention_interval": None, "attention_layers": [0]}},
    ),
    "model.num_state_heads": Change(4, Shapes({r"^model.*q_conv": (1, 4, 8, 4)})),
    "model.num_value_heads": Change(6, Shapes({r"^model.*A_log": (1, 2, 3)})),
    "model.state_key_dim": Change(16, Shapes({r"^model.*k_conv": (1, 2, 16, 4)})),
    "model.state_value_dim": Change(16, Shapes({r"^model.*v_conv": (1, 2, 2, 16, 4)})),
    "model.conv_size": Change(3, Shapes({r"^model.*q_conv": (1, 2, 8, 3)})),
}

GPT2: dict[str, Entry] = {
    **COMMON,
    "model.hidden_dim": Change(64, Shapes({r"^model\.tokens": (64, 64)})),
    "model.num_layers": Change(3, Shapes({r"^model.*q_proj\.weight": (3, 4, 8, 32)})),
    "model.num_heads": Change(2, Shapes({r"^model.*q_proj\.weight": (2, 2, 16, 32)})),
    "model.mlp_scale": Change(8, Shapes({r"^model.*up_proj\.weight": (2, 256, 32)})),
    "model.intermediate_dim": Change(50, Shapes({r"^model.*up_proj\.weight": (2, 50, 32)})),
    "model.initializer_range": Change(0.04, Initial(r"tokens|positions|proj\.weight", 2.0)),
    "model.layer_norm_epsilon": Change(1e-3, Constant(1e-3)),
    "model.activation_function": Change("relu", Program(loses=r"stablehlo.tanh", alone=False)),
    "model.embed_pdrop": Change(0.5, RANDOM_BITS),
    "model.resid_pdrop": Change(0.5, RANDOM_BITS),
    "model.attn_pdrop": Change(0.5, RANDOM_BITS),
    "model.scale_attn_weights": Change(False, Program(loses=r"0\.35355|3\.5355")),
    "model.scale_attn_by_inverse_layer_idx": Change(True, Program(gains=r"stablehlo.divide")),
    "model.upcast_attn": Change(True, Program(loses=r"dot_general.*bf16"), also=BFLOAT16),
    "model.use_bias": Change(False, Shapes({r"^model.*bias": None})),
    "model.tie_word_embeddings": Change(False, Shapes({r"^model\.head\.weight": (64, 32)})),
}

LLAMA: dict[str, Entry] = {
    **COMMON,
    "model.hidden_dim": Change(64, Shapes({r"^model\.tokens": (64, 64)})),
    "model.intermediate_dim": Change(64, Shapes({r"^model.*up_proj\.weight": (2, 64, 32)})),
    "model.num_layers": Change(3, Shapes({r"^model.*q_proj\.weight": (3, 4, 8, 32)})),
    "model.num_heads": Change(8, Shapes({r"^model.*q_proj\.weight": (2, 8, 4, 32)})),
    "model.num_kv_heads": Change(2, Shapes({r"^model.*k_proj\.weight": (2, 2, 8, 32)})),
    "model.head_dim": Change(16, Shapes({r"^model.*q_proj\.weight": (2, 4, 16, 32)})),
    "model.activation_function": Change("relu", Program(gains="call @relu", loses="call @silu", alone=False)),
    "model.initializer_range": Change(0.04, Initial(r"tokens|proj\.weight|head", 2.0)),
    "model.layer_norm_epsilon": Change(1e-3, Constant(1e-3)),
    "model.tie_word_embeddings": Change(True, Shapes({r"^model\.head": None})),
    "model.sliding_window": WINDOW,
    "model.rope": SCALED_ROPE,
    "model.attention_bias": Change(True, Shapes({r"^model.*q_proj\.bias": (2, 4, 8)})),
    "model.mlp_bias": Change(True, Shapes({r"^model.*up_proj\.bias": (2, 48)})),
    "model.hybrid_norm": Change(True, Shapes({r"^model.*mlp_post_norm\.weight": (2, 32)})),
    "model.input_embedding_norm": Change(True, Shapes({r"^model\.embed_norm\.weight": (32,)})),
    "model.use_layer_norm_weight": Change(False, Shapes({r"^model.*attn_norm\.weight": None})),
    "model.use_bidirectional_attention": BIDIRECTIONAL,
    "model.time_embedding": TIMED,
}

FLAX: dict[str, Entry] = {
    "model.seq_len": Change(32, Program(gains=r"tensor<1x16x32xi32>")),
    "model.gradient_checkpointing": COMMON["model.gradient_checkpointing"],
    "model.scan_layers": Change(False, Refused(r"model\.scan_layers: false given")),
    "model.attn_backend": Change("reference", Refused(r"model\.attn_backend: reference given")),
    "model.mlp_tile_tokens": Change(8, Refused(r"model\.mlp_tile_tokens: 8 given, but a Flax module")),
    "model.pad_vocab_to_multiple_of": Change(80, Refused(r"model\.pad_vocab_to_multiple_of: 80 given")),
    "model.factory": Change("examples.nnx_model:none", Refused(r"model\.factory: .*'none' in examples\.nnx_model")),
    "model.kwargs": Change({"width": 32, "depth": 2}, Shapes({r"^model.*blocks\.1\.qkv\.kernel": (32, 96)})),
    "model.axes": Change({"qkv": [None, "embed"]}, Refused(r"model\.axes: 'embed' is 32 in .* and 96 in .*qkv")),
}


def llama3(theta: float = 5e5, factor: float = 8.0, low: float = 1.0, high: float = 4.0, original: int = 8) -> Constant:
    """Llama 3's table: wavelengths that are long relative to the original context are stretched by `factor`."""
    plain = [theta ** (-i / 8) for i in range(0, 8, 2)]
    kept = [min(max((original * f / (2 * math.pi) - low) / (high - low), 0.0), 1.0) for f in plain]
    return Constant(*(f * (k + (1 - k) / factor) for f, k in zip(plain, kept, strict=True)))


def untruncated_yarn(original: int = 256, fast: float = 8.0, slow: float = 1.0) -> Constant:
    """YaRN's table for theta 16 and factor 4, with a ramp that does not start and end at whole pairs."""
    low, high = (8 * math.log(original / (n * 2 * math.pi)) / (2 * math.log(16)) for n in (fast, slow))
    return Constant(1.0, 1 / 2, 1 / 4, (1 - 0.75 * (3 - low) / (high - low)) / 8)


def _yarn_amplitude(mscale: float, mscale_all_dim: float) -> Constant:
    return Constant((0.1 * mscale * math.log(4) + 1) / (0.1 * mscale_all_dim * math.log(4) + 1))


def _longrope_amplitude(original: int, stretched: int) -> Constant:
    return Constant(math.sqrt(1 + math.log(stretched / original) / math.log(original)))


MSCALES = {"model": {"rope": {"mscale": 1.0, "mscale_all_dim": 1.0}}}
ROPES: Table = {
    "rope default": {
        "model.rope.theta": Change(77.0, frequencies(77.0)),
        "model.rope.partial_rotary_factor": Change(0.5, frequencies(1e4, size=4)),
    },
    "rope linear": {
        "model.rope.theta": Change(77.0, frequencies(77.0, 8.0)),
        "model.rope.partial_rotary_factor": Change(0.5, frequencies(1e4, 8.0, size=4)),
        "model.rope.factor": Change(16.0, frequencies(1e4, 16.0)),
    },
    "rope dynamic": {
        "model.rope.theta": Change(77.0, frequencies(77.0)),
        "model.rope.partial_rotary_factor": Change(0.5, frequencies(1e4, size=4)),
        "model.rope.factor": Change(16.0, Constant(16.0)),
        "model.rope.original_max_position_embeddings": Change(4, Constant(4.0)),
    },
    "rope llama3": {
        "model.rope.theta": Change(77.0, llama3(theta=77.0)),
        "model.rope.partial_rotary_factor": Change(0.5, Constant(llama3().numbers[0], 5e5**-0.5 / 8)),
        "model.rope.factor": Change(16.0, llama3(factor=16.0)),
        "model.rope.low_freq_factor": Change(0.5, llama3(low=0.5)),
        "model.rope.high_freq_factor": Change(2.0, llama3(high=2.0)),
        "model.rope.original_max_position_embeddings": Change(512, llama3(original=512)),
    },
    # With theta 16 the frequencies are 1, 1/2, 1/4 and 1/8; those beyond the ramp are divided by 4, those on it in part.
    "rope yarn": {
        "model.rope.theta": Change(77.0, Constant(1.0, 77**-0.25, 77**-0.5 * 0.75, 77**-0.75 / 2)),
        "model.rope.partial_rotary_factor": Change(0.5, Constant(1.0, 1 / 4)),
        "model.rope.factor": Change(16.0, Constant(0.1 * math.log(16.0) + 1)),
        "model.rope.beta_fast": Change(4.0, Constant(1.0, 1 / 2, 1 / 4, 1 / 8)),
        "model.rope.beta_slow": Change(2.0, Constant(1.0, 1 / 2, 1 / 4, 0.75 / 8)),
        "model.rope.attention_factor": Change(2.0, Constant(2.0)),
        "model.rope.mscale": Change(2.0, _yarn_amplitude(2.0, 1.0), also=MSCALES),
        "model.rope.mscale_all_dim": Change(2.0, _yarn_amplitude(1.0, 2.0), also=MSCALES),
        "model.rope.truncate": Change(False, untruncated_yarn()),
        "model.rope.original_max_position_embeddings": Change(512, Constant(1.0, 1 / 2, 1 / 4, 1 / 8)),
    },
    "rope proportional": {
        "model.rope.theta": Change(16.0, Constant(*(16.0 ** (-i / 8) for i in (0, 2)), 0.0, 0.0)),
        "model.rope.partial_rotary_factor": Change(0.25, Constant(1.0, 0.0, 0.0, 0.0)),
    },
    "rope longrope": {
        "model.rope.theta": Change(77.0, frequencies(77.0, 2.0)),
        "model.rope.partial_rotary_factor": Change(0.5, Refused(r"model\.rope\.short_factor: 4 factors.*\b2\b")),
        "model.rope.short_factor": Change([3.0] * 4, frequencies(1e4, 3.0)),
        "model.rope.long_factor": Change([3.0] * 4, frequencies(1e4, 3.0)),
        "model.rope.original_max_position_embeddings": Change(512, _longrope_amplitude(512, 131_072)),
        "model.rope.max_position_embeddings": Change(1000, _longrope_amplitude(8, 1000)),
        "model.rope.attention_factor": Change(2.0, Constant(2.0)),
    },
}


def local_layers(**others: int | None) -> Change:
    """Two layers of one kind instead of two kinds: the loop has one block."""
    return Change([0, 1], Program(loses=r"stablehlo.dot_general"), also={"model": {"local_layers": [0], **others}})


GEMMA: dict[str, Entry] = {
    "model.query_pre_attn_scalar": Change(64.0, Constant(64**-0.5)),
    "model.attn_soft_cap": Change(3.0, Constant(3.0)),
    "model.final_soft_cap": Change(3.0, Constant(3.0)),
    "model.sliding_window": WINDOW,
    "model.rope": SCALED_ROPE,
    "model.attention_bias": LLAMA["model.attention_bias"],
}
# The first layers attend to everything, so the loop has blocks of two kinds.
LATE_WINDOW: dict[str, Entry] = {
    "model.sliding_window": WINDOW,
    "model.rope": SCALED_ROPE,
    "model.max_window_layers": Change(1, Program(gains=r"stablehlo.dot_general")),
    "model.local_layers": local_layers(),
}
PATTERN = {"model.local_layers": local_layers(sliding_window_pattern=None)}
ROUTED = {"model": {"num_experts": 5, "num_experts_per_token": 2, "expert_dim": 24}}
INITIAL_LAMBDA = ShownIn("tests/systems/nanochat/test_nano.py::test_initialization")
# S layers of the base attend 8 tokens back, which are 9 keys.
NANO: dict[str, Entry] = {
    **COMMON,
    "model.mlp_tile_tokens": Change(8, Refused(r"model\.mlp_tile_tokens: 8 given, but the MLPs of nano")),
    "model.hidden_dim": Change(64, Shapes({r"^model\.tokens": (64, 64)})),
    "model.num_layers": Change(6, Shapes({r"^model.*q_proj\.weight": (6, 4, 8, 32)})),
    "model.num_heads": Change(2, Shapes({r"^model.*q_proj\.weight": (4, 2, 16, 32)})),
    "model.num_kv_heads": Change(2, Shapes({r"^model.*k_proj\.weight": (4, 2, 8, 32)})),
    "model.mlp_scale": Change(2, Shapes({r"^model.*up_proj\.weight": (4, 64, 32)})),
    "model.window_pattern": Change("L", Program(loses=r"dense<9>")),
    "model.short_window_fraction": Change(0.25, Constant(5, alone=True)),
    "model.short_window_multiple": Change(3, Constant(10, alone=True)),
    "model.rope": SCALED_ROPE,
    "model.rope_dtype": Change("float32", Program(loses=r"xbf16>")),
    "model.qk_scale": Change(1.2, Constant(1.2**2 * 8**-0.5)),
    "model.value_gate_channels": Change(8, Shapes({r"^model.*value_gates": (2, 4, 8)})),
    "model.value_gate_scale": Change(3.0, Constant(3.0)),
    "model.smear_channels": Change(24, Shapes({r"^model\.smear_gate": (24,), r"^model\.smear_lambda": ()})),
    "model.backout": Change(0.2, Shapes({r"^model\.backout_lambda": ()})),
    "model.final_soft_cap": Change(3.0, Constant(3.0)),
    "model.layer_norm_epsilon": Change(1e-3, Constant(1e-3)),
    "model.embed_init_std": Change(2.0, Initial(r"^tokens", 2.0)),
    "model.head_init_std": Change(0.002, Initial(r"^head", 2.0)),
    "model.mlp_init_scale": Change(2.0, Initial(r"up_proj", 2.0)),
    "model.gate_init_max": Change(0.02, Initial(r"value_gates", 2.0), also={"model": {"gate_init_max": 0.01}}),
    "model.first_resid_lambda": INITIAL_LAMBDA,
    "model.last_resid_lambda": INITIAL_LAMBDA,
    "model.first_x0_lambda": INITIAL_LAMBDA,
    "model.last_x0_lambda": INITIAL_LAMBDA,
    "model.lookup": Section(),
}
ALLOCATION = "tests/systems/nanochat/test_lookup.py"
LOOKUP: dict[str, Entry] = {
    "model.lookup.layers": Change([1, 2], Shapes({r"^model\.body\.lookups\.1\.keys_embedding": (80, 32)})),
    "model.lookup.num_entries": Change(100, Shapes({r"^model.*keys_embedding": (100, 32)})),
    "model.lookup.max_entries": ShownIn(f"{ALLOCATION}::test_no_token_gets_more_than_allowed"),
    "model.lookup.allocation": ShownIn(f"{ALLOCATION}::test_allocations_are_those_of_the_paper_and_of_nanochat"),
    "model.lookup.sample_tokens": ShownIn(f"{ALLOCATION}::test_prepare_computes_the_tables_once"),
    "model.lookup.mlp_dim": Change(48, Shapes({r"^model.*lookups.*up_proj\.weight": (48, 32)})),
    "model.lookup.tied": Change(False, Shapes({r"^model.*values_embedding": (80, 32)})),
    "model.lookup.key_norm": Change(False, Program(loses="stablehlo.rsqrt")),
    "model.lookup.score_scale": Change(0.75, Constant(0.75)),
}
NO_BIAS = Change(False, Shapes({r"^model.*q_proj\.bias": None}))
_TOPOLOGY = "tests/systems/topology/test_topology.py::"
_AS_A_FAMILY = ShownIn(f"{_TOPOLOGY}test_a_family_that_is_spelled_out_computes_the_same")


def _of(node: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    """The fields of a node in the topology of the base."""
    return {f"{NODES[node]}.{name}": entry for name, entry in entries.items()}


def _hidden_parts(part: str) -> str:
    return rf"^model\.body\.1\..*parts\.{part}\.parts"


TOPOLOGY: dict[str, Entry] = {
    **COMMON,
    "model.hidden_dim": Change(64, Shapes({r"^model\.tokens": (64, 64)})),
    "model.topology": Section(),
    "model.initializer_range": Change(0.04, Initial(r"tokens|proj\.weight|head", 2.0)),
    "model.tie_word_embeddings": Change(True, Shapes({r"^model\.head": None})),
    **{
        f"{path}.hidden_dim": Change(64, Refused(r"hidden_dim: 64 given, but 32 features come in"))
        for name, path in NODES.items()
        if name not in ("stacked", "nested", "residual")
    },
    **{f"{NODES[name]}.layers": Section() for name in ("stacked", "nested", "residual")},
    **_of("nested", {"repeat": Change(3, Shapes({r"^model\.body\.0\..*q_proj\.weight": (3, 4, 8, 32)}))}),
    **_of(
        "rms_norm",
        {
            "epsilon": Change(1e-3, Constant(1e-3)),
            "weight": Change(False, Shapes({r"^model\.body\.0\..*parts\.residual\.parts\.norm": None})),
        },
    ),
    **_of(
        "layer_norm",
        {
            "epsilon": Change(1e-3, Constant(1e-3)),
            "weight": ShownIn(f"{_TOPOLOGY}test_the_number_of_parameters_is_the_closed_form"),
            "bias": Change(False, Shapes({r"^model\.body\.0\..*parts\.residual_2\.parts\.norm\.bias": None})),
        },
    ),
    **_of(
        "attention",
        {
            "mode": Change("decoupled", Refused(r"mode: decoupled given without sem_dim")),
            "num_heads": Change(8, Shapes({r"^model\.body\.0\..*q_proj\.weight": (2, 8, 4, 32)})),
            "num_kv_heads": Change(2, Shapes({r"^model\.body\.0\..*k_proj\.weight": (2, 2, 8, 32)})),
            "head_dim": Change(16, Shapes({r"^model\.body\.0\..*q_proj\.weight": (2, 4, 16, 32)})),
            "rope": SCALED_ROPE,
            "sliding_window": WINDOW,
            "bias": Change(True, Shapes({r"^model\.body\.0\..*q_proj\.bias": (2, 4, 8)})),
            "output_bias": Change(True, Shapes({r"^model\.body\.0\..*o_proj\.bias": (2, 32)})),
            "dropout": Change(0.5, RANDOM_BITS),
            **dict.fromkeys(("sem_dim", "geo_dim", "rotary_dim", "num_key_heads"), _AS_A_FAMILY),
            **dict.fromkeys(("rope_semantic", "tie_qk", "gate", "null_slot"), _AS_A_FAMILY),
        },
    ),
    **_of("dropout", {"probability": Change(0.5, RANDOM_BITS)}),
    **_of(
        "swiglu",
        {
            "intermediate_dim": Change(64, Shapes({r"^model\.body\.0\..*up_proj\.weight": (2, 64, 32)})),
            "bias": Change(True, Shapes({r"^model\.body\.0\..*up_proj\.bias": (2, 48)})),
        },
    ),
    **_of(
        "glu",
        {
            "intermediate_dim": Change(64, Shapes({rf"{_hidden_parts('residual_2')}.*up_proj\.weight": (1, 64, 32)})),
            "activation_function": Change("relu", Program(gains="call @relu")),
            "bias": Change(True, Shapes({rf"{_hidden_parts('residual_2')}.*up_proj\.bias": (1, 40)})),
        },
    ),
    **_of(
        "mlp",
        {
            "intermediate_dim": Change(64, Shapes({rf"{_hidden_parts('residual_3')}.*up_proj\.weight": (1, 64, 32)})),
            "activation_function": Change("relu", Program(gains="call @relu", loses=r"stablehlo\.tanh")),
            "bias": Change(False, Shapes({rf"{_hidden_parts('residual_3')}.*bias": None})),
        },
    ),
    **_of(
        "moe",
        {
            "intermediate_dim": Change(48, Shapes({rf"{_hidden_parts('residual_4')}.*up_proj": (1, 4, 32, 48)})),
            "activation_function": Change("relu", Program(gains="call @relu")),
            "num_experts": Change(8, Shapes({r"^model.*router": (1, 8, 32)})),
            "num_experts_per_token": Change(2, Program(gains=r"chlo.top_k\(%\w+, k = 2\)")),
            "norm_topk_prob": Change(False, Program(loses=r"stablehlo.divide")),
            "router_aux_loss_coef": Change(0.3, Constant(0.3)),
            "router_z_loss_coef": Change(0.3, Constant(0.3)),
        },
    ),
    **_of(
        "linear",
        {
            "output_dim": Change(48, Refused(r"x has 32 features and f\(x\) has 48")),
            "bias": Change(True, Shapes({rf"{_hidden_parts('residual_5')}.*bias": (1, 32)})),
        },
    ),
}

DROPOUTS: dict[str, Entry] = {
    f"model.{name}_dropout": Change(0.5, RANDOM_BITS) for name in ("attention", "residual", "embedding")
}
BIASED: dict[str, Entry] = {
    "model.rope": SCALED_ROPE,
    "model.attention_bias": LLAMA["model.attention_bias"],
    "model.mlp_bias": LLAMA["model.mlp_bias"],
}
HEAD_NORMS = Change(True, Shapes({r"^model.*q_norm\.weight": (2, 4, 8)}))


def _windows(every: int, window: int) -> dict[str, Entry]:
    return {
        "model.rope": SCALED_ROPE,
        "model.sliding_window": WINDOW,
        "model.sliding_window_pattern": Change(every, Program(loses=f"dense<{window}>")),
        **PATTERN,
    }


RELATIVES: Table = {
    "seed_oss": {
        **BIASED,
        "model.attention_bias": NO_BIAS,
        "model.attention_out_bias": Change(True, Shapes({r"^model.*o_proj\.bias": (2, 32)})),
        **{name: DROPOUTS[name] for name in ("model.attention_dropout", "model.residual_dropout")},
    },
    "hunyuan_v1_dense": {name: BIASED[name] for name in ("model.rope", "model.attention_bias")},
    "ernie4_5": BIASED,
    "arcee": BIASED,
    "helium": BIASED,
    "glm": {"model.rope": SCALED_ROPE, "model.attention_bias": NO_BIAS},
    "cohere": {
        "model.rope": SCALED_ROPE,
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.qk_layernorm": HEAD_NORMS,
        "model.logit_scale": Change(0.3, Constant(0.3)),
    },
    "cohere2": {
        **_windows(1, 4096),
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.logit_scale": Change(0.3, Constant(0.3)),
    },
    "starcoder2": {
        "model.rope": SCALED_ROPE,
        "model.sliding_window": WINDOW,
        "model.attention_bias": NO_BIAS,
        "model.mlp_bias": Change(False, Shapes({r"^model.*up_proj\.bias": None})),
        **DROPOUTS,
    },
    "stablelm": {
        "model.rope": SCALED_ROPE,
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.qk_layernorm": HEAD_NORMS,
        "model.use_parallel_residual": Change(True, Shapes({r"^model.*mlp_norm": None})),
    },
    "exaone4": _windows(1, 4096),
    "ministral": _windows(1, 32768),
    "cwm": {**_windows(1, 8192), "model.mlp_bias": LLAMA["model.mlp_bias"]},
    "ministral3": {
        "model.rope": SCALED_ROPE,
        "model.sliding_window": WINDOW,
        "model.query_scaling": Change(0.3, Constant(0.3)),
    },
}

HYBRID_EXPERTS: dict[str, Entry] = {
    **STATES,
    **EXPERTS,
    "model.num_experts": Change(8, Shapes({r"^model.*router": (1, 8, 32)})),
    "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
    "model.shared_expert_intermediate_dim": Change(40, Shapes({r"^model.*shared_expert.*up_proj": (1, 40, 32)})),
}

TABLE: Table = {
    "remat": {
        "model.gradient_checkpointing.modules": Change(
            "attn|mlp", Program(gains=r"stablehlo\.dot_general", part="step")
        )
    },
    "offload": {  # the program for CPUs has one memory: what is saved is no longer recomputed
        "model.gradient_checkpointing.save": Change(
            ["attention"], Program(loses=r"stablehlo\.dot_general", part="step")
        ),
        "model.gradient_checkpointing.offload": Change(
            ["residual", "query"], Program(loses=r"stablehlo\.dot_general", part="step")
        ),
    },
    "timed": {
        "model.time_embedding.type": Change("learned", Refused("type: learned given without num_time_steps")),
        "model.time_embedding.dim": Change(6, Shapes({r"^model\.time\.up_proj\.weight": (6, 6)})),
        "model.time_embedding.num_time_steps": Change(
            6, Shapes({r"^model\.time\.table": (6, 10)}), also={"model": {"time_embedding": LEARNED}}
        ),
    },
    "nano": NANO,
    "lookup": LOOKUP,
    "gpt2": GPT2,
    "llama": LLAMA,
    "flax": FLAX,
    **ROPES,
    "gemma": {"model.rope": SCALED_ROPE, "model.attention_bias": LLAMA["model.attention_bias"]},
    "gemma2": {**GEMMA, **PATTERN, "model.sliding_window_pattern": Change(1, Program(loses="dense<4096>"))},
    "gemma3": {
        **GEMMA,
        **PATTERN,
        "model.sliding_window_pattern": Change(1, Program(loses="dense<512>")),
        "model.local_rope": SCALED_ROPE,
        "model.use_bidirectional_attention": BIDIRECTIONAL,
    },
    "gemma4": {
        "model.local_layers": Change(
            [],
            Shapes({r"^model\.body\.0\.": None}),
            also={"model": {"sliding_window_pattern": None, "local_layers": [0]}},
        ),
        "model.rope": Change(SCALED_ROPE.value, frequencies(77.0, 2.0, size=16)),
        "model.local_rope": SCALED_ROPE,
        "model.sliding_window": WINDOW,
        "model.sliding_window_pattern": Change(1, Program(loses="dense<1024>")),
        "model.final_soft_cap": Change(3.0, Constant(3.0)),
        "model.global_head_dim": Change(24, Shapes({r"^model\.body\.1\..*q_proj\.weight": (1, 4, 24, 32)})),
        "model.num_global_kv_heads": Change(1, Shapes({r"^model\.body\.1\..*k_proj\.weight": (1, 1, 16, 32)})),
        "model.keys_are_values": Change(False, Shapes({r"^model\.body\.1\..*v_proj\.weight": (1, 2, 16, 32)})),
        "model.num_kv_shared_layers": Change(
            2, Shapes({r"^model\.body\.0\..*k_proj\.weight": (1, 4, 8, 32)}), also={"model": {"num_layers": 4}}
        ),
        "model.double_wide_mlp": Change(
            True,
            Shapes({r"^model\.body\.2\..*up_proj\.weight": (1, 96, 32)}),
            also={"model": {"num_layers": 4, "num_kv_shared_layers": 2}},
        ),
        "model.layer_input_dim": Change(6, Shapes({r"^model\.layer_inputs\.table": (64, 12)})),
        "model.num_experts": Change(8, Shapes({r"^model\.body\.1\..*router\.weight": (1, 8, 32)}), also=ROUTED),
        "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)"), also=ROUTED),
        "model.expert_dim": Change(40, Shapes({r"^model\.body\.1\..*experts.*up_proj": (1, 5, 32, 40)}), also=ROUTED),
        **{
            f"model.{name}": dataclasses.replace(EXPERTS[f"model.{name}"], also=ROUTED)
            for name in (
                *("router_aux_loss_coef", "router_z_loss_coef"),
                *("expert_dispatch", "expert_products", "expert_capacity", "expert_parts"),
            )
        },
    },
    "gpt_neox": {
        "model.use_parallel_residual": Change(False, Program(gains=r"stablehlo.add", part="step")),
        "model.rope": Change({"theta": 77.0, "partial_rotary_factor": 0.5}, frequencies(77.0, size=4)),
        "model.attention_bias": NO_BIAS,
    },
    "mistral": {"model.sliding_window": WINDOW, "model.rope": SCALED_ROPE},
    "dba": {
        **{f"model.{name}": LLAMA[f"model.{name}"] for name in ("mlp_bias", "hybrid_norm", "use_layer_norm_weight")},
        "model.sliding_window": WINDOW,
        # Both tables depend on geo_dim too.
        "model.rope": Change(SCALED_ROPE.value, Constant(*frequencies(77.0, 2.0).numbers, alone=True)),
        "model.sem_dim": Change(8, Shapes({r"^model.*q_sem\.weight": (2, 4, 2, 32)})),
        "model.geo_dim": Change(16, Shapes({r"^model.*q_geo\.weight": (2, 4, 4, 32)})),
        "model.num_key_heads": Change(2, Shapes({r"^model.*k_geo\.weight": (2, 2, 8, 32)})),
        "model.rotary_dim": Change(16, Constant(*frequencies(1e4, size=16).numbers, alone=True)),
        "model.rope_semantic": Change(True, Program(gains=r"stablehlo\.sine")),
        "model.tie_qk": Change(True, Shapes({r"^model.*k_sem": None})),
        "model.gate": Change("dynamic", Shapes({r"^model.*gate\.proj\.weight": (2, 4, 32)})),
        "model.null_slot": Change(True, Shapes({r"^model.*null_slot\.values": (2, 4, 8)})),
        "model.attention_bias": Change(True, Shapes({r"^model.*q_sem\.bias": (2, 4, 4)})),
        "model.output_bias": Change(True, Shapes({r"^model.*o_proj\.bias": (2, 32)})),
    },
    "topology": TOPOLOGY,
    "mixtral": {
        "model.sliding_window": WINDOW,
        "model.rope": SCALED_ROPE,
        **EXPERTS,
        "model.num_experts_per_token": Change(2, Program(gains=r"chlo.top_k\(%\w+, k = 2\)")),
    },
    "mpt": {
        "model.alibi_bias_max": Change(4.0, Constant(1 / 2, 1 / 4, 1 / 8, 1 / 16)),
        "model.softmax_scale": Change(0.3, Constant(0.3)),
        "model.clip_qkv": Change(0.3, Constant(0.3)),
    },
    "olmo": {
        "model.rope": SCALED_ROPE,
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.clip_qkv": Change(3.0, Constant(3.0)),
    },
    "olmo2": {"model.rope": SCALED_ROPE, "model.attention_bias": LLAMA["model.attention_bias"]},
    "olmo3": {
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.rope": SCALED_ROPE,
        "model.local_rope": SCALED_ROPE,
        "model.sliding_window": WINDOW,
        "model.sliding_window_pattern": Change(1, Program(loses="dense<4096>")),
        **PATTERN,
    },
    "granite": {
        "model.rope": SCALED_ROPE,
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.mlp_bias": LLAMA["model.mlp_bias"],
        "model.embedding_multiplier": Change(3.0, Constant(3.0)),
        "model.attention_multiplier": Change(0.3, Constant(0.3)),
        "model.residual_multiplier": Change(0.7, Constant(0.7)),
        "model.logits_scaling": Change(5.0, Constant(1 / 5)),
        "model.attention_dropout": Change(0.5, RANDOM_BITS),
    },
    "smollm3": {
        "model.rope": SCALED_ROPE,
        "model.no_rope_layer_interval": Change(1, Program(loses="stablehlo.cosine")),
        "model.unrotated_layers": Change(
            [0, 1],
            Program(loses="stablehlo.cosine"),
            also={"model": {"no_rope_layer_interval": None, "unrotated_layers": [0]}},
        ),
        "model.sliding_window": WINDOW,
        "model.local_layers": Change(
            [], Program(loses=r"dense<5>"), also={"model": {"sliding_window": 5, "local_layers": [1]}}
        ),
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.mlp_bias": LLAMA["model.mlp_bias"],
    },
    "glm4": {
        "model.rope": SCALED_ROPE,
        "model.attention_bias": NO_BIAS,
    },
    **RELATIVES,
    "phi3": {"model.sliding_window": WINDOW, "model.rope": SCALED_ROPE},
    "qwen2": {**LATE_WINDOW, "model.use_bidirectional_attention": WINDOWED, "model.time_embedding": TIMED},
    "qwen3": {
        **LATE_WINDOW,
        "model.use_bidirectional_attention": WINDOWED,
        "model.time_embedding": TIMED,
        "model.attention_bias": LLAMA["model.attention_bias"],
    },
    "qwen3_5": {**STATES, **FURTHER},
    "qwen3_5_moe": {**HYBRID_EXPERTS, **FURTHER},
    "qwen3_next": {
        **HYBRID_EXPERTS,
        **FURTHER,
        "model.norm_topk_prob": Change(False, Program(loses=r"stablehlo.divide")),
    },
    "olmo_hybrid": {
        **STATES,
        "model.negative_eigenvalues": Change(False, Program(loses=r"stablehlo.constant dense<2.000000e\+00>")),
    },
    "olmoe": {
        "model.sliding_window": WINDOW,
        "model.rope": SCALED_ROPE,
        **EXPERTS,
        "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.clip_qkv": Change(0.3, Constant(0.3)),
        "model.norm_topk_prob": Change(True, Program(gains=r"stablehlo.divide")),
    },
    "granitemoe": {
        "model.sliding_window": WINDOW,
        "model.rope": SCALED_ROPE,
        **EXPERTS,
        "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.embedding_multiplier": Change(3.0, Constant(3.0)),
        "model.attention_multiplier": Change(0.3, Constant(0.3)),
        "model.residual_multiplier": Change(0.7, Constant(0.7)),
        "model.logits_scaling": Change(5.0, Constant(1 / 5)),
    },
    "minimax_m2": {
        "model.sliding_window": WINDOW,
        "model.rope": SCALED_ROPE,
        **EXPERTS,
        "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
        "model.router_bias_step": Change(0.3, Constant(-0.3, part="step")),
    },
    "gpt_oss": {
        **PATTERN,
        "model.sliding_window": WINDOW,
        "model.sliding_window_pattern": Change(1, Program(loses="dense<128>")),
        "model.rope": SCALED_ROPE,
        **EXPERTS,
        "model.num_experts": Change(8, Shapes({r"^model.*router\.weight": (2, 8, 32)})),
        "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
        "model.swiglu_alpha": Change(0.3, Constant(0.3)),
        "model.swiglu_limit": Change(3.0, Constant(3.0)),
        "model.attention_bias": NO_BIAS,
    },
    "glm4_moe": {
        "model.sliding_window": WINDOW,
        "model.rope": SCALED_ROPE,
        **BALANCED,
        **FURTHER,
        "model.use_qk_norm": Change(True, Shapes({r"^model.*body\.1\..*q_norm\.weight": (1, 8)})),
        "model.attention_bias": NO_BIAS,
    },
    "glm4_moe_lite": LATENT,
    "mistral4": {
        **{key: entry for key, entry in LATENT.items() if key not in ("model.router_bias_step", "model.mtp")},
        "model.query_scaling": Change(0.3, Constant(0.3)),
        "model.num_expert_groups": Change(3, Program(gains=r"tensor<\S*x3x2xf32>")),
        "model.mlp_only_layers": Change([1], Shapes({r"^model\.body\.0\..*router\.weight": (1, 6, 32)})),
    },
    "deepseek_v3": {
        **LATENT,
        "model.num_expert_groups": Change(2, Program(gains=r"tensor<\S*x2x3xf32>")),
        "model.num_groups_per_token": Change(3, Program(gains=r"chlo.top_k\(%\w+, k = 3\)")),
        "model.mlp_only_layers": Change([1], Shapes({r"^model\.body\.0\..*router\.weight": (1, 6, 32)})),
    },
    "qwen2_moe": {
        "model.sliding_window": WINDOW,
        "model.rope": SCALED_ROPE,
        **EXPERTS,
        **DENSE,
        "model.local_layers": local_layers(sliding_window=5),
        "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
        "model.shared_expert_intermediate_dim": Change(40, Shapes({r"^model.*shared_expert.*up_proj": (2, 40, 32)})),
        "model.norm_topk_prob": Change(True, Program(gains=r"stablehlo.divide")),
        "model.qkv_bias": NO_BIAS,
    },
    "qwen3_moe": {
        "model.sliding_window": WINDOW,
        "model.rope": SCALED_ROPE,
        **EXPERTS,
        **DENSE,
        "model.num_experts_per_token": Change(4, Program(gains=r"chlo.top_k\(%\w+, k = 4\)")),
        "model.attention_bias": LLAMA["model.attention_bias"],
        "model.norm_topk_prob": Change(False, Program(loses=r"stablehlo.divide")),
    },
}
