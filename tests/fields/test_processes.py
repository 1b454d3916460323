"""Fields that affect the process, not the plan: profiler, distributed, compilation cache, performance checks."""

import os
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxlm.core.distributed import DistributedConfig
from jaxlm.core.errors import ConfigError
from jaxlm.observe.profiler import ProfileHook, ProfilerConfig
from jaxlm.session.compilation.options import enable_compilation_cache
from jaxlm.session.startup import check_performance
from tests.fields.proofs import Outcome, outcome_of
from tests.fields.trees import merged, tree


def test_strict_performance_refuses_fallbacks():
    def check(base: dict[str, Any], **sections: Any) -> None:
        check_performance(Outcome(merged(base, sections)).plan)

    lax, strict = tree("gpt2"), merged(tree("gpt2"), {"trainer": {"strict_performance": True}})
    dropout = {"attn_pdrop": 0.1}
    check(strict)
    check(lax, model=dropout)
    with pytest.raises(ConfigError, match="strict_performance: attention uses the reference backend"):
        check(strict, model=dropout)
    # A backend that the configuration names is not a fallback, even if the platform has a faster one.
    check(strict, model={"attn_backend": "reference"})
    check(strict, model={"attn_backend": "reference", **dropout})


def test_profiler_fields(tmp_path):
    def recorded(**changes: Any) -> list[int]:
        config = ProfilerConfig(**{"start_step": 3, "num_steps": 4} | changes)
        phase = outcome_of(tree()).plan.phases[0]
        hook = ProfileHook(config, tmp_path, phase, first_step=2, until=phase.end, program=str, log=print)
        return [step for step in range(100) if hook.due(step)]

    assert [field.name for field in fields(ProfilerConfig)] == ["start_step", "num_steps"]
    assert [recorded(), recorded(start_step=8), recorded(num_steps=1)] == [[5, 9], [10, 14], [5, 6]]
    for wrong in ({"start_step": 0}, {"num_steps": 0}):
        assert "profiler" in Outcome(merged(tree(), {"trainer": {"profiler": wrong}})).error


def test_distributed_fields(monkeypatch):
    seen: list[Any] = []
    first, second = (f"{letter}{os.getpid()}:1" for letter in "ab")  # a machine has each process of an address once
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: seen.append((args, kwargs)))
    DistributedConfig(first, 2, 1, [0, 3]).join()
    times = {"initialization_timeout": 360, "heartbeat_timeout_seconds": 320, "shutdown_timeout_seconds": 300}
    assert seen.pop() == ((first, 2, 1), {"local_device_ids": [0, 3], **times})
    DistributedConfig(second, 2, 1, 3, *(timedelta(seconds=s) for s in (7, 8, 9))).join()
    times = {"initialization_timeout": 67, "heartbeat_timeout_seconds": 136, "shutdown_timeout_seconds": 9}
    assert seen == [((second, 2, 1), {"local_device_ids": [3], **times})]
    with pytest.raises(ConfigError, match="heartbeat_timeout"):
        DistributedConfig(heartbeat_timeout=timedelta(0)).join()
    for partial in (DistributedConfig("host:1"), DistributedConfig(num_processes=2), DistributedConfig(process_id=0)):
        with pytest.raises(ConfigError, match="Set all of coordinator_address, num_processes, process_id, or none"):
            partial.join()


def test_compilation_cache_dir(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        enable_compilation_cache(str(tmp_path))
        assert Path(jax.config.jax_compilation_cache_dir) == tmp_path
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
