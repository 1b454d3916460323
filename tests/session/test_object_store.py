"""Runs with checkpoints in local object stores: moto's S3 server through s3fs, and an emulator of gs://."""

from collections.abc import Iterator

import fsspec
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.stores import open_store
from jaxlm.data.cache import token_blocks
from jaxlm.data.examples import Examples
from jaxlm.data.sources.mirror import list_remote
from jaxlm.data.tokens import TokensConfig
from jaxlm.engine.checkpoint.bucket import BucketFolder
from tests.gcs import BUCKET
from tests.s3 import S3_BUCKET, s3_server
from tests.session.test_init_from import Trainings


@pytest.fixture
def bucket(monkeypatch) -> Iterator[str]:
    with s3_server(monkeypatch):
        yield f"s3://{S3_BUCKET}"


@pytest.mark.soak
def test_resumed_from_an_object_store_bit_for_bit(bucket, tmp_path):
    trainings = Trainings(tmp_path)

    def run(name: str, steps: int, machine: str, **trainer):
        checkpointer = {"base_path": f"{bucket}/runs", "keep": [{"every": 2}], "save_interval": 0}
        checkpointer["staging_dir"] = f"{tmp_path}/{machine}"
        return trainings.run(name, steps, trainer={"checkpointer": checkpointer, **trainer})

    trainings.run("whole", 6)
    run("x", 3, "first")
    assert BucketFolder(f"{bucket}/runs/x").names() == ["step-2", "step-3"]
    run("x", 6, "second")  # another machine, without the first one's staging folder
    assert "resuming, from" in trainings.output
    assert trainings.losses("x") == trainings.losses("whole")
    assert BucketFolder(f"{bucket}/runs/x").names() == ["step-2", "step-3", "step-4", "step-6"]
    run("y", 6, "third", initialize_from_state=f"{bucket}/runs/x/step-4")
    assert trainings.losses("y") == {step: loss for step, loss in trainings.losses("whole").items() if step > 4}
    run("z", 1, "third", initialize_from=f"{bucket}/runs")
    assert "/step-6; step, optimizer state and data position start from scratch" in trainings.output


@pytest.mark.slow
@pytest.mark.parametrize("store", ["bucket", "gcs"])
def test_token_caches_and_text_in_an_object_store(store, request, tmp_path, monkeypatch):
    """The second machine reads the tokens in blocks and none of the text. Text that has changed is noticed."""
    found = request.getfixturevalue(store)
    url = found if store == "bucket" else f"gs://{BUCKET}"
    monkeypatch.setattr(token_blocks, "BLOCK_BYTES", 1000)
    fs, path = fsspec.core.url_to_fs(f"{url}/text")
    for number in range(3):
        fs.pipe_file(f"{path}/{number}.txt", f"a text of words {number} ".encode() * 500)
    data = TokensConfig(train_urls=[f"{url}/text/*.txt"], cache_dir=f"{url}/tokens", vocab_size=300)

    def opened(folder: str) -> Examples:
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        list_remote.cache_clear()
        return data.open(data.corpus.load_tokenizer(print), 16, print).train[""]

    here, identity = opened("one"), data.identity()
    there = opened("two")
    assert data.identity() == identity
    few, rows = np.arange(3), np.arange(len(here))
    np.testing.assert_array_equal(there.read(few)["tokens"], here.read(few)["tokens"])
    assert len(list((tmp_path / "two" / "cache" / "blocks").glob("*/*"))) == 1
    np.testing.assert_array_equal(there.read(rows)["tokens"], here.read(rows)["tokens"])
    assert len(list((tmp_path / "two" / "cache" / "blocks").glob("*/*"))) > 3
    assert not list((tmp_path / "two").rglob("*.txt"))
    fs.pipe_file(f"{path}/1.txt", b"other words " * 500)
    fs.invalidate_cache()
    with pytest.raises(ConfigError, match=r"files changed: 1 \(1\.txt\)"):
        opened("three")
    assert data.identity() != identity
    assert len(list((tmp_path / "three").rglob("*.txt"))) == 1


@pytest.mark.slow
def test_a_checkpoint_in_a_bucket_works_wherever_a_path_does(gcs, tmp_path, monkeypatch, capsys):
    """Resumed, initialized from, sampled, evaluated and converted by URL, on a machine without the run's other files."""
    from jaxlm.commands import convert, evaluate, sample

    trainings, url = Trainings(tmp_path), f"gs://{BUCKET}/runs"

    def run(name: str, steps: int, **trainer):
        checkpointer = {"base_path": url, "keep": [{"every": 2}], "save_interval": 0, "staging_dir": f"{tmp_path}/no"}
        return trainings.run(name, steps, trainer={"checkpointer": checkpointer, **trainer})

    run("x", 3)
    assert BucketFolder(f"{url}/x").names() == ["step-2", "step-3"]
    assert run("x", 6).checkpoint == f"{url}/x/step-6"
    assert f"resuming, from {url}/x/step-3" in trainings.output
    assert list(trainings.losses("x")) == [1, 2, 3, 4, 5, 6]
    run("y", 6, load_checkpoint_path=f"{url}/x/step-4")
    assert trainings.losses("y") == {step: loss for step, loss in trainings.losses("x").items() if step > 4}
    run("z", 1, initialize_from=url)
    assert "/step-6; step, optimizer state and data position start from scratch" in trainings.output
    assert not (tmp_path / "no").exists()

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    place = ("--checkpoint", f"{url}/x")
    assert sample.main([*place, "--prompt", "some", "--max_new_tokens", "3"]) == 0
    assert evaluate.main([*place, "--data.validation_urls", f"[{tmp_path}/text]"]) == 0
    assert convert.main(["to-hf", *place, "--output_dir", "hf", "--verify", "true"]) == 0
    said = capsys.readouterr()
    assert f"{url}/x/step-6" in said.out
    assert sorted(path.name for path in tmp_path.joinpath("elsewhere").iterdir()) == ["hf"]


def test_an_unwritable_store_is_one_message(tmp_path):
    trainings = Trainings(tmp_path)
    with pytest.raises(ConfigError, match=r"base_path|nosuch"):
        trainings.run("x", 1, trainer={"checkpointer": {"base_path": "nosuch://bucket"}})


def test_a_store_that_connects_when_it_is_opened_and_cannot_is_one_message():
    with pytest.raises(
        ConfigError, match=r"^hf_save_path: cannot open 'ftp://nowhere\.invalid/x' \(gaierror: .*network"
    ):
        open_store("ftp://nowhere.invalid/x", "hf_save_path")
