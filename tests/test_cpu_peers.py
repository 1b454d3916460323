"""The benchmark of jaxlm beside its peers: what it reads of the machine, its statistics, its processes, and all of it."""

import importlib
import json
import math
import os
import resource
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxlm.plan.load_config import read_config
from jaxlm.plan.plan import make_plan

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]  # at the end, so they shadow nothing
intervals, machine, processes, peer_report, cpu_peers, products = map(
    importlib.import_module, ("intervals", "machine", "processes", "peer_report", "cpu_peers", "products")
)

# --- The machine ------------------------------------------------------------------------------------------------------

EPYC = """\
Architecture:                            x86_64
CPU(s):                                  2
On-line CPU(s) list:                     0,1
Vendor ID:                               AuthenticAMD
Model name:                              AMD EPYC
CPU family:                              26
Model:                                   2
Thread(s) per core:                      1
Stepping:                                1
Flags:                                   fpu sse2 avx2 avx_vnni avx512f avx512bw avx512_bf16 avx512_vnni
L1d cache:                               96 KiB (2 instances)
L2 cache:                                2 MiB (2 instances)
L3 cache:                                32 MiB (1 instance)
Vulnerability Spectre v1:                Mitigation; usercopy/swapgs barriers and __user pointer sanitization
"""
XEON = """\
CPU(s):                          8
  On-line CPU(s) list:           0-7
Vendor ID:                       GenuineIntel
  Model name:                    Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
    CPU family:                  6
    Model:                       143
    Thread(s) per core:          2
    Stepping:                    8
    Flags:                       fpu avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8
Caches (sum of all):
  L2:                            8 MiB (4 instances)
"""


def test_the_processor_is_read():
    assert str(machine.Processor.parse(EPYC)) == (
        "AMD EPYC (family 26, model 2, stepping 1), 2 CPUs with 1 thread(s) per core; caches: L1d 96 KiB (2 instances), L2 2"
        " MiB (2 instances), L3 32 MiB (1 instance); avx2 avx_vnni avx512f avx512_bf16 avx512_vnni"
    )
    xeon = machine.Processor.parse(XEON)
    assert (xeon.name, xeon.numbers) == (
        "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
        "family 6, model 143, stepping 8",
    )
    assert (xeon.cores, xeon.threads_per_core, xeon.caches) == ("8", "2", ("L2 8 MiB (4 instances)",))
    assert xeon.vectors == ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
    assert "caches: unknown; no known vector instructions" in str(machine.Processor.parse(""))
    assert "(" in str(machine.this_processor())


def test_cpu_time_is_divided_among_the_hypervisor_others_and_the_measured_process():
    before = machine.CpuTicks.parse("cpu  100 10 20 1000 5 1 2 30 50 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert before == machine.CpuTicks(total=1168, busy=133, steal=30)
    after = machine.CpuTicks(total=1168 + 400, busy=133 + 300, steal=30 + 20)
    assert machine.Use.between(before, after, own_ticks=260) == machine.Use(steal=20 / 400, others=40 / 400)
    assert machine.Use.between(before, after, own_ticks=310).others == 0, "ticks are rounded"
    assert machine.Use.between(before, before, 0) == machine.Use(0.0, 0.0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_is_asked_for_its_own_time_and_memory():
    assert machine._after_name("7 (a (b) c) S 1 2") == ["S", "1", "2"]
    ticks, used = machine.ticks_of(os.getpid()), resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime
    assert ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(seconds, abs=0.5)
    assert 2**20 < machine.resident_bytes(os.getpid()) < 1.1 * 1024 * used.ru_maxrss
    assert machine.CpuTicks.now().busy > 0


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_ratio():
    ratios = np.random.default_rng(0).lognormal(0.2, 0.1, size=12)
    logs = np.log(ratios)
    half = 2.2009851600916384 * logs.std(ddof=1) / math.sqrt(12)  # the 0.975 quantile of t with 11 degrees of freedom
    found = intervals.ratio_interval(ratios)
    assert found == pytest.approx([math.exp(logs.mean() + x) for x in (-half, 0, half)], rel=1e-9)
    assert intervals.ratio_interval(1 / ratios) == pytest.approx([1 / x for x in reversed(found)], rel=1e-9)
    assert intervals.ratio_interval([1.5]) == (0.0, pytest.approx(1.5), math.inf)


def test_the_interval_holds_the_ratio_in_95_of_100_samples():
    rng = np.random.default_rng(1)
    held = [
        low <= 1.3 <= high for low, _, high in map(intervals.ratio_interval, 1.3 * rng.lognormal(0, 0.2, (2000, 6)))
    ]
    assert 0.935 <= np.mean(held) <= 0.965


def turns_of(peer, step_s, losses, **changes):
    """One turn for each round; each has a slow first step, which does not count."""
    usual = {"peak_bytes": 2**30, "steal": 0.0, "others": 0.01, "flops_before": 100e9, "flops_after": 102e9}
    return [
        peer_report.Turn(
            peer,
            number,
            seconds=[9.0, 0.9 * step, step, 1.2 * step],
            losses=losses[4 * number :][:4],
            **(usual | changes),
        )
        for number, step in enumerate(step_s)
    ]


def test_the_report(capsys):
    start = peer_report.Started(8.0, [2.0], tokens_per_step=2048, flops_per_token=1e6, version="1", options="a=1")
    started = {"ours": start, "theirs": replace(start, losses=[2.0 + 2e-6], options="", dtype="bfloat16")}
    ours = turns_of("ours", [0.4, 0.5, 0.2], [1.0] * 12)
    theirs = turns_of("theirs", [0.6, 0.5, 0.4], [1.0] * 11 + [1.0 + 3e-6], steal=0.2, flops_after=95e9)
    peaks = [{"numpy": 90e9, "torch": 110e9}, {"numpy": 125e9, "torch": 120e9, "torch bfloat16": 300e9}]
    turns = [ours[1], theirs[0], *theirs[1:], ours[0], ours[2]]
    found = peer_report.report(
        machine.Processor.parse(EPYC), started, turns, peaks, {"ours": [(8.0, 3.0), (10.0, 4.0)]}
    )
    assert (found["rounds"], found["peak_flops"], found["peak_library"]) == (3, 125e9, "numpy")
    mine, other = found["peers"]["ours"], found["peers"]["theirs"]
    assert mine["tokens_per_second"] == 2048 / 0.4
    assert mine["share_of_peak"] == pytest.approx(2048 / 0.4 * 1e6 / 125e9)
    assert other["share_of_peak"] == pytest.approx(2048 / 0.5 * 1e6 / 300e9)
    assert (mine["ahead_by"], mine["loss_differs"]) == (None, 0.0)
    assert other["ahead_by"] == pytest.approx(intervals.ratio_interval([0.6 / 0.4, 1.0, 0.4 / 0.2]))
    assert other["loss_differs"] == pytest.approx(3e-6)
    assert found["noise"]["steal"] == [0.1, 0.2]
    assert found["noise"]["product_flops"] == [100e9, 96.25e9, 101.5e9, 95e9, 102e9]
    assert found["noise"]["product_drift"] == pytest.approx((0.02 + 0.05) / 2)
    printed = capsys.readouterr().out
    assert "3 rounds; fastest product: 125 GFLOP/s (numpy), 300 GFLOP/s (torch bfloat16)" in printed
    assert "warning: the machine was not quiet" in printed
    assert "ours: first step 9.00 s with an empty cache, 3.50 s with a filled one (medians of 2)" in printed
    assert "ours: a=1" in printed
    json.dumps(found)
    peer_report.report(machine.Processor.parse(EPYC), {"ours": start}, ours, peaks, {})
    assert "warning" not in capsys.readouterr().out


# --- Processes --------------------------------------------------------------------------------------------------------


def answering(tmp_path, text):
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(text))
    return processes.AnsweringProcess([sys.executable, script], cwd=ROOT / "benchmarks" / "peers")


def test_a_slow_dtype_gets_a_product_that_ends(monkeypatch):
    """A processor without bfloat16: 0.9 GFLOP/s, at which 4,096 x 4,096 takes two and a half minutes."""
    sizes: list[int] = []
    monkeypatch.setattr(products, "rate", lambda multiply, size, repeats: 0.9e9)
    products.peak(sizes.append)
    assert sizes == [512, 1024]
    monkeypatch.setattr(products, "rate", lambda multiply, size, repeats: 100e9)
    products.peak(sizes.append)
    assert sizes[2:] == [512, 4096]


def test_a_process_answers_each_request_and_ends_when_there_are_none(tmp_path):
    process = answering(
        tmp_path,
        """
        import json, sys
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"twice": 2 * int(line)}), flush=True)
        """,
    )
    assert process.answer(timeout_s=60) == {"ready": True}
    assert [process.ask(str(number), timeout_s=60)["twice"] for number in (4, 5)] == [8, 10]
    process.end()
    assert process._process.returncode == 0


def test_a_process_that_fails_is_told_with_what_it_printed(tmp_path):
    process = answering(tmp_path, "import sys; print('no such thing', file=sys.stderr); sys.exit(3)")
    with pytest.raises(processes.PeerFailedError, match=r"exit code 3\nno such thing"):
        process.answer(timeout_s=60)
    with pytest.raises(processes.PeerFailedError, match="exit code 3"):
        process.ask("1", timeout_s=60)
    process.end()
    prints = answering(tmp_path, "print('Hello')")
    with pytest.raises(processes.PeerFailedError, match="Hello"):
        prints.answer(timeout_s=60)
    prints.end()


def test_a_process_that_does_not_answer_or_end_is_killed(tmp_path):
    process = answering(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(processes.PeerFailedError, match="no answer after 0 s"):
        process.answer(timeout_s=0.1)
    process.end(timeout_s=0.1)
    assert process._process.returncode == -9


def test_a_peer_takes_as_many_steps_as_it_is_asked_for(tmp_path):
    """Whatever libraries print stays out of the answers."""
    pytest.importorskip("psutil")
    process = answering(
        tmp_path,
        """
        import os, sys
        sys.path.insert(0, os.getcwd())
        import common
        clock, loss = common.Clock(version="1.0"), 0.0
        while clock.tick(loss):
            loss += 1
            print("a library's message")
            os.system("echo another process")
        print(f"{loss:g} steps", file=sys.stderr)
        """,
    )
    first = process.answer(timeout_s=60)
    assert (first["losses"], first["version"]) == ([0.0], "1.0")
    assert 0 < first["first_step_s"] < 60
    second, third = process.ask("3", timeout_s=60), process.ask("1", timeout_s=60)
    assert (second["losses"], third["losses"]) == ([1.0, 2.0, 3.0], [4.0])
    assert len(second["seconds"]) == 3
    assert second["peak_bytes"] <= third["peak_bytes"]
    process.end()
    assert process._process.returncode == 0


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "jaxlm,caffe"], "--peers: caffe given. Known: all, jaxlm, jaxlm-2"),
        (["--peers", "jaxlm,jaxlm"], "names a peer twice"),
        (["--rounds", "1"], "--rounds: 1 given, at least 2 expected"),
        (["--steps", "0"], "--steps: 0 given, at least 1 expected"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cpu_peers.py", *arguments])
    with pytest.raises(SystemExit):
        cpu_peers.main()
    assert message in capsys.readouterr().err


def test_the_tuned_peer_only_runs_on_request(monkeypatch):
    for arguments, expected in (
        ([], ["jaxlm", "bare-unroll-2", "torch-eager", "torch-compile"]),
        (["--peers", "torch-eager,jaxlm", "--tuned"], ["torch-eager", "jaxlm", "jaxlm-tuned"]),
        (["--peers", "all"], [name for name in cpu_peers.PEERS if name != "jaxlm-tuned"]),
    ):
        monkeypatch.setattr(sys, "argv", ["cpu_peers.py", *arguments])
        assert cpu_peers.chosen(cpu_peers.parse_arguments()) == expected


def test_jaxlms_configuration_is_that_of_its_peers(monkeypatch):
    pytest.importorskip("psutil")
    common = importlib.import_module("common")
    config = read_config(ROOT / "benchmarks" / "peers" / "gpt2.yaml")
    model, trainer, optimizer = config.model, config.trainer, config.optimizer
    assert (model.seq_len, model.hidden_dim, model.num_heads, model.num_layers) == (
        *(common.SEQ_LEN, common.HIDDEN, common.HEADS, common.LAYERS),
    )
    assert (config.data.vocab_size, trainer.train_batch_size) == (common.VOCAB, common.BATCH)
    assert (optimizer.beta1, optimizer.beta2) == common.BETAS
    assert (optimizer.learning_rate, optimizer.epsilon) == (common.LEARNING_RATE, common.EPSILON)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (common.WEIGHT_DECAY, common.CLIP)
    assert (optimizer.lr_schedule, optimizer.warmup, trainer.num_train_steps) == ("constant", 0, common.MOST_STEPS)
    plan = make_plan(replace(config, trainer=replace(trainer, per_device_parallelism=1)), "peer", common.VOCAB)
    assert common.flops_per_token() == plan.config.model.flops_per_token(common.VOCAB).causal


@pytest.mark.soak
def test_the_benchmark_runs_completely(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("psutil")
    command = [sys.executable, ROOT / "benchmarks" / "cpu_peers.py", "--here", "--peers", "jaxlm,torch-eager"]
    few = ["--rounds", "2", "--steps", "1", "--output", str(tmp_path / "turns.json")]
    done = subprocess.run([*command, *few], capture_output=True, text=True, env=ENVIRONMENT, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rounds"] == 2
    assert found["peers"]["torch-eager"]["loss_differs"] < 1e-5, "the same work"
    low, mean, high = found["peers"]["torch-eager"]["ahead_by"]
    assert 0 < low <= mean <= high
    assert all(0 < peer["share_of_peak"] < 1 for peer in found["peers"].values())
    turns = json.loads((tmp_path / "turns.json").read_text())
    assert sorted((turn["round"], turn["peer"]) for turn in turns) == [
        *((0, "jaxlm"), (0, "torch-eager"), (1, "jaxlm"), (1, "torch-eager")),
    ]


@pytest.mark.slow
def test_the_tuned_peer_says_how_to_tune(tmp_path):
    pytest.importorskip("psutil")
    command = [sys.executable, ROOT / "benchmarks" / "peers" / "jaxlm_run.py", "1", tmp_path, "float32", "tuned"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=600, cwd=tmp_path)
    assert done.returncode == 1
    assert (
        "nothing was tuned for this step in cache/peers on this machine. Tune it: jaxlm bench --config_path"
        in done.stderr
    )
