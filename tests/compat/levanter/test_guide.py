"""Every kind of YAML block in Levanter's configuration guide resolves as the guide documents; so do its defaults.

The blocks here are our own, with the guide's keys. If the guide itself is beside the project, its blocks are tested too.
"""

import ast
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import yaml

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.chat import ChatFormat
from jaxlm.engine.checkpoint.policy import KeepRule
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mpt import MptConfig
from jaxlm.observe import environment
from jaxlm.observe.trackers import RunInfo
from jaxlm.observe.trackers.tensorboard import TensorboardConfig
from jaxlm.observe.trackers.wandb import WandbConfig
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.plan.load_config import decode_run, read_config, run_id_of
from jaxlm.plan.plan import make_plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import ConfigSource

GUIDE = Path(__file__).parents[4] / "shared" / "seeds" / "levanter-configuration-guide.txt"
NUM_BLOCKS = 10  # in the guide; two of them are a pair of files

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
TINY = "model: {seq_len: 16, hidden_dim: 32, intermediate_dim: 32, num_layers: 1, num_heads: 4}\n"


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> RunConfig:
        for name, content in {**FILES, "my-run.yaml": text}.items():
            (tmp_path / name).write_text(content)
        return read_config(tmp_path / "my-run.yaml")

    return read


def test_the_guides_whole_run(read):
    config = read(BLOCKS["a whole run"])
    assert config.data.train_urls == ["gs://bucket/text/train.{1..16}-of-16.jsonl.gz"]
    assert config.data.cache_dir == "gs://bucket/tokens/"
    model = config.model
    assert isinstance(model, Gpt2Config)
    assert (model.hidden_dim, model.num_layers, model.scale_attn_by_inverse_layer_idx) == (96, 2, True)
    assert config.trainer.trackers == [WandbConfig(project="mine", tags=["text", "gpt2"])]
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (6e-4, 0.1)
    plan = make_plan(config, run_id_of(config), 512)  # on the tests' 8 devices
    assert plan.batches.train.first.shape == (16, 32)
    assert str(plan.precision.compute) == "bfloat16"


def test_an_included_file_becomes_the_section(read):
    config = read(BLOCKS["an include"])
    assert config.data == read("data:\n" + re.sub(r"^", "    ", SOURCE, flags=re.MULTILINE)).data
    assert config.trainer.num_train_steps == 2_000_000


def test_the_keep_example(read):
    checkpointer = read(BLOCKS["keep"]).trainer.checkpointer
    assert checkpointer.keep == [KeepRule(100, 1000), KeepRule(500)]
    assert checkpointer.save_interval == timedelta(minutes=15)


def test_the_guides_trackers(read):
    wandb, board = WandbConfig(project="mine", entity="us"), TensorboardConfig(logdir="logs")
    assert read(BLOCKS["wandb"]).trainer.trackers == [wandb]
    assert read(BLOCKS["wandb without its type"]).trainer.trackers == [wandb]
    assert read(BLOCKS["tensorboard"]).trainer.trackers == [board]
    assert read(BLOCKS["two trackers"]).trainer.trackers == [WandbConfig(entity="us"), board]


def fresh(text: str = "{}") -> RunConfig:
    return decode_run(ConfigSource(yaml.safe_load(text)), "mine")


@pytest.mark.trap("T10", "D1")
def test_default_learning_rate():
    assert fresh().optimizer.learning_rate == 1e-4


@pytest.mark.trap("T10", "D2")
def test_default_weight_decay():
    assert fresh().optimizer.weight_decay == 0.0


@pytest.mark.trap("T10", "D3")
def test_default_batch_size():
    assert fresh().trainer.train_batch_size == 32


def test_every_other_documented_default():
    trainer, optimizer = fresh().trainer, fresh().optimizer
    assert (trainer.seed, trainer.num_train_steps, trainer.steps_per_eval, trainer.max_eval_batches) == (
        0,
        400_000,
        1000,
        None,
    )
    assert (trainer.mp, trainer.log_dir, trainer.batch_axis, trainer.fsdp_axis) == ("f32", "logs/", "batch", "embed")
    assert (trainer.tensor_parallel_axes, trainer.model_axis_size) == (None, 1)
    assert (trainer.load_checkpoint, trainer.initialize_from) == (None, None)
    assert trainer.checkpointer.save_interval == timedelta(minutes=15)
    assert trainer.checkpointer.keep == [KeepRule(10_000)]
    assert isinstance(optimizer, AdamConfig)
    assert (optimizer.lr_schedule, optimizer.min_lr_ratio, optimizer.warmup, optimizer.decay) == (
        "cosine",
        0.1,
        0.01,
        None,
    )
    assert (optimizer.rewarmup, optimizer.cycles, optimizer.cycle_length) == (0.0, None, None)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.max_grad_norm) == (0.9, 0.95, 1e-8, 1.0)


def test_the_documented_defaults_that_differ_are_listed():
    section = TABLE.read_text(encoding="utf-8").partition("## Documented defaults that differ")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| .+? \| `(.+?)` \|", section, re.MULTILINE)
    assert len(rows) == section.count("\n|") - 2
    usual, tracked = encode(fresh()), encode(fresh("trainer: {tracker: {type: wandb}}"))
    for key, default in rows:
        node = tracked if key.startswith("trainer.tracker.") else usual
        for name in key.split("."):
            node = node[name]
        assert node == yaml.safe_load(default), key


@pytest.mark.trap("D9")
def test_checkpoints_go_below_the_run_id():
    plan = make_plan(fresh(TINY), "mine", 64)
    assert plan.checkpoints.location == Path("checkpoints/mine")
    flat = fresh(TINY + "trainer: {checkpointer: {append_run_id_to_base_path: false}}")
    assert make_plan(flat, "mine", 64).checkpoints.location == Path("checkpoints")


@pytest.mark.trap("D11")
def test_wandb_picks_the_project_by_default():
    assert WandbConfig().project is None


@pytest.mark.trap("D12")
def test_tensorboard_files_go_below_the_run_id(monkeypatch):
    writer = mock.MagicMock()
    monkeypatch.setattr("tensorboardX.SummaryWriter", writer)
    monkeypatch.setattr(environment, "packages", list)
    TensorboardConfig().open(RunInfo("mine", 0, True, {}, "", {}))
    assert writer.call_args.args == (str(Path("tblogs/mine")),)


@pytest.mark.trap("D15")
def test_the_default_model_is_llama():
    assert fresh().model == LlamaConfig()  # as in Levanter; the guide's example uses GPT-2


@pytest.mark.trap("D16")
def test_mpt_is_available():
    assert isinstance(fresh("model: {type: mpt}").model, MptConfig)


@pytest.mark.trap("D17")
def test_fractions_are_relative_to_the_cycle():
    optimizer = fresh("optimizer: {learning_rate: 1.0, warmup: 0.1, rewarmup: 0.2, cycles: 2}").optimizer
    rates = [float(optimizer.schedule(1000)(step)) for step in (50, 275, 500, 600)]
    assert rates == pytest.approx([1.0, 0.55, 0.1, 1.0], rel=1e-5)


@pytest.mark.trap("D19")
def test_the_key_for_messages_is_messages_field():
    source = fresh("data: {format: {type: chat, messages_field: turns}}").data
    assert source.format == ChatFormat(messages_field="turns")
    with pytest.raises(ConfigError, match=r"messages_key.*Did you mean 'messages_field'"):
        fresh("data: {format: {type: chat, messages_key: turns}}")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("batch_size", "train_batch_size"), ("eval_per_device_parallelism", "per_device_eval_parallelism")],
)
@pytest.mark.trap("D20")
def test_trainer_keys_of_other_pages_get_a_suggestion(wrong, meant):
    with pytest.raises(ConfigError, match=rf"trainer\.{wrong}.*Did you mean '{meant}'"):
        fresh(f"trainer: {{{wrong}: 8}}")


ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "from-levanter.md"
NUMBERED = [*(f"T{n}" for n in range(1, 11)), *(f"D{n}" for n in range(1, 28))]


def marked_traps() -> dict[tuple[str, str], list[str]]:
    """(file, test) -> the rows in its `pytest.mark.trap(...)`, for all test files."""
    marked: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.trap" in text else ():
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.trap":
                    rows = [ast.literal_eval(argument) for argument in decorator.args]
                    marked.setdefault((path.relative_to(ROOT).as_posix(), node.name), []).extend(rows)
    return marked


def test_the_table_of_traps_and_the_marked_tests_agree():
    """Each row names a test that is marked with its number; each number in a mark is a row."""
    table = TABLE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([TD]\d+) \|.*\| `(\S+)::(\w+)` \|$", table, re.MULTILINE)
    assert [number for number, _, _ in rows] == NUMBERED
    marked = marked_traps()
    assert [row for row in rows if row[0] not in marked.get((row[1], row[2]), [])] == []
    assert [test for test, numbers in marked.items() if not numbers or not set(numbers) <= set(NUMBERED)] == []


def blocks_of(guide: str) -> Iterator[str]:
    """The YAML blocks of a text without fences: each begins at a section and ends where prose begins."""
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


@pytest.mark.slow
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
