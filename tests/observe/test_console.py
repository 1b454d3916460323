import io

from jaxlm.core.devices import peak_flops
from jaxlm.observe.console import Console, duration, exact_duration, folded, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_progress_line_that_other_lines_replace():
    stream = Terminal()
    console = Console(stream)
    console.progress("step 1")
    console.progress("step 2")
    console.log("eval")
    assert stream.getvalue().split("\r\x1b[2K") == ["", "step 1", "step 2", "eval\n"]


def test_without_a_terminal_progress_is_logged_at_intervals_and_at_the_end():
    stream = io.StringIO()
    console = Console(stream)
    for step in range(100):
        console.progress(f"step {step}")
    console.progress("step 100", last=True)
    assert stream.getvalue() == "step 0\nstep 100\n"


def test_the_log_has_no_progress_lines(tmp_path):
    console = Console(Terminal())
    console.log_to(tmp_path / "train.log")
    console.progress("step 1")
    console.log("eval")
    console.close()
    assert (tmp_path / "train.log").read_text() == "eval\n"


def test_durations_and_tables():
    assert [duration(s) for s in (42.4, 190, 7500)] == ["42s", "3m10s", "2h05m"]
    seconds = (0, 1.5e-5, 0.0123, 0.4567, 12.34, 123456)
    assert [exact_duration(s) for s in seconds] == ["0 s", "15 us", "12.3 ms", "457 ms", "12.3 s", "123,456 s"]
    assert table("t", [("a", "1"), ("long", "2")]) == "t\n  a     1\n  long  2"


def test_peak_rates_are_found_by_jaxs_device_name():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5p") == 459e12
    assert peak_flops("cpu") is None


def test_rows_that_are_wider_than_a_terminal_go_on_below_their_value():
    text = table("run", [("mesh", "4 x data"), ("parameter sharding", "embed over data, " * 4 + "mlp over model-axis")])
    narrow = folded(text, 60).splitlines()
    assert [line for line in narrow if len(line) > 60] == []
    assert narrow[:2] == text.splitlines()[:2]
    assert all(line.startswith(" " * 22) and line[22] != " " for line in narrow[3:]), "below the value"
    assert " ".join(line.strip() for line in narrow[2:]) == text.splitlines()[2].strip()
    assert folded(text, 30) == text, "names of half a terminal leave no room"

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, is_folded in ((Terminal(), True), (io.StringIO(), False)):
        Console(stream).log(table("run", [("name", "word " * 100)]))
        assert (stream.getvalue().count("\n") > 2) == is_folded, "what other programs read has one line for each row"
