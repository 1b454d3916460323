"""No file, log, page or tracker of a run has a secret that its user has in the environment, in URLs or in keys."""

import gzip
import html
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
    "PGPASSWORD": "canary-postgres-77",
    "MYTOKEN": "canary-mine-78",
    "KAGGLE_KEY": "0123456789canary0123456789",
    "DB_PWD": "canary<&>'79\\",
}
IN_URL = ("canary:pw88", "canary-sig99", "canary-code-9a", "canary-access-9b", "12/canary-9c", "canary-user-9d")
# Keys as other programs spell them, and their secrets.
KEYS = {
    name: f"canary-key-a{number}"
    for number, name in enumerate(
        ("api_key", "sas_token", "account_key", "clientSecret", "secretAccessKey", "connection_string")
    )
}
IN_KEYS = tuple(KEYS.values())
CANARIES = (*VARIABLES.values(), *IN_URL, *IN_KEYS)
CALLBACK = """
from dataclasses import dataclass
from jaxlm.observe.callbacks import Callback, CallbackConfig

class Asking(Callback):
    pass

@dataclass(frozen=True)
class Ask(CallbackConfig):
    server: str = ""
    urls: str = ""
    api_key: str = ""
    sas_token: str = ""
    account_key: str = ""
    clientSecret: str = ""
    secretAccessKey: str = ""
    connection_string: str = ""

    def check(self):
        pass

    def open(self, context):
        context.log(f"asking {self.server} with {self.api_key}")
        context.log(str(self))
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
        if any(form.encode() in content for form in (secret, json.dumps(secret)[1:-1], html.escape(secret)))
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
        evals: [{type: loss}, {type: samples, prompts: PROMPTS, max_new_tokens: 4}]
        """.replace("PROMPTS", json.dumps(["def ", *(f"my {secret} " for secret in VARIABLES.values())]))
    )
    address = f"{url}/train.txt?X-Amz-Signature={IN_URL[1]}"
    trackers = "[{type: wandb, project: p, mode: offline}, {type: tensorboard, logdir: tb}]"
    urls = f"https://h/cb?code={IN_URL[2]} https://h/cb#access_token={IN_URL[3]} https://u:{IN_URL[4]}@h HTTPS://{IN_URL[5]}@h"
    keys = ", ".join(f"{name}: {value}" for name, value in KEYS.items())
    options = {
        "--config_path": "run.yaml",
        "--data.train_urls": f"['{address}']",
        "--data.cache_dir": "cache",
        "--trainer.tracker": trackers,
        "--trainer.num_train_steps": "12",
        "--model.seq_len": "96",
        "--trainer.callbacks": f"[{{type: 'asking:Ask', server: '{address}', urls: '{urls}', {keys}}}]",
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
    samples = (place.folder / "logs" / "run" / "samples.jsonl").read_text()
    assert samples.count("my <redacted>") >= len(VARIABLES)
    assert {".jsonl", ".log", ".html", ".wandb", ".yaml", ".json", ".safetensors", ".md"} <= written
    assert (place.folder / "logs" / "run" / "config.yaml").read_text().count("<redacted>") >= 3
