"""Keys as the source code has them: what is refused without jax is what decoding would refuse."""

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import load_config
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.outline import BY_OTHERS, places, unknown_keys
from jaxlm.reading.recipes import all_recipes
from jaxlm.reading.schema import sections
from jaxlm.reading.yaml import load_yaml

SECTIONS = [section for section in sections(RunConfig) if section.names or section.keys]


def tree_at(path: str, section: dict) -> dict:
    """A configuration with a section at a path of the help."""
    for part in reversed([part for part in path.split(".") if part]):
        section = [section] if part == "N" else {part: section}
    return section


def test_every_key_of_every_section_is_known():
    refused = [
        (section.path, section.choice, place)
        for section in SECTIONS
        for place, _ in unknown_keys(tree_at(section.path, dict.fromkeys((*section.names, "type"))))
    ]
    assert not refused


def test_a_misspelled_key_is_found_in_almost_every_section():
    missed = [s.path for s in SECTIONS if not list(unknown_keys(tree_at(s.path, {"no_such_key": 1})))]
    assert len(missed) < len(SECTIONS) / 5, missed


def test_keys_of_recipes_are_known():
    for file in all_recipes().values():
        tree = load_yaml(file).tree
        if not tree.keys() & {"targets", "version", "training"}:
            assert not list(unknown_keys(tree)), file


def test_classes_of_users_may_have_any_key():
    assert not list(
        unknown_keys({"optimizer": {"type": "mine:Own", "rate": 1}, "evals": [{"type": "mine:Own", "x": 1}]})
    )


def test_paths_to_keys_are_those_of_the_help():
    known = {f"{s.path}.{key.name}".lstrip(".") for s in SECTIONS for key in s.keys}
    known |= {f"{s.path}.{name}".lstrip(".") for s in SECTIONS for name in s.names}
    assert [place for place in places().values() if place in known], "all but fields of other classes"
    assert not set(BY_OTHERS.values()) - known, "names of other programs lead to keys"


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("train_batch_size", "trainer.train_batch_size"),
        ("learning_rate", "optimizer.learning_rate"),
        ("trainer.learning_rate", "optimizer.learning_rate"),
        ("model_name_or_path", "initialize_from_hf"),
        ("trainer.gradient_accumulation_steps", "per_device_parallelism"),
        ("per_device_train_batch_size", "trainer.per_device_parallelism"),
        ("micro_batch_size", "trainer.per_device_parallelism"),
        ("model.sequence_len", "seq_len"),
        ("num_epochs", "epoch"),
        ("output_dir", "trainer.checkpointer.base_path"),
        ("seq_len", "model.seq_len"),
        ("trainer.steps_per_evl", "steps_per_eval"),
        ("trainer.lerning_rate", "optimizer.learning_rate"),
    ],
)
def test_a_key_of_another_section_or_program_is_suggested_with_its_path(option, meant):
    with pytest.raises(ConfigError, match=f"no such key in .*Did you mean '{meant}'") as error:
        load_config([f"--{option}", "1"], "jaxlm.train")
    assert str(error.value).startswith(f"command line --{option}: ")
