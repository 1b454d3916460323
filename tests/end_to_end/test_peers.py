"""If one process fails, all of them exit promptly with its message."""

import time

import pytest

RUN = ("--config_path", "run.yaml")


@pytest.mark.slow
def test_other_processes_do_not_wait_for_a_failed_process(workplace, tmp_path):
    place = workplace(2)
    place.write()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"good \xff bad " * 100)  # detected only when process 0 reads it
    began = time.monotonic()
    other = ("--data.train_urls", f"[{tmp_path}/text]", "--data.cache_dir", str(tmp_path / "cache"))
    ends = [(*process.communicate(timeout=300), process.returncode) for process in place.start_all(2, *RUN, *other)]
    assert time.monotonic() - began < 60  # the coordination service would take minutes
    assert [code for _, _, code in ends] == [2, 2], ends
    first, second = (err for _, err, _ in ends)
    assert "error: " in first
    assert "a.txt: not UTF-8 text" in first
    assert "error: process 0: " in second
    assert "a.txt: not UTF-8 text" in second
    assert "Traceback" not in first + second


@pytest.mark.slow
def test_a_folder_that_process_0_cannot_write_ends_all_processes(workplace):
    place = workplace(2)
    place.write()
    (place.folder / "checkpoints").write_text("a file where the folder should be")
    ends = [(*process.communicate(timeout=300), process.returncode) for process in place.start_all(2, *RUN)]
    assert ends[0][2] == 1
    assert ends[1][2] != 0
    assert "cannot write to the checkpoint folder" in ends[0][1]
    assert "process 0: SaveError: cannot write to the checkpoint folder" in ends[1][1]
