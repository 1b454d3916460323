"""What layers with decoupled attention compute one by one."""

import pytest

from jaxlm.systems.upcycle.dba import DbaConfig
from tests.models.test_layerwise import SIZES, check_mixing, check_streams

DBA = DbaConfig(**SIZES, intermediate_dim=24, num_kv_heads=2, head_dim=4, sem_dim=8, geo_dim=8)


@pytest.mark.slow
def test_streams_are_those_of_a_pass_through_all_layers():
    check_streams(DBA)


@pytest.mark.slow
def test_mixing_is_the_softmax_that_attention_multiplies_values_with():
    check_mixing(DBA)
