"""Model cards of exported folders, and pushes to a stand-in of the Hugging Face Hub."""

import base64
import http.server
import json
import threading
import time

import jax
import numpy as np
import pytest
import yaml

from jaxlm.commands import convert
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.engine.entry import enter_phase
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.model_card import ModelCard
from jaxlm.interop.hf.source_folder import NO_SOURCE
from jaxlm.models.base import vocab_axis
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan, upload_repository
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.export import Exporter, ExportHook, logged_evaluation, model_card
from tests.answers import write_tokenizer
from tests.engine.helpers import one_device

SIZES = {"seq_len": 32, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 1, "num_heads": 4}
OF_BASE = "---\nlicense: apache-2.0\nlanguage: [en]\nbase_model: older\n---\n\n# Base\n\nBeware of this | that.\n"


@pytest.fixture
def hub(monkeypatch):
    """A stand-in of the Hub that keeps what is pushed: repository -> [(message, files)]."""
    pytest.importorskip("huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.commits, server.refuses = {}, False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_standin")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "line",
    ["last_updated: 2024-02-30", "n: !!int ''", "when: !!timestamp x", 'x: "\\UFFFFFFFF"', "a: " + "[" * 5000],
)
def test_no_header_of_a_base_model_ends_the_export(line):
    of_base = f"---\nlicense: mit\nlanguage: no\n{line}\n---\n# Base\n"
    text = ModelCard("m", "transformers", "It is.", {}, of_base=of_base).text()
    assert "# Base" in text
    if "[[" not in line and "UFFF" not in line:
        header = yaml.safe_load(text.split("---")[1])
        assert header["license"] == "mit"
        assert header["language"] == "no", "Norwegian, and not false"


@pytest.mark.parametrize("depth", range(1, 500, 7))
def test_a_nested_license_is_left_out(depth):
    of_base = f"---\nlicense: {'[' * depth}mit{']' * depth}\nlanguage: no\n---\n# Base\n"
    text = ModelCard("m", "transformers", "It is.", {}, of_base=of_base).text()
    assert "# Base" in text
    assert ("mit" in yaml.safe_load(text.split("---")[1]).get("license", [])) == (depth == 1)


def test_a_card_of_many_rules_is_split_in_linear_time():
    began, card = time.perf_counter(), "---\n" + "\n" * 200_000
    assert card.strip() in ModelCard("m", "transformers", "It is.", {}, of_base=card).text()
    assert time.perf_counter() - began < 30  # quadratic: minutes


class HubHandler(http.server.BaseHTTPRequestHandler):
    """The four requests of a push. All files are small, so they are in the commit itself."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"http://{self.headers['Host']}"
        assert self.headers["Authorization"] == "Bearer hf_standin"
        if self.path == "/api/repos/create":
            given = json.loads(body)
            repository = f"{given['organization'] or 'me'}/{given['name']}"
            is_new = repository not in self.server.commits
            self.server.commits.setdefault(repository, [])
            self.answer({"url": f"{url}/{repository}"}, 200 if is_new else 409)
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif "/commit/" in self.path and self.server.refuses:
            self.answer({"error": "the disk of the Hub is full"}, 403)
        elif "/commit/" in self.path:
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            head, *files = [json.loads(line) for line in body.splitlines()]
            contents = {f["value"]["path"]: base64.b64decode(f["value"]["content"]) for f in files}
            self.server.commits[repository].append((head["value"]["summary"], contents))
            oid = f"{len(self.server.commits[repository]):040x}"
            self.answer({"commitUrl": f"{url}/{repository}/commit/{oid}", "commitOid": oid})
        else:
            self.answer({})

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def planned(**keys):
    data = {"train_urls": ["books/*.txt", "hf:owner/prose?name=en"], "validation_urls": ["held_out.txt"]}
    data |= {"tokenizer": "elsewhere"} if "initialize_from_hf" in keys else {}
    trainer = {"id": "mine", "train_batch_size": 8, "num_train_steps": 200}
    config = {"model": {"type": "llama", **SIZES}, "data": data, "trainer": trainer}
    return make_plan(decode_run(ConfigSource({**config, **keys}), None), "mine", 320)


def test_the_card_says_what_the_model_was_trained_on_how_and_with_what_result():
    """The Hub's own library reads its header."""
    hub = pytest.importorskip("huggingface_hub")
    plan = planned(initialize_from_hf="owner/base@v2", optimizer={"learning_rate": 3e-4, "lr_schedule": "linear"})
    card = model_card(plan, plan.model, 40, {"eval/loss": 2.34567}, hardware="8 x H100")
    read = hub.ModelCard(card.text())
    assert read.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "owner/base",
        "datasets": ["owner/prose"],
    }
    for part in (
        "# mine",
        "It was made from `owner/base@v2`",
        "| steps | 40 of 200 |",
        "| tokens | 10,240 (320 sequences of up to 32 tokens) |",
        "NextToken with Adam, linear schedule from 0.0003",
        "| data of train | books/*.txt, hf:owner/prose?name=en |",
        "| hardware | 8 x H100 |",
        f"JAX {jax.__version__}",
        "| eval/loss | 2.3457 |",
    ):
        assert part in read.text, part
    assert "held_out" not in read.text


def test_the_card_of_the_base_stays_with_its_license():
    hub = pytest.importorskip("huggingface_hub")
    card = ModelCard("mine", "peft", "A model.", {"Training": [("a | b", "c\nd")], "Empty": []}, of_base=OF_BASE)
    read = hub.ModelCard(card.text())
    assert read.data.to_dict() == {
        **{"license": "apache-2.0", "language": ["en"], "library_name": "peft"},
        "pipeline_tag": "text-generation",
    }
    assert "\n## Card of the base model\n\n# Base\n\nBeware of this | that.\n" in read.text
    assert "| a \\| b | c d |" in read.text
    assert "Empty" not in read.text
    for odd in ("no header", "---\n[1, 2]\n---\ntext", "---\na: [\n---\ntext", "---\nnever ends"):
        card = ModelCard("mine", "peft", "A model.", {}, of_base=odd)
        assert "license" not in hub.ModelCard(card.text()).data.to_dict()
        assert odd in card.text(), "nothing is lost"


def test_a_local_base_is_named_but_is_no_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    plan = planned(initialize_from_hf="base")
    card = model_card(plan, plan.model, 0, {})
    assert (card.base_model, "`base`" in card.summary) == (None, True)


def test_the_last_logged_evaluation_is_found(tmp_path):
    config = planned(trainer={"id": "mine", "train_batch_size": 8, "log_dir": str(tmp_path)}).config
    assert logged_evaluation(config, 20) == {}
    records = [
        {"step": 10, "eval/loss": 3.0},
        {"step": 20, "eval/loss": 2.0, "eval/bpb": None},
        {"step": 20, "lr": 1.0},
    ]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert logged_evaluation(config, 20) == {"eval/loss": 2.0}
    assert logged_evaluation(config, 19) == {"eval/loss": 3.0}
    assert logged_evaluation(config, 9) == {}


@pytest.mark.slow
def test_exports_are_pushed_and_a_failed_push_ends_nothing(tmp_path, hub):
    num_tokens = write_tokenizer(tmp_path / "tokenizer")
    config = {"model": {"type": "llama", **SIZES}, "trainer": {"id": "mine", "train_batch_size": 8}}
    config |= {"hf_save_path": str(tmp_path / "out"), "hf_upload": True}
    plan = make_plan(decode_run(ConfigSource(config), None), "mine", num_tokens)
    tokenizer, lines = load_tokenizer(str(tmp_path / "tokenizer")), []
    assert upload_repository(plan.config) == "mine"
    (phase,) = plan.phases
    hook = ExportHook(
        *(tmp_path / "out", 1, phase, Exporter(plan, tokenizer, NO_SOURCE, np.float32), lines.append),
        latest=lambda: {"eval/loss": 2.5},
        upload="mine",
    )
    with plan.layout.use():
        state = enter_phase(plan.state_builder, phase, plan.layout, None)()
        hook.run(1, state)
        hub.refuses = True
        hook.run(2, state)
        hub.refuses = False
        hook.run(3, state)
    url = f"http://127.0.0.1:{hub.server_port}/me/mine"
    assert [line for line in lines if "exported" not in line][::2] == [f"step {n}: pushed to {url}" for n in (1, 3)]
    (failed,) = (line for line in lines if "NOT PUSHED" in line)
    assert failed.startswith("warning: step 2: NOT PUSHED: cannot push to mine on the Hugging Face Hub (")
    assert failed.endswith(f"To push it later, run: hf upload mine {tmp_path}/out/step-2")
    assert list(hub.commits) == ["me/mine"]
    assert [message for message, _ in hub.commits["me/mine"]] == ["Step 1", "Step 3"]
    for step, (_, files) in zip((1, 3), hub.commits["me/mine"], strict=True):
        folder = tmp_path / "out" / f"step-{step}"
        assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert b"| eval/loss | 2.5000 |" in files["README.md"]
    assert (tmp_path / "out" / "step-2" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hf_upload": "me/mine"}, "hf_upload: me/mine given, but hf_save_path is None"),
        ({"hf_upload": True, "hf_save_path": "memory://x"}, "hf_save_path is memory://x. It pushes the folders in"),
        ({"hf_upload": "a b", "hf_save_path": "out"}, "hf_upload: 'a b' given, but owner/name expected"),
        ({"hf_upload": "me/mine@v1", "hf_save_path": "out"}, "hf_upload: 'me/mine@v1' given, but owner/name expected"),
    ],
    ids=str,
)
def test_what_cannot_be_pushed_is_refused_at_the_plan(keys, message):
    with pytest.raises(ConfigError, match=message):
        planned(**keys)


@pytest.fixture
def imported(tmp_path):
    """A folder with a model card, as it comes from the Hub."""
    num_tokens = write_tokenizer(tmp_path / "base")
    config = LlamaConfig(**SIZES)
    model = jax.jit(lambda: config.build(vocab_axis(num_tokens), key=jax.random.key(0)))()
    files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} | {"README.md": OF_BASE.encode()}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    save_folder(tmp_path / "imported", model, config, one_device(), dtype=np.float32, files=files, special_ids=ids)
    return tmp_path / "imported"


@pytest.mark.slow
def test_convert_keeps_an_imported_card_and_pushes(imported, tmp_path, hub, capsys):
    load_tokenizer(str(imported)).save(tmp_path / "run")
    assert (tmp_path / "run" / "README.md").read_text() == OF_BASE, "a checkpoint keeps it"
    command = ["to-hf", "--checkpoint", str(imported), "--output_dir", str(tmp_path / "out"), "--upload", "org/copy"]
    assert convert.main(command) == 0
    assert f"pushed to http://127.0.0.1:{hub.server_port}/org/copy" in capsys.readouterr().out
    ((message, files),) = hub.commits["org/copy"]
    assert message == str(imported)
    card = (tmp_path / "out" / "README.md").read_text()
    assert files["README.md"].decode() == card
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "converted with jaxlm" in card
    assert "Beware of this | that." in card
    assert "## Training" not in card


@pytest.mark.slow
def test_a_push_that_cannot_work_is_refused_before_anything_is_written(imported, tmp_path, hub, monkeypatch, capsys):
    command = ["to-hf", "--checkpoint", str(imported), "--output_dir", str(tmp_path / "out"), "--upload"]
    assert convert.main([*command, "org/copy@v1"]) == 2
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert convert.main([*command, "org/copy"]) == 2
    assert not (tmp_path / "out").exists()
    shown = capsys.readouterr().err
    assert "--upload: 'org/copy@v1' given, but owner/name expected" in shown
    assert "--upload: not logged in to the Hugging Face Hub. Run hf auth login, or set HF_TOKEN" in shown
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_standin")
    hub.refuses = True
    assert convert.main([*command, "org/copy"]) == 1
    assert "cannot push to org/copy on the Hugging Face Hub" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").is_file()
