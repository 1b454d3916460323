"""Times jaxlm's generation: python decode_jaxlm.py FOLDER BATCH PROMPT NEW REPEATS DTYPE plain|int8. Prints one JSON line."""

import json
import sys
import time

import numpy as np

from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.unstacked import Generator
from jaxlm.session.load_model import open_model


def main() -> None:
    """Compiles in a first call, then times the others."""
    folder, *numbers, dtype, form = sys.argv[1:8]
    batch, length, new, repeats = map(int, numbers)
    model = open_model(folder, {"trainer.mp": dtype})
    with model.plan.layout.use():
        generator = Generator.of(model.for_inference(quantize=None if form == "plain" else form))
        prompts = np.random.default_rng(0).integers(0, 1000, size=(batch, length)).tolist()
        config = GenerationConfig(new, temperature=0.0)
        began = time.perf_counter()
        rows = generate_tokens(generator, prompts, config)
        first = time.perf_counter() - began
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            rows = generate_tokens(generator, prompts, config)
            times.append(time.perf_counter() - began)
    rates = [batch * new / seconds for seconds in times]
    print(json.dumps({"tokens_per_second": rates, "first_s": first, "tokens": rows}))


if __name__ == "__main__":
    main()
