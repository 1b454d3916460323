"""Times transformers' `generate`: python decode_torch.py FOLDER BATCH PROMPT NEW REPEATS DTYPE. Prints one JSON line."""

import json
import sys
import time

import numpy as np
import torch
import transformers


def main() -> None:
    """Warms up in a first call, then times the others."""
    folder, *numbers, dtype = sys.argv[1:7]
    batch, length, new, repeats = map(int, numbers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    prompts = torch.tensor(np.random.default_rng(0).integers(0, 1000, size=(batch, length)), device=device)
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    times = []
    with torch.no_grad():
        for _ in range(1 + repeats):
            began = time.perf_counter()
            rows = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)[:, length:].tolist()
            times.append(time.perf_counter() - began)
    rates = [batch * new / seconds for seconds in times[1:]]
    print(json.dumps({"tokens_per_second": rates, "first_s": times[0], "tokens": rows}))


if __name__ == "__main__":
    main()
