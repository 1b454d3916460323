"""The notebook in `examples/` runs from top to bottom, and shows what it says."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "python.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code"), "clear the outputs"
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_cells_compile():
    for number, source in enumerate(cells()):
        compile(source, f"cell {number}", "exec")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """On eight simulated devices, in an empty folder, twice: the second time nothing is trained again."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        shown = {}
        for number, source in enumerate(cells()):
            exec(compile(source, f"cell {number}", "exec"), shown)
        assert shown["losses"][-1] < 0.5 * shown["losses"][0]
        assert shown["answer"] == " Oslo"
        right, wrong = shown["log_probs"]
        assert right > wrong + 1.0
        assert shown["difference"] < 1e-4
        assert shown["split"].loaded.plan.mesh.sizes["model"] == 2
        assert "| eval/loss | " in capsys.readouterr().out
