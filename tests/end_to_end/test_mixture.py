"""A mixture whose weights change, evaluated by source and tag. `test_batch_sizes.py` kills it."""

import json

import pytest

from tests.end_to_end.commands import Workplace

MIXED = """
  configs:
    ast: {{train_urls: ["{train}/ast.py"], validation_urls: ["{held_out}/bisect.py"], tags: [code, syntax]}}
    rest:
      train_urls: ["{train}/argparse.py", "{train}/inspect.py", "{train}/textwrap.py"]
      validation_urls: ["{held_out}/heapq.py"]
      tags: [code]
  train_weights: [[0, {{ast: 3, rest: 1}}], [7, {{ast: 1, rest: 3}}], [15, {{ast: 1, rest: 1}}]]
  mixture_block_size: 10
"""


def write(place: Workplace) -> None:
    path = place.write()
    head, model = path.read_text().split("model:")
    kept = [line for line in head.splitlines() if "_urls" not in line]
    mixed = MIXED.format(train=place.corpus / "train", held_out=place.corpus / "validation")
    path.write_text("\n".join(kept).replace(str(place.cache), "cache") + mixed + "model:" + model)


@pytest.mark.soak
def test_a_mixture_is_evaluated_by_source_and_tag(workplace):
    whole = workplace()
    write(whole)
    whole.finish("--config_path", "run.yaml")
    records = whole.records()
    logged = next(record for record in reversed(records) if "eval/loss" in record)
    found = whole.finish("--checkpoint", "checkpoints/run", module="jaxlm.commands.evaluate")
    numbers = json.loads(found.out.splitlines()[-1])
    assert numbers["loss"] == pytest.approx(logged["eval/loss"], rel=1e-6)
    assert numbers["macro_bpb"] == pytest.approx(logged["eval/macro_bpb"], rel=1e-6)
    for kind, names in {"sources": ["ast", "rest"], "tags": ["code", "syntax"]}.items():
        assert list(numbers[kind]) == names
        for name in names:
            assert numbers[kind][name]["loss"] == pytest.approx(logged[f"eval/{name}/loss"], rel=1e-6)
    assert "data of train" in whole.run("--config_path", "run.yaml", "--dry_run", "true").out
