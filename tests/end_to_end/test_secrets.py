"""No file, log, page or tracker of a run has a secret that its user has in the environment, in URLs or in keys."""

import gzip
import http.server
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlm.commands import report

VARIABLES = {
    "HF_TOKEN": "hf_canaryAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "HUGGING_FACE_HUB_TOKEN": "canary-hub-11",
    "WANDB_API_KEY": "canary22" * 5,
    "AWS_ACCESS_KEY_ID": "AKIACANARY3333333333",
    "AWS_SECRET_ACCESS_KEY": "canary/44+44",
    "AWS_SESSION_TOKEN": "canary55==",
    "JUDGE_API_KEY": "canary-judge-66",
}
IN_URL = ("canary:pw88", "canary-sig99")
IN_KEYS = ("canary-key-aa",)
CANARIES = (*VARIABLES.values(), *IN_URL, *IN_KEYS)
CALLBACK = """
from dataclasses import dataclass
from jaxlm.observe.callbacks.base import Callback, CallbackConfig

class Asking(Callback):
    pass

@dataclass(frozen=True)
class Ask(CallbackConfig):
    server: str = ""
    api_key: str = ""

    def check(self):
        pass

    def open(self, context):
        context.log(f"asking {self.server} with {self.api_key}")
        return Asking()
"""


@pytest.fixture
def files(tmp_path) -> Iterator[tuple[Path, str]]:
    """A folder, and the URL of a server of its files, with a user, a password and a signature."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://ada:{IN_URL[0]}@127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def unpacked(data: bytes) -> Iterator[bytes]:
    """A file as it is, and what it is a compressed form of."""
    yield data
    if data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    if zipfile.is_zipfile(io.BytesIO(data)):
        archive = zipfile.ZipFile(io.BytesIO(data))
        yield b"".join(map(archive.read, archive.namelist()))


def leaks(folder: Path, shown: str) -> list[tuple[str, str]]:
    """(where, secret) of all secrets in files and in what was printed."""
    places = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [
        (place, secret)
        for place, data in {**places, "printed": shown.encode()}.items()
        for content in unpacked(data)
        for secret in CANARIES
        if secret.encode() in content or json.dumps(secret)[1:-1].encode() in content
    ]


@pytest.mark.slow
def test_a_run_with_all_trackers_an_export_and_a_page_writes_no_secret(workplace, files, monkeypatch):
    pytest.importorskip("wandb")
    place, (folder, url) = workplace(), files
    (folder / "train.txt").write_text("\n".join(path.read_text() for path in (place.corpus / "train").glob("*.py")))
    (place.folder / "asking.py").write_text(CALLBACK)
    place.write(
        """
        hf_save_path: exports
        hf_save_steps: 12
        evals: [{type: loss}, {type: samples, prompts: ["def "], max_new_tokens: 4}]
        """
    )
    address = f"{url}/train.txt?X-Amz-Signature={IN_URL[1]}"
    trackers = "[{type: wandb, project: p, mode: offline}, {type: tensorboard}]"
    options = {
        "--config_path": "run.yaml",
        "--data.train_urls": f"['{address}']",
        "--data.cache_dir": "cache",
        "--trainer.tracker": trackers,
        "--trainer.num_train_steps": "12",
        "--trainer.callbacks": f"[{{type: 'asking:Ask', server: '{address}', api_key: {IN_KEYS[0]}}}]",
    }
    words = [word for pair in options.items() for word in pair]
    dry = place.finish(*words, "--dry_run", "true", **VARIABLES)
    finished = place.finish(*words, **VARIABLES)
    assert "asking http://ada:<redacted>@127.0.0.1" in finished.out
    resumed = place.run(*words, "--trainer.num_train_steps", "14", **VARIABLES)
    refused = place.run(*words, "--model.hidden_dim", "48", **VARIABLES)
    assert refused.code == 2
    gone = place.run(
        *words, "--trainer.id", "other", "--data.train_urls", f"['{url}/gone.txt?token={IN_URL[1]}']", **VARIABLES
    )
    monkeypatch.chdir(place.folder)
    assert report.main(["run", "--output_path", "page.html"]) == 0
    shown = "".join(one.out + one.err for one in (dry, finished, resumed, refused, gone))
    for path in (place.folder / "run.yaml", place.folder / "asking.py"):
        path.unlink()
    assert leaks(place.folder, shown) == []
    written = {path.suffix for path in place.folder.rglob("*") if path.is_file()}
    assert {".jsonl", ".log", ".html", ".wandb", ".yaml", ".json", ".safetensors", ".md"} <= written
    assert (place.folder / "logs" / "run" / "config.yaml").read_text().count("<redacted>") >= 3
