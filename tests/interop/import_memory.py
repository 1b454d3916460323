"""Run by test_memory.py on eight simulated devices: imports a folder under FSDP 8 and prints time and memory as JSON.

The first argument is the folder, the second is the importing library: `jaxlm` or `transformers`.
"""

import json
import sys
import threading
import time
from pathlib import Path


def anonymous_bytes() -> int:
    """Anonymous memory of this process; pages of memory-mapped files do not count, as they can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


class Peak(threading.Thread):
    """Samples the memory while the block runs."""

    def __enter__(self):
        self.before = self.peak = anonymous_bytes()
        self.stop = False
        self.start()
        return self

    def run(self):
        while not self.stop:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.002)

    def __exit__(self, *_):
        self.stop = True
        self.join()
        self.after = anonymous_bytes()


def with_jaxlm(folder: Path) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
    from jaxlm.interop.hf.folder import load_model, open_folder
    from jaxlm.models.base import vocab_axis

    opened = open_folder(folder)
    axes = {"embed": opened.config.hidden_dim, "vocab": opened.vocab_size}
    where = make_layout(mesh_shape(8, replica=1, model=1), AxisMappings("batch", ("embed",), (), {}, {}), axes)

    def build():
        model = opened.config.build(vocab_axis(opened.vocab_size), key=jax.random.key(0))
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)

    abstract = jax.eval_shape(build)
    began = time.perf_counter()
    with Peak() as memory:
        model = jax.block_until_ready(load_model(folder, abstract, opened.config, where))
    seconds = time.perf_counter() - began
    leaves = jax.tree.leaves(model)
    size = sum(leaf.nbytes for leaf in leaves)
    largest = max(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return {
        "model": size,
        "largest_slice": largest,
        "above_model": memory.peak - memory.before - size,
        "seconds": seconds,
    }


def with_transformers(folder: Path) -> dict[str, float]:
    import torch
    import transformers

    began = time.perf_counter()
    with Peak() as memory:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"model": size, "above_model": memory.peak - memory.before - size, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    print(json.dumps({"jaxlm": with_jaxlm, "transformers": with_transformers}[sys.argv[2]](Path(sys.argv[1]))))
