import math

import pytest

from jaxlm.core.types import StepInfo
from jaxlm.engine.hooks import CrashListener, NonFiniteError


def info(objective: float = 1.0, norm: float = 1.0, **more) -> StepInfo:
    return StepInfo(7, "train", {"train/objective": objective, "grad/norm/total": norm}, **more)


@pytest.mark.parametrize(("value", "key"), [(math.nan, "on_nan"), (math.inf, "on_inf"), (-math.inf, "on_inf")])
def test_crash_on_nan_and_on_inf_each_stop_at_their_own(value, key):
    off, on = {"on_nan": False, "on_inf": False}, {"on_nan": key == "on_nan", "on_inf": key == "on_inf"}
    other = {"on_nan": key != "on_nan", "on_inf": key != "on_inf"}
    for spoilt in (info(objective=value), info(norm=value)):
        CrashListener(**off)(spoilt)
        CrashListener(**other)(spoilt)
        with pytest.raises(NonFiniteError, match=f"step 7.*crash_{key}"):
            CrashListener(**on)(spoilt)
    CrashListener(on_nan=True, on_inf=True)(info())
