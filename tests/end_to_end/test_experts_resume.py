"""Kills of mixtures of experts, on one and on two processes. `tests/systems/test_state_contract.py` shows their states."""

import re

import pytest

HYBRID = {
    "type": "qwen3_5_moe",
    **{"head_dim": 8, "num_state_heads": 2, "num_value_heads": 4, "state_key_dim": 8, "state_value_dim": 8},
    **{"attention_interval": 2, "num_experts": 4, "num_experts_per_token": 2, "shared_expert_intermediate_dim": 24},
}
LATENT = "biases behind latent attention"
ROUTERS = {
    "a loss of the router, in a hybrid": {**HYBRID, "router_aux_loss_coef": 0.1},
    "biases that move by a rule": {
        "type": "glm4_moe",
        **{"head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "shared_expert_intermediate_dim": 24},
        **{"dense_intermediate_dim": 48, "router_bias_step": 1e-3},
    },
    "sinks, and experts with biases": {
        "type": "gpt_oss",
        **{"head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "sliding_window": 8},
    },
    LATENT: {
        "type": "glm4_moe_lite",
        **{"num_experts": 4, "num_experts_per_token": 2, "shared_expert_intermediate_dim": 24},
        **{"dense_intermediate_dim": 48, "router_bias_step": 1e-3, "q_lora_rank": 12, "kv_lora_rank": 8},
        **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6},
    },
}


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("router", ROUTERS)
def test_experts_go_on_to_the_bit(workplace, router, processes):
    """All processes kill themselves, and both start again."""
    keys = {f"--model.{key}": str(value) for key, value in ROUTERS[router].items()}
    words = ("--config_path", "run.yaml", "--trainer.num_train_steps", "12", *(w for key in keys.items() for w in key))
    whole, killed = workplace(), workplace()
    for place in (whole, killed):
        path = place.write()
        if router == LATENT:
            path.write_text(path.read_text().replace("  num_kv_heads: 2\n", ""))
    place = {"module": "tests.end_to_end.dies", "JAXLM_TEST_DIES_AT": "11"}
    assert all(end.code != 0 for end in killed.run_all(processes, *words, **place))
    for ends in (whole.run_all(processes, *words), resumed := killed.run_all(processes, *words)):
        assert [end.code for end in ends] == [0] * processes, ends
    assert re.search(r"resuming, from .*step-(5|10)$", resumed[0].out, re.MULTILINE)
    assert killed.losses() == whole.losses()
    digest = whole.digest("step-12")
    assert killed.digest("step-12") == digest
    earlier = whole.digest("step-5")
    for path in digest:
        if path.startswith("model.") and path.endswith("correction_bias"):
            assert digest[path] != earlier[path]
