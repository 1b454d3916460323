"""`jaxlm bench` whose `--tune` tries one option instead of all."""

import sys

from jaxlm.commands import bench
from jaxlm.session.compilation import tuning

if __name__ == "__main__":
    tuning.CANDIDATES = {"cpu": ({"xla_cpu_prefer_vector_width": 512},)}
    tuning.size_candidates = lambda platform: []
    sys.exit(bench.main())
