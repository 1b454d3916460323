"""A chat template that is given as a file stays with the model: in checkpoints, exports, chat and evaluations elsewhere."""

import io
import json
import shutil

import pytest

from jaxlm.commands import chat, convert
from jaxlm.data.tokenizer.chat_template import with_templates
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from tests.answers import TEMPLATE, instructions, write_tokenizer

OWN = "{% for m in messages %}({{ m.role }}) {{ m.content }}<|end|>{% endfor %}"
CHATS = [
    [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    for record in instructions()
]
CONFIG = """
data:
  train_urls: [chats.jsonl]
  validation_urls: [chats.jsonl]
  cache_dir: cache
  tokenizer: tokenizer
  format: {type: chat, chat_template: given.jinja}
model: {type: llama, seq_len: 64, hidden_dim: 32, intermediate_dim: 64, num_layers: 1, num_heads: 4, num_kv_heads: 2}
trainer: {num_train_steps: 2, train_batch_size: 8, checkpointer: {base_path: checkpoints}}
"""


@pytest.fixture(scope="module")
def moved(workplace, tmp_path_factory):
    """The checkpoint and the chats of a run, without its template, its tokenizer and its caches."""
    place, elsewhere = workplace(), workplace()
    write_tokenizer(place.folder / "tokenizer")
    (place.folder / "tokenizer" / "chat_template.jinja").unlink()
    (place.folder / "given.jinja").write_text(TEMPLATE)
    (place.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in CHATS * 8))
    (place.folder / "run.yaml").write_text(CONFIG)
    place.finish("--config_path", "run.yaml")
    shutil.copytree(place.folder / "checkpoints" / "run", elsewhere.folder / "run")
    shutil.copy(place.folder / "chats.jsonl", elsewhere.folder)
    logged = place.records()
    return elsewhere, next(r["eval/loss"] for r in reversed(logged) if "eval/loss" in r)


@pytest.mark.slow
def test_an_export_has_the_template_as_transformers_reads_it(moved, monkeypatch):
    transformers = pytest.importorskip("transformers")
    place, _ = moved
    monkeypatch.chdir(place.folder)
    assert convert.main(["to-hf", "--checkpoint", "run", "--output_dir", "exported"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.folder / "exported")
    text = tokenizer.apply_chat_template(CHATS[0], tokenize=False)
    assert text == "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in CHATS[0])
    assert not list((place.folder / "exported").glob("given*"))


@pytest.mark.slow
def test_the_checkpoint_chats_and_evaluates_where_the_file_is_not(moved, monkeypatch, capsys):
    place, logged = moved
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of Italy?\n"))
    assert chat.main(["--checkpoint", "run", "--max_new_tokens", "4"]) == 0
    assert "tokens/s]" in capsys.readouterr().err
    done = place.finish("--checkpoint", "run", module="jaxlm.commands.evaluate")
    assert json.loads(done.out.splitlines()[-1])["loss"] == pytest.approx(logged, rel=1e-6)


def test_the_last_given_template_becomes_the_tokenizers_own_and_all_files_are_kept(tmp_path):
    write_tokenizer(tmp_path / "a")
    settings = tmp_path / "a" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "of the settings"}))
    plain = load_tokenizer(str(tmp_path / "a"))
    paths = [str(tmp_path / f"{name}.jinja") for name in "xy"]
    for path, text in zip(paths, (TEMPLATE, OWN), strict=True):
        with open(path, "w") as file:
            file.write(text)
    with_templates(plain, [*paths, "{{ inline }}", paths[1]], "key").save(tmp_path / "b")
    saved = load_tokenizer(str(tmp_path / "b"))
    assert saved.chat_template == OWN
    assert saved.given_templates == dict(zip(paths, (TEMPLATE, OWN), strict=True))
    assert "chat_template" not in json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert saved.fingerprint == plain.fingerprint
    assert with_templates(plain, [], "key") is plain
