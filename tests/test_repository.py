"""The repository's structure: import direction, recipes that trace, docstrings, sizes of files and folders."""

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxlm.__main__ import commands
from jaxlm.plan.load_config import read_config
from jaxlm.plan.num_steps import check_num_steps
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.reading.recipes import all_recipes
from jaxlm.session.compilation.step import trace_step
from jaxlm.session.dry_run import assumed_vocabulary
from tests.answers import LLAMA

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "jaxlm"
MODULES = sorted(path for path in SOURCE.rglob("*.py"))
NAMES = {path: name for name, path in all_recipes().items()}
RECIPES, recipe_name = list(NAMES), NAMES.get


def test_config_links_to_the_recipes():
    links = {path.relative_to(ROOT / "config").as_posix(): path for path in (ROOT / "config").rglob("*.yaml")}
    assert {name: path.resolve() for name, path in links.items()} == all_recipes()


def test_import_contracts():
    beside_python = Path(sys.executable).with_name("lint-imports")
    command = str(beside_python) if beside_python.exists() else shutil.which("lint-imports")
    if command is None:
        pytest.skip("import-linter is not installed (pip install -e '.[test]')")
    result = subprocess.run([command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """The plan of a recipe on the tests' eight devices."""
    # The recipes that start from a Hugging Face model use this folder name, cut it above layer 12, give 32 heads, or fewer
    # that are larger, decoupled attention, and leave 4 key/value heads of more.
    (tmp_path / "model-folder").mkdir()
    sizes = {"num_hidden_layers": 14, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    content = {"model_type": "llama", "vocab_size": 60_000, **LLAMA, **sizes}
    (tmp_path / "model-folder" / "config.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)

    def plan(path: Path) -> Plan:
        config = read_config(path)
        check_num_steps(config)
        # The recipes suit any number of devices, so the batch must be divisible by eight.
        rows = 8 * config.objective.facts.num_shares
        config = replace(config, trainer=replace(config.trainer, train_batch_size=rows, per_device_parallelism=-1))
        return make_plan(config, "recipe", assumed_vocabulary(config)[0])

    return plan


@pytest.mark.slow
def test_every_recipe_has_a_plan(planned):
    assert [recipe_name(path) for path in RECIPES if not planned(path).phases] == []


# Of each kind of state one recipe is lowered in CI: optimizers, surgeries, phases, what objectives keep, and each wing.
LOWERED = (
    *("quickstart.yaml", "nano.yaml", "fp8.yaml", "qlora.yaml", "hybrid.yaml", "distill.yaml", "portfolio.yaml"),
    *("topology.yaml", "nanochat/cpu_d4.yaml"),
    *("upcycle/dba.yaml", "progressive/append.yaml", "progressive/diffusion_blocks.yaml"),
    *(f"post_training/{name}.yaml" for name in ("dpo", "grpo_rollouts", "kto", "reward")),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=recipe_name(path), marks=() if recipe_name(path) in LOWERED else pytest.mark.soak)
        for path in RECIPES
    ],
)
def test_every_recipe_has_a_step_that_keeps_and_donates_its_state(path, planned):
    plan = planned(path)
    with plan.layout.use():
        for phase in plan.phases:
            step = trace_step(plan, phase)
            state = plan.state_builder.abstract_state(phase)
            after, report = step.out_info
            assert jax.tree.map(shape_and_dtype, after) == jax.tree.map(shape_and_dtype, state)
            assert {"train/objective", "train/loss", "grad/norm/total"} <= report.metrics.keys()
            # XLA writes the whole new state into the buffers of the old one.
            donated = re.findall(r"tf\.aliasing_output|jax\.buffer_donor", step.lower().as_text())
            assert len(donated) == len(jax.tree.leaves(state))


def shape_and_dtype(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), str(array.dtype)


@pytest.mark.parametrize("path", RECIPES, ids=recipe_name)
def test_every_recipe_begins_with_its_command_and_hardware(path):
    header = path.read_text().split("\n\n")[0].split("\ndata:")[0]
    assert re.search(rf"^#   jaxlm train --config_path (jaxlm:)?{re.escape(recipe_name(path))}$", header, re.MULTILINE)
    assert "Hardware:" in header


def decorated(node: ast.AST, text: str) -> bool:
    return any(text in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def undocumented(path: Path, module: ast.Module) -> list[str]:
    """What lacks a docstring: modules, their public definitions, and abstract methods need one, overrides do not."""
    if path.name == "__init__.py" and not module.body:
        return []
    missing = [] if ast.get_docstring(module) else [str(path)]
    for node in module.body:
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and node.name[0] != "_"
            and not decorated(node, "overload")
        ):
            missing += [] if ast.get_docstring(node) else [f"{path}: {node.name}"]
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
            contracts = [n for n in methods if decorated(n, "abstractmethod")]
            missing += [f"{path}: {node.name}.{method.name}" for method in contracts if not ast.get_docstring(method)]
    return missing


@dataclass(frozen=True)
class Definitions:
    """What the tests below ask about a module, so that each module is parsed once.

    Attributes:
        undocumented: what needs a docstring and has none.
        caching: frozen dataclasses with a cache.
        members: classes that are registered in a family.
        imported: (module, name, name here) of everything imported by name.
        asked: names in the second argument of `isinstance` and `issubclass`.
    """

    undocumented: list[str]
    caching: list[str]
    members: list[str]
    imported: list[tuple[str | None, str, str]]
    asked: set[str]


def holds_a_cache(part: ast.stmt) -> bool:
    if isinstance(part, ast.FunctionDef):
        return decorated(part, "cache")
    return isinstance(part, ast.AnnAssign) and "init=False" in ast.unparse(part)


@cache
def definitions() -> dict[Path, Definitions]:
    return {path: definitions_of(path, ast.parse(path.read_text())) for path in MODULES}


def definitions_of(path: Path, module: ast.Module) -> Definitions:
    nodes = list(ast.walk(module))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    frozen = [node for node in classes if decorated(node, "frozen=True") or decorated(node, "choice(")]
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("isinstance", "issubclass")]
    return Definitions(
        undocumented(path, module),
        [f"{path}: {node.name}" for node in frozen if any(map(holds_a_cache, node.body))],
        [node.name for node in classes if decorated(node, "choice(")],
        [(n.module, a.name, a.asname or a.name) for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names],
        {name.id for call in calls for name in ast.walk(call.args[1]) if isinstance(name, ast.Name)},
    )


@pytest.mark.slow
def test_contracts_are_documented():
    assert [missing for found in definitions().values() for missing in found.undocumented] == []


def test_files_are_short_and_have_no_todos():
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= 600, path  # one noun may need 500; nothing is packed to a limit
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), path


def test_only_the_layout_and_the_trace_options_are_ambient():
    ambient = {"contextvars": "core/sharding.py", "make_user_context": "core/tracing.py"}
    for word, home in ambient.items():
        assert [str(p.relative_to(SOURCE)) for p in MODULES if word in p.read_text()] == [home]


def test_frozen_dataclasses_hold_no_cache():
    assert [name for found in definitions().values() for name in found.caching] == []


def test_only_a_family_asks_for_its_members():
    """Outside it, `isinstance` of a member means that the family's interface lacks something."""
    homes = {
        (".".join(path.relative_to(SOURCE.parent).with_suffix("").parts), name): path.parent
        for path, found in definitions().items()
        for name in found.members
    }
    assert len(homes) > 40
    asked = []
    for path, found in definitions().items():
        elsewhere = {
            here for module, name, here in found.imported if homes.get((module, name), path.parent) != path.parent
        }
        asked += [f"{path}: {name}" for name in found.asked & elsewhere]
    assert asked == []


def test_only_the_plan_reads_the_configured_model():
    """All others ask a phase for the config of its model (`Phase.model`), or the plan for that of the initial one."""
    readers = {
        path.relative_to(SOURCE).as_posix() for path in MODULES if re.search(r"\bconfig\.model\b", path.read_text())
    }
    assert readers == {"plan/load_config.py", "plan/plan.py"}


def test_folders_are_small_enough_to_read():
    assert len(list(SOURCE.glob("*.py"))) <= 12
    folders = {path.parent for path in MODULES} - {
        SOURCE / "interop/hf/families"
    }  # one file like the others per family
    assert {str(f.relative_to(SOURCE)): n for f in folders if (n := len(list(f.glob("*.py")))) > 24} == {}


def test_every_command_is_listed():
    files = [*SOURCE.glob("*.py"), *(path for path in MODULES if path.parent.name == "commands")]
    runnable = {path.stem for path in files if 'if __name__ == "__main__"' in path.read_text()}
    assert set(commands()) == runnable - {"__main__"}


def test_every_mutation_fits_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mutations

    for one in mutations.mutations():
        assert (ROOT / "src/jaxlm" / one.file).read_text().count(one.right) == 1, one
        assert all((ROOT / tests).exists() for tests in one.tests), one
