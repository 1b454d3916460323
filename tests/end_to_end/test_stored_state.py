"""Optimizer states in 8 bits: two processes train like one, and a run keeps its format."""

import pytest

from tests.end_to_end.commands import check_close, end_of

RUN = ("--config_path", "run.yaml")
IN_8_BITS = (*RUN, "--optimizer.state", "{type: 8bit, min_size: 256}", "--trainer.num_train_steps", "6")


@pytest.mark.soak
def test_two_processes_train_like_one_and_a_run_keeps_its_format(workplace):
    one, two = workplace(8), workplace(4)
    for place in (one, two):
        place.write()
    told = one.finish(*IN_8_BITS).out
    assert "bytes a parameter (8 arrays, 16 moments in 8 bits)" in told, told
    for code, _, err in [end_of(process) for process in two.start_all(2, *IN_8_BITS)]:
        assert code == 0, err
    check_close(two.losses(), one.losses())
    refused = one.run(*RUN, "--trainer.num_train_steps", "8")
    assert refused.code == 2
    assert "does not match this configuration in optimizer" in refused.err
    assert "k_proj.weight.codes: checkpoint uint8[2, 2, 8, 32], this configuration has no such array" in refused.err
