"""The commands that the launchers render for real machines, and those that the documents show."""

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import jobset
import pytest
import ray_job
import tpu_pod
from tpu_nodes import RUN, SET_UP

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/howto/clusters").glob("*.md"))
TRAIN = ("--config_path", "mine.yaml", "--trainer.id", "it's mine")
WORDS = ["python", "-m", "jaxlm.train", *TRAIN]


@pytest.fixture
def gcloud(in_process) -> Callable[..., list[list[str]]]:
    """The words of each gcloud command that `tpu_pod.py` prints."""

    def run(command: str, *words: str) -> list[list[str]]:
        train = ("--", *TRAIN) if command == "babysit" else ()
        result = in_process(tpu_pod.main, command, "mine", "--dry_run", "--install", "jaxlm==1", *words, *train)
        assert result.code == 0, result.err
        return [shlex.split(part) for part in re.split(r"\n(?=gcloud )", result.out)]

    return run


def test_tpu_v4_32(gcloud):
    create, _, _, run, delete = gcloud(
        "babysit", "--zone", "us-central2-b", "--type", "v4-32", "--spot", "--env", "A=b c"
    )
    where = ["--zone=us-central2-b"]
    group = ["gcloud", "compute", "tpus", "tpu-vm"]
    version = "--version=tpu-ubuntu2204-base"
    assert create == [*group, "create", "mine", "--accelerator-type=v4-32", version, "--spot", *where]
    assert delete == [*group, "delete", "mine", "--quiet", *where]
    assert run[3:7] == ["tpu-vm", "ssh", "mine", "--worker=N"]
    assert on_worker(run) == ["bash", "-c", RUN, "jaxlm", "ATTEMPT", "1", "env", "A=b c", *WORDS]


def on_worker(command: list[str]) -> list[str]:
    """The words that the worker's shell reads of a gcloud command."""
    (line,) = [word.partition("=")[2] for word in command if word.startswith("--command=")]
    return shlex.split(line)


def test_no_value_becomes_part_of_a_script(gcloud):
    pasted = "3.12; touch pasted #"
    words = ("--python", pasted, "--install", pasted, "--env", f"A={pasted}")
    commands = gcloud("babysit", "--zone", "z", *words)
    _, _, install, run, _ = commands
    assert on_worker(install)[:4] == ["bash", "-c", SET_UP, "jaxlm"]
    assert on_worker(install)[5:] == [pasted, pasted]
    assert on_worker(run)[2] == RUN
    assert on_worker(run)[7] == f"A={pasted}"
    for script in (RUN, SET_UP):
        assert subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode == 0


def test_an_attempt_with_an_unusual_name_is_not_followed(tmp_path):
    options = argparse.Namespace(arguments=["a"], env=[])
    first = next(tpu_pod.attempts(tmp_path, options))
    assert next(tpu_pod.attempts(tmp_path, options)) == first
    for name in (f"$(touch pasted)-{first[-8:]}", f"../../x-{first[-8:]}", "", "\xff"):
        (tmp_path / "attempt").write_text(name)
        assert re.fullmatch(r"\d{8}-\d{6}-\d{6}-[0-9a-f]{8}", next(tpu_pod.attempts(tmp_path, options)))


def test_tpu_two_v5p_slices(gcloud):
    words = ("--zone", "us-east5-a", "--type", "v5p-128", "--slices", "2", "--reserved", "--project", "p")
    commands = gcloud("babysit", *words)
    where = ["--zone=us-east5-a", "--project=p"]
    group = ["gcloud", "compute", "tpus", "queued-resources"]
    slices = [
        "--accelerator-type=v5p-128",
        "--runtime-version=tpu-ubuntu2204-base",
        "--node-count=2",
        "--node-prefix=mine",
    ]
    assert commands[0] == [*group, "create", "mine", *slices, "--reserved", *where]
    assert commands[-1] == [*group, "delete", "mine", "--force", "--quiet", *where]
    runs = [command for command in commands if any("setsid" in word for word in command)]
    assert [command[5] for command in runs] == ["mine-0", "mine-1"]
    one = gcloud("create", "--zone", "z", "--queued", "--internal_ips", "--gcloud_flag=--network=mine")[0]
    assert one[-5:] == [
        "--runtime-version=tpu-ubuntu2204-base",
        "--node-id=mine",
        "--internal-ips",
        "--network=mine",
        "--zone=z",
    ]


def test_jaxlm_is_installed_again_only_if_its_wheel_has_changed(gcloud, tmp_path):
    wheel = tmp_path / "jaxlm-1-py3-none-any.whl"

    def install_script(content: bytes) -> list[str]:
        wheel.write_bytes(content)
        _, make, copy, install = gcloud("create", "--zone", "z", "--install", str(wheel))
        assert "mkdir -p jaxlm" in make[-2]
        assert copy[4:8] == ["scp", "--recurse", str(wheel), "mine:jaxlm/"]
        return on_worker(install)

    first, second = install_script(b"one"), install_script(b"two")
    assert first[-1] == "./jaxlm-1-py3-none-any.whl[tpu,gs]"
    # The workers' Python; it fails, so an installation is seen.
    (tmp_path / "jaxlm").mkdir()
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "jaxlm" / "installed").write_text(f"{first[4]}\n")
    variables = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert [subprocess.run(words, env=variables).returncode for words in (first, second)] == [0, 9]


def test_this_checkout_is_installed_by_default_with_the_versions_it_was_tested_with(in_process):
    out = in_process(tpu_pod.main, "create", "mine", "--dry_run", "--zone", "z").out
    build, *_, install = out.split("gcloud ")[0], *out.split("gcloud ")[1:]
    assert build.split()[-1] == str(ROOT)
    assert f"{ROOT / 'constraints.txt'} mine:jaxlm/" in out
    assert on_worker(shlex.split(install))[-3:] == ["-c", "constraints.txt", "./jaxlm-VERSION-py3-none-any.whl[tpu,gs]"]


def without_variables(words: list[str]) -> list[str]:
    return words[next((n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), 0) :]


def shown_commands() -> list[list[str]]:
    """The commands of `infra/` in the documents."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [
                without_variables(shlex.split(line, comments=True)) for line in block.replace("\\\n", " ").splitlines()
            ]
            found += [
                words
                for words in lines
                if any(word.startswith("infra/") and word[-3:] in (".py", ".sh") for word in words[:2])
            ]
    return found


LAUNCHERS = {
    f"infra/{path}.py": module
    for path, module in {"tpu_pod": tpu_pod, "ray_job": ray_job, "kubernetes/jobset": jobset}.items()
}


@pytest.mark.parametrize("words", shown_commands(), ids=lambda words: " ".join(words)[:70])
def test_commands_of_the_documents_are_accepted(words, in_process, monkeypatch):
    monkeypatch.chdir(ROOT)
    if "--help" not in words:
        at = words.index("--") if "--" in words else len(words)
        words = [*words[:at], *({"--dry_run"} - {*words}), *words[at:]]
    if words[0] == "python":
        result = in_process(LAUNCHERS[words[1]].main, *words[2:])
        assert (result.code, bool(result.out)) == (0, True), result.err
    else:
        result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert (result.returncode, bool(result.stdout)) == (0, True), result.stderr


def test_there_are_commands_in_the_documents():
    assert len(shown_commands()) > 4
