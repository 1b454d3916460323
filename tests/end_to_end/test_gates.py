"""Gates in real commands: one process, two, and `jaxlm evaluate --gates`."""

import json

import numpy as np
import pytest

from tests.end_to_end.commands import Workplace

pytestmark = pytest.mark.slow
REFS = "refs: {{teacher: {{type: hf, path: {path}, dtype: float32}}}}\n"
GATES = """
evals:
  - {type: loss}
  - {type: fidelity, max_delta_nll: %s, max_ppl_ratio: null, fail_fast: true}
  - {type: compare, batches: 2}
  - {type: continuations, prompts: 8, prompt_tokens: 8, max_new_tokens: 8}
  - {type: cases, cases: [{id: a, prompt: "def ", answer: "x", kind: text_greedy}], max_new_tokens: 8}
"""
RUN = ("--config_path", "run.yaml", "--trainer.num_train_steps", "6")


@pytest.fixture(scope="module")
def teacher(workplace):
    """Folders in Hugging Face format: `good`, and `scrambled`, whose tokens have each other's rows of the head."""
    from safetensors.numpy import load_file, save_file

    place = workplace()
    place.write()
    place.finish("--config_path", "run.yaml", "--trainer.id", "big")
    for name in ("good", "scrambled"):
        arguments = ("to-hf", "--checkpoint", "checkpoints/big", "--output_dir", name)
        place.finish(*arguments, module="jaxlm.commands.convert")
    file = place.folder / "scrambled" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = np.random.default_rng(0).permutation(tensors["lm_head.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    return place.folder


def prepared(workplace, teacher, name: str, limit: float) -> Workplace:
    place = workplace()
    place.write(REFS.format(path=teacher / name) + GATES % limit)
    return place


def last(place: Workplace) -> dict[str, float]:
    return next(r for r in reversed(place.records()) if "eval/fidelity/nll" in r)


@pytest.mark.soak
def test_two_processes_measure_what_one_does_and_end_alike(workplace, teacher):
    alone, both = (prepared(workplace, teacher, "good", 0.01) for _ in range(2))
    ends = [alone.run(*RUN), *both.run_all(2, *RUN)]
    assert [end.code for end in ends] == [1, 1, 1], ends
    for end in ends[:2]:
        assert "error: the end of phase 'train': eval/fidelity/delta_nll is" in end.err
        assert "Traceback" not in end.err
    numbers, others = ({k: v for k, v in last(place).items() if k.startswith("eval/")} for place in (alone, both))
    assert numbers == pytest.approx(others, rel=1e-4)
    assert {name.split("/")[1] for name in numbers} >= {"fidelity", "compare", "continuations", "cases", "loss"}
    assert alone.checkpoints() == both.checkpoints()
    assert "step-6" in alone.checkpoints()
    assert "error: the end of phase 'train'" in alone.run(*RUN).err

    gates = ("--checkpoint", "checkpoints/run", "--gates")
    result = alone.run(*gates, module="jaxlm.commands.evaluate")
    assert result.code == 1
    assert "eval/fidelity/delta_nll is" in result.err
    printed = json.loads(result.out.splitlines()[-1])
    assert {f"eval/{name}": value for name, value in printed["metrics"].items()} == pytest.approx(
        {name: value for name, value in numbers.items() if name.split("/")[1] not in ("loss", "bpb", "best_bpb")},
        rel=1e-4,
    )
    (alone.folder / "gates.yaml").write_text(
        REFS.format(path=teacher / "good") + "evals: [{type: fidelity, max_delta_nll: 10.0, max_ppl_ratio: null}]"
    )
    result = alone.finish(*gates, "gates.yaml", module="jaxlm.commands.evaluate")
    assert json.loads(result.out.splitlines()[-1])["violations"] == []


@pytest.mark.soak
def test_a_scrambled_teacher_ends_all_processes_before_anything_is_saved(workplace, teacher):
    place = prepared(workplace, teacher, "scrambled", 10.0)
    ends = place.run_all(2, *RUN)
    assert [end.code for end in ends] == [2, 2], ends
    assert any("error: refs.teacher: the loss of" in end.err for end in ends)
    assert place.checkpoints() == []
