"""nano on eight simulated devices, against one device."""

import pytest

from tests.models.test_sharding import check_layout, reports

LAYOUTS = ("fsdp8", "tp2_fsdp4_vocab")


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_device_with_only_the_expected_collectives(layout):
    check_layout(reports(LAYOUTS, "-m", "tests.systems.nanochat.sharded_nano"), layout)
