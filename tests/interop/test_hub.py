"""Copies of the hub's repositories, with and without a network, and the messages."""

import http.server
import json
import threading

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.hub import local_folder
from jaxlm.session.load_model import open_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "owner/both": [
        *("config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5"),
        *("consolidated.safetensors", "original/model.safetensors"),
    ],
    "owner/torch": ["config.json", "pytorch_model.bin"],
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local hub with its own cache; `taken_off` disconnects it."""
    pytest.importorskip("huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    taken_off(server)


def taken_off(server):
    """Refuses all requests from now on."""
    server.shutdown()
    server.server_close()


class HubHandler(http.server.BaseHTTPRequestHandler):
    """The three responses that a snapshot needs: the commit, its files, and each file."""

    def do_GET(self):
        owner_and_name, _, rest = self.path.removeprefix("/api/models/").lstrip("/").partition("/re")
        repository = owner_and_name.split("/tree/")[0]
        files = REPOSITORIES.get(repository)
        if files is None:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in self.path:
            entries = [{"type": "file", "path": f, "size": len(f), "oid": f.encode().hex()} for f in files]
            self.answer(json.dumps(entries).encode())
        elif self.path.startswith("/api/"):
            self.answer(json.dumps({"id": repository, "sha": COMMIT, "siblings": []}).encode())
        else:
            name = rest.rpartition("/")[2]
            self.answer(name.encode(), headers={"X-Repo-Commit": COMMIT, "ETag": f'"{name.encode().hex()}"'})

    do_HEAD = do_GET

    def answer(self, body, status=200, headers=()):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("name", "weights"), [("owner/both", "model.safetensors"), ("owner/torch@main", "pytorch_model.bin")]
)
@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "no network"])
def test_cached_hub_repositories_need_no_network(hub, monkeypatch, name, weights, how):
    """Only one kind of weight files is downloaded, and only that is needed."""
    folder = local_folder(name, "x", weights=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", weights]
    with pytest.raises(ConfigError, match="Downloading from the Hub failed: RepositoryNotFoundError"):
        local_folder("owner/mdoel", "x", weights=True)
    taken_off(hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", how == "HF_HUB_OFFLINE")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits for a hub that is not there"))
    assert local_folder(name, "x", weights=True) == folder
    with pytest.raises(ConfigError, match="Downloading from the Hub failed: LocalEntryNotFoundError"):
        local_folder("owner/mdoel", "x", weights=True)
    (folder / weights).unlink()
    with pytest.raises(ConfigError, match=f"Downloading from the Hub failed.*{weights}"):
        local_folder(name, "x", weights=True)


def test_the_offline_error_names_the_local_alternative(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("some/model@v1", "gpt2"):
        message = (
            f"initialize_from_hf: '{name}' must be a folder or a repository on the Hugging Face Hub"
            f".*no folder at .*/{name}.*\n.*path of that folder"
        )
        with pytest.raises(ConfigError, match=message):
            local_folder(name, "initialize_from_hf", weights=True)
    for name in ("./no/such/folder", "no/such/folder", "no folder"):
        with pytest.raises(ConfigError, match="is not a folder"):
            local_folder(name, "initialize_from_hf", weights=True)
    assert local_folder(str(tmp_path), "x", weights=True) == tmp_path


def test_the_error_for_an_unknown_name_mentions_local_folders_and_the_hub(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "mine").mkdir()
    for name in ("gpt2", "gpt2@v1", "owner/model", "checkpoints/model@v1"):
        with pytest.raises(
            ConfigError, match=f"--checkpoint: '{name}' must be a folder or a repository on the Hugging Face Hub"
        ):
            open_model(name, {})
    misspelt = (
        r"checkpoints/model: no checkpoint found.*\)\.{} If you mean a Hugging Face repository,"
        r" write checkpoints/model@main"
    )
    with pytest.raises(ConfigError, match=misspelt.format("")):
        open_model("checkpoints/model", {})
    (tmp_path / "checkpoints" / "mode1" / "step-2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=misspelt.format(r" Existing folders: checkpoints/mode1\.")):
        open_model("checkpoints/model", {})
    for name in ("mine", "./gpt2", "s3.bucket/no/run"):
        with pytest.raises(ConfigError, match=r"no checkpoint found.*\)\.$"):
            open_model(name, {})
