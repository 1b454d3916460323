"""Every kind of YAML block in Levanter's configuration guide resolves to what the guide says of it.

The blocks here are our own, with the guide's keys. Where the guide itself lies beside the project, its blocks are read too.
"""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from jaxlm.config import RunConfig, read_config, run_id_of
from jaxlm.engine.save_policy import KeepRule
from jaxlm.engine.trackers.tensorboard import TensorboardConfig
from jaxlm.engine.trackers.wandb import WandbConfig
from jaxlm.models.gpt2 import Gpt2Config
from jaxlm.plan import make_plan

GUIDE = Path(__file__).parents[2] / "shared" / "seeds" / "levanter-configuration-guide.txt"
NUM_BLOCKS = 10  # in the guide; two of them are one file each of a pair

SOURCE = """
train_urls:
    - "gs://bucket/text/train.{1..16}-of-16.jsonl.gz"
validation_urls:
    - "gs://bucket/text/held_out.{1..2}-of-2.jsonl.gz"
cache_dir: "gs://bucket/tokens/"
"""
FILES = {"data.yaml": SOURCE}
BLOCKS = {
    "a whole run": """
data: !include data.yaml
model:
  type: gpt2
  hidden_dim: 96
  num_heads: 12
  num_layers: 2
  seq_len: 64
  gradient_checkpointing: true
  scale_attn_by_inverse_layer_idx: true
trainer:
  tracker:
    type: wandb
    project: "mine"
    tags: [ "text", "gpt2"]

  mp: p=f32,c=bfloat16
  model_axis_size: 1
  per_device_parallelism: 4

  train_batch_size: 512
optimizer:
  learning_rate: 6E-4
  weight_decay: 0.1
  min_lr_ratio: 0.1
""",
    "an include": "data: !include data.yaml\ntrainer:\n    num_train_steps: 2000000\n",
    "keep": "trainer:\n  checkpointer:\n    keep:\n      - every: 100\n        until: 1000\n      - every: 500\n",
    "wandb": "trainer:\n    tracker:\n        type: wandb\n        project: mine\n        entity: us\n",
    "wandb without its type": "trainer:\n    tracker:\n      project: mine\n      entity: us\n",
    "tensorboard": "trainer:\n    tracker:\n        type: tensorboard\n        logdir: logs\n",
    "two trackers": "trainer:\n  tracker:\n  - type: wandb\n    entity: us\n  - type: tensorboard\n    logdir: logs\n",
}


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> RunConfig:
        for name, content in {**FILES, "my-run.yaml": text}.items():
            (tmp_path / name).write_text(content)
        return read_config(tmp_path / "my-run.yaml")

    return read


def test_a_run_as_the_guide_writes_it(read):
    config = read(BLOCKS["a whole run"])
    assert config.data.train_urls == ["gs://bucket/text/train.{1..16}-of-16.jsonl.gz"]
    assert config.data.cache_dir == "gs://bucket/tokens/"
    model = config.model
    assert isinstance(model, Gpt2Config)
    assert (model.hidden_dim, model.num_layers, model.scale_attn_by_inverse_layer_idx) == (96, 2, True)
    assert config.trainer.trackers == [WandbConfig(project="mine", tags=["text", "gpt2"])]
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (6e-4, 0.1)
    plan = make_plan(config, run_id_of(config), 512)  # on the 8 devices of the tests
    assert (plan.batches.num_microbatches, plan.batches.microbatch) == (16, 32)
    assert str(plan.precision.compute) == "bfloat16"


def test_an_included_section_is_that_section(read):
    config = read(BLOCKS["an include"])
    assert config.data == read("data:\n" + re.sub(r"^", "    ", SOURCE, flags=re.MULTILINE)).data
    assert config.trainer.num_train_steps == 2_000_000


def test_the_keep_example(read):
    checkpointer = read(BLOCKS["keep"]).trainer.checkpointer
    assert checkpointer.keep == [KeepRule(100, 1000), KeepRule(500)]
    assert checkpointer.save_interval == timedelta(minutes=15)


def test_trackers_as_the_guide_writes_them(read):
    wandb, board = WandbConfig(project="mine", entity="us"), TensorboardConfig(logdir="logs")
    assert read(BLOCKS["wandb"]).trainer.trackers == [wandb]
    assert read(BLOCKS["wandb without its type"]).trainer.trackers == [wandb]
    assert read(BLOCKS["tensorboard"]).trainer.trackers == [board]
    assert read(BLOCKS["two trackers"]).trainer.trackers == [WandbConfig(entity="us"), board]


def blocks_of(guide: str) -> Iterator[str]:
    """The YAML blocks of a text that has lost its fences: they begin at a section, and end where prose begins."""
    block: list[str] = []
    for line in [*guide.splitlines(), "The end."]:
        begins = re.match(r"(# [\w-]+\.yaml|[a-z_]+:( |$))", line) is not None
        if not begins and not (block and re.match(r"\s|$", line)):
            if block:
                yield "\n".join(block).rstrip() + "\n"
            block = []
        elif line.startswith("# ") and block:
            yield "\n".join(block).rstrip() + "\n"
            block = [line]
        else:
            block.append(line)


@pytest.mark.skipif(not GUIDE.is_file(), reason="needs the guide")
def test_every_block_of_the_guide_itself_resolves(tmp_path):
    found = list(blocks_of(GUIDE.read_text(encoding="utf-8")))
    assert len(found) == NUM_BLOCKS
    for block in found:
        name = re.match(r"# (\S+)", block)
        (tmp_path / (name[1] if name else "block.yaml")).write_text(block)
    for number, block in enumerate(found):
        path = tmp_path / f"block-{number}.yaml"
        if "\ntrain_urls:" in block:  # the included file: a section
            block = "data:\n" + re.sub(r"^", "  ", block, flags=re.MULTILINE)
        elif block.startswith("checkpointer:"):
            block = "trainer:\n" + re.sub(r"^", "  ", block, flags=re.MULTILINE)
        path.write_text(block)
        config = read_config(path)
        make_plan(config, run_id_of(config), 50_257)
