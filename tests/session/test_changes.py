"""Changes since a run's last start: each is logged once with its effect, and other content is refused unless allowed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.tracing import BlockSizes
from jaxlm.data.config import DataConfig
from jaxlm.data.mixture import Mixture
from jaxlm.models.base import ModelConfig
from jaxlm.observe import environment
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.effects import OWN, effect_of, stated_effects
from jaxlm.reading.schema import sections
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.compilation.options import StepOptions
from jaxlm.session.resume_checks import FACTS, SavedRun, changes, computing_facts, effect_of_fact
from tests.session.test_init_from import Trainings

CHANGED = "changed since the last start: "
OPTIONS = StepOptions({}, BlockSizes(512, 128))


def told(trainings: Trainings) -> list[str]:
    return [line.partition(CHANGED)[2] for line in trainings.output.splitlines() if CHANGED in line]


def paths() -> set[str]:
    """Every key of the configuration."""
    return {
        f"{section.path}.{name}".lstrip(".")
        for section in sections(RunConfig)
        for name in (section.names or [key.name for key in section.keys])
    }


def test_every_key_has_an_effect():
    """Its field states one, or that of a section around it."""
    assert [path for path in sorted(paths() - {"trainer"}) if effect_of(RunConfig, path) is OWN] == []
    # A key of a user's own class of data states none.
    sections_without = ("", "trainer.", "data.", "data.configs.wiki.", "phases.0.data.")
    assert {effect_of(RunConfig, f"{section}new") for section in sections_without} == {OWN}


@pytest.mark.parametrize("family", [DataConfig, ModelConfig])
def test_types_of_one_section_state_the_same_effect_for_a_key(family):
    stated = {item for kind in family.get_known_choices().values() for item in stated_effects(kind).items()}
    assert len(stated) == len(dict(stated)) > 3


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("trainer.tracker.project", "harmless"),
        ("trainer.log_dir", "harmless"),
        ("trainer.watchdog.end_after", "harmless"),
        ("trainer.checkpointer.keep", "harmless"),
        ("trainer.profiler.num_steps", "harmless"),
        ("optimizer.beta1", "changes what follows"),
        ("phases.1.optimizer.beta1", "changes what follows"),
        ("trainer.num_train_steps", "changes what follows"),
        ("trainer.mp.rules.0.match", "changes what follows"),
        ("data.configs.wiki.validation_urls", "changes what follows"),
        ("phases.0.data.train_weights.wiki", "changes what follows"),
        ("phases.1.data.configs.wiki.format.chat_template", "harmless"),
        ("data.type", "harmless"),
        ("model.hidden_dim", "refused"),
        ("model.attn_backend", "changes what follows"),
    ],
)
def test_the_effect_of_a_key(path, kind):
    assert effect_of(RunConfig, path).kind == kind


def test_every_fact_has_an_effect_and_the_same_start_has_no_changes():
    config = decode_run(ConfigSource({"trainer": {"mp": "auto"}}), None)
    facts = computing_facts(config, OPTIONS)
    assert {effect_of_fact(name).kind for name in facts} == {"harmless", "changes what follows"}
    assert set(FACTS) - {"module"} == set(facts)
    json.dumps(facts)
    assert changes(SavedRun("s", config, environment=facts), config, OPTIONS, 5, 80) == []


@pytest.mark.parametrize(
    ("fact", "effect"),
    [
        ("jax", "changes what follows: float rounding differs from here"),
        ("devices", "changes what follows: float rounding differs from here"),
        ("jaxlm", "changes what follows: the code may compute different numbers from here"),
        ("Python", "harmless"),
    ],
)
def test_another_fact_is_told_with_its_effect(fact, effect):
    config = decode_run(ConfigSource({}), None)
    facts = computing_facts(config, OPTIONS)
    (line,) = changes(SavedRun("s", config, environment={**facts, fact: "before"}), config, OPTIONS, 5, 80)
    assert line == f"{fact}: before -> {facts[fact]} ({effect})"


def test_options_that_were_tuned_since_the_last_start_are_told():
    config = decode_run(ConfigSource({}), None)
    before, tuned = computing_facts(config, OPTIONS), StepOptions({"xla_cpu_use_xnnpack": True}, OPTIONS.sizes)
    rounding = "changes what follows: float rounding differs from here"
    for facts in (before, {name: fact for name, fact in before.items() if name != "XLA options"}):
        assert changes(SavedRun("s", config, environment=facts), config, OPTIONS, 5, 80) == []
        (line,) = changes(SavedRun("s", config, environment=facts), config, tuned, 5, 80)
        assert line == f"XLA options: none -> xla_cpu_use_xnnpack=true ({rounding})"


def test_other_block_sizes_are_told_and_those_of_earlier_versions_are_known():
    config = decode_run(ConfigSource({}), None)
    saved = computing_facts(config, OPTIONS)
    unsaved = {name: fact for name, fact in saved.items() if name != "block sizes"}
    rounding = "changes what follows: float rounding differs from here"
    other = StepOptions({}, BlockSizes(256, 64))
    for facts in (saved, unsaved):
        assert changes(SavedRun("s", config, environment=facts), config, OPTIONS, 5, 80) == []
        (line,) = changes(SavedRun("s", config, environment=facts), config, other, 5, 80)
        old, new = (f"loss_chunk_tokens={chunk}, attention_block={block}" for chunk, block in ((512, 128), (256, 64)))
        assert line == f"block sizes: {old} -> {new} ({rounding})"
    unstated = StepOptions({}, BlockSizes())  # of GPUs and TPUs
    assert changes(SavedRun("s", config, environment=unsaved), config, unstated, 5, 80) == []


def test_flags_that_change_no_number_are_left_out(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_dump_to=/x --xla_force_host_platform_device_count=8 --xla_a=2")
    assert environment.computing([])["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"


@pytest.mark.parametrize(
    "name", ["JAX_DEFAULT_MATMUL_PRECISION", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"]
)
def test_variables_that_choose_how_to_compute_are_facts(name):
    assert environment.variables({name: "x", "HOME": "/root"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    [
        "JAX_PROCESS_ID",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PLATFORMS",
        "CUDNN_LOGDEST_DBG",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
    ],
)
def test_variables_of_one_process_are_not_facts(name):
    assert environment.variables({name: "x"}) == {}


def test_flags_in_a_file_are_compared_by_content(tmp_path):
    (tmp_path / "flags").write_text("--xla_b=1\n--xla_a=2\n")
    assert environment.flags({"XLA_FLAGS": str(tmp_path / "flags")})["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"


def test_a_checkout_is_told_by_its_commit_and_whether_it_was_changed(tmp_path, monkeypatch):
    package = tmp_path / "src" / "jaxlm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(environment, "_PACKAGE", package)
    assert environment.computing([])["commit of jaxlm"] == "not a checkout"
    for command in ("init -q", "add -A", "-c user.name=n -c user.email=e commit -qm first"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    clean = environment.computing([])
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert clean["commit of jaxlm"] == head[:12]
    (package / "__init__.py").write_text("changed = 1\n")
    changed = environment.computing([])
    assert changed["commit of jaxlm"] == f"{head[:12]} + changes"
    assert changed["jaxlm"] != clean["jaxlm"]


def test_a_users_own_module_is_told_by_its_content(tmp_path, monkeypatch):
    (tmp_path / "my_loss.py").write_text(
        "from dataclasses import dataclass\n"
        "from jaxlm.objectives.next_token import NextToken\n"
        "@dataclass(frozen=True)\n"
        "class Mine(NextToken):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = decode_run(ConfigSource({"objective": {"type": "my_loss:Mine"}}), None)
    try:
        before = computing_facts(config, OPTIONS)
        with (tmp_path / "my_loss.py").open("a") as file:
            file.write("# other\n")
        (line,) = changes(SavedRun("s", config, environment=before), config, OPTIONS, 5, 80)
    finally:
        del sys.modules["my_loss"]
    assert line.startswith("module my_loss: ")
    assert line.endswith("(changes what follows: the code may compute different numbers from here)")


@pytest.mark.soak
def test_each_change_is_told_once_and_stands_in_the_log(tmp_path):
    trainings = Trainings(tmp_path)
    trainings.run("x", 2)
    trainings.run("x", 4)
    (length,) = [line for line in told(trainings) if line.startswith("trainer.num_train_steps")]
    assert length.endswith(
        "2 -> 4 (changes what follows: the run ends at a different step, and the learning rate follows the new length)"
    )
    optimizer = {"learning_rate": 2e-2, "warmup": 0, "lr_schedule": "constant"}
    trainings.run("x", 6, optimizer=optimizer, trainer={"compilation_cache_dir": None})
    lines = told(trainings)
    assert "optimizer.learning_rate: 0.01 -> 0.02 (changes what follows: the next updates differ)" in lines
    assert any(line.startswith("trainer.compilation_cache_dir: ") and line.endswith("(harmless)") for line in lines)
    assert all(f"{CHANGED}{line}" in (tmp_path / "logs/x/train.log").read_text() for line in lines)
    trainings.run("x", 6, optimizer=optimizer, trainer={"compilation_cache_dir": None})
    assert told(trainings) == []


@pytest.mark.slow
def test_other_data_is_refused_unless_it_is_allowed(tmp_path, monkeypatch):
    """The position counts sequences: the run goes on after as many sequences of the new data."""
    read: dict[int, bytes] = {}

    def reading(self, examples, read_them=Mixture.read):
        columns = read_them(self, examples)
        read.update(zip(examples.tolist(), map(bytes, columns["tokens"]), strict=True))
        return columns

    monkeypatch.setattr(Mixture, "read", reading)
    trainings = Trainings(tmp_path)
    trainings.run("x", 2)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("".join(f"other text {n * n % 89} here\n" for n in range(500)))
    tokenizer = str(next(Path(tmp_path, "cache").rglob("tokenizer.json")).parent)

    def data(text: Path, cache: str, **more):
        return {"train_urls": [str(text)], "cache_dir": str(tmp_path / cache), "vocab_size": 280, **more}

    # The same tokens by another path, so that only the text changes in what follows.
    with pytest.raises(ConfigError, match=r"another tokenizer.*(?s:.*)allow_changes '\[tokenizer\]'"):
        trainings.run("x", 4, data=data(tmp_path / "text", "cache2", tokenizer=tokenizer, vocab_size=None))
    allow = {"allow_changes": ["tokenizer"]}
    trainings.run("x", 3, data=data(tmp_path / "text", "cache2", tokenizer=tokenizer, vocab_size=None), trainer=allow)

    changed = data(other, "cache3", tokenizer=tokenizer, vocab_size=None)
    with pytest.raises(ConfigError, match=r"data of phase 'train'(?s:.*)allow_changes '\[data\]'"):
        trainings.run("x", 5, data=changed)
    read.clear()
    trainings.run("x", 5, data=changed, trainer={"allow_changes": ["data", "refs"]})
    resumed = dict(read)
    assert min(resumed) == 24
    lines = told(trainings)
    assert any("data position: the run goes on after sequence 24 of the phase" in line for line in lines)
    assert any(line.startswith("trainer.allow_changes: 'refs' allowed nothing") for line in lines)
    read.clear()
    trainings.run("y", 5, data=changed)  # a new run on the other data
    assert {number: read[number] for number in range(24, 40)} == {number: resumed[number] for number in range(24, 40)}


@pytest.mark.slow
def test_a_bpe_tokenizer_that_was_trained_on_other_text_is_another_tokenizer(tmp_path):
    trainings = Trainings(tmp_path)
    trainings.run("x", 2)
    (tmp_path / "text" / "a.txt").write_text("".join(f"zebra quagga {n * n % 83} okapi\n" for n in range(600)))
    changed = {"train_urls": [str(tmp_path / "text")], "cache_dir": str(tmp_path / "cache2"), "vocab_size": 280}
    with pytest.raises(ConfigError, match=r"tokenizer: \w{12} -> \w{12}(?s:.*)allow_changes '\[tokenizer\]'"):
        trainings.run("x", 4, data=changed, trainer={"allow_changes": ["data"]})
    trainings.run("x", 4, data=changed, trainer={"allow_changes": ["data", "tokenizer"]})
    assert any("the embeddings were trained for the tokens of the earlier one" in line for line in told(trainings))
    model = trainings.config("x", 5)["model"] | {"hidden_dim": 64}
    with pytest.raises(ConfigError, match=r"model\.hidden_dim: 32 -> 64(?s:.*)Set another ID"):
        trainings.run("x", 5, data=changed, model=model, trainer={"allow_changes": ["data", "tokenizer", "refs"]})
