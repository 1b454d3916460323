"""When phases may begin after one that distills layer by layer."""

from tests.plan.test_early_ends import check_start


def test_a_phase_may_begin_when_the_one_before_may_end():
    check_start({"objective": {"type": "blockwise", "teacher": "teacher"}}, 1)
