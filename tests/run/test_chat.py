"""Chat: turns through the template, stop conditions, and the error without a template."""

import io

import jax
import pytest

from jaxlm import chat, sample
from jaxlm.chat import Conversation, turn_ends
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.base import vocab_axis
from jaxlm.models.families.llama import LlamaConfig
from jaxlm.models.inference.generate import GenerationConfig, generate
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.run.load_model import open_model
from tests.answers import SPECIAL, write_tokenizer
from tests.engine.helpers import one_device

MODEL = LlamaConfig(
    seq_len=128, hidden_dim=32, intermediate_dim=48, num_layers=1, num_heads=4, num_kv_heads=2, initializer_range=0.3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hf")
    num_tokens = write_tokenizer(place / "tokenizer")
    model = jax.jit(lambda: MODEL.build(vocab_axis(num_tokens), key=jax.random.key(0)))()
    files = {path.name: path.read_bytes() for path in (place / "tokenizer").iterdir()}
    save_folder(
        place / "model", model, MODEL, one_device(), dtype="float32", files=files, special_ids={"eos_token_id": 0}
    )
    return place / "model"


def test_turns_go_through_the_template_and_end_where_it_says(folder, monkeypatch):
    held, lookup = [], PrefixCache.lookup
    monkeypatch.setattr(PrefixCache, "lookup", lambda *args: held.append(found := lookup(*args)) or found)
    named = open_model(str(folder), {})
    template = ChatTemplate.load(None, named.tokenizer, "x")
    assert (named.tokenizer.stop_ids, turn_ends(template, named.tokenizer)) == ((0,), (SPECIAL.index("<|end|>"),))
    with named.plan.layout.use():
        model = named.for_inference()
        talk = Conversation(
            model, named.tokenizer, template, GenerationConfig(12, temperature=0.0, stop_ids=(0,)), "Be short."
        )
        text = "<|system|>Be short.<|end|>"
        for line in ("Hello", "And now?", "That was far too long."):
            answered = "".join(talk.answer(line))
            text += f"<|user|>{line}<|end|><|assistant|>"
            ids = named.tokenizer.encode_with_offsets([text])[0][0].tolist()
            expected = generate(model, [ids], max_new_tokens=12, temperature=0.0, eos_id=0)[0]
            assert answered == named.tokenizer.decode(expected), "differs from generation without the prefix cache"
            assert talk.num_tokens == len(expected)
            text += f"{answered}<|end|>"
        assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 3]
        assert [num_held for _, num_held in held] == [0, 0, len(ids) - 64], "what is held is not read again, but for 64"


@pytest.mark.slow
def test_the_commands_accept_a_hugging_face_folder(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n/new\nAgain\n/exit\nnot read\n"))
    assert chat.main(["--checkpoint", str(folder), "--max_new_tokens", "8", "--cache_dtype", "int8"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("tokens/s]") == 2
    arguments = ["--checkpoint", str(folder), "--prompt", "The", "--max_new_tokens", "8", "--temperature", "0"]
    assert sample.main(arguments) == 0
    free = capsys.readouterr().out.removesuffix("\n---\n")
    stop = free[5:7]
    assert sample.main([*arguments, "--stop", stop]) == 0
    assert capsys.readouterr().out.removesuffix("\n---\n") == "The" + free[3 : free.index(stop, 3)]


def test_an_empty_stop_text_is_refused(capsys):
    assert sample.main(["--checkpoint", "nowhere", "--stop", "b", "--stop", ""]) == 2
    assert "--stop: '' given" in capsys.readouterr().err


@pytest.mark.slow
def test_a_conversation_that_is_too_long_is_reported_and_restarted(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'long ' * 200}\n/new\nHello\n"))
    assert chat.main(["--checkpoint", str(folder), "--max_new_tokens", "4"]) == 0
    shown = capsys.readouterr().err
    assert "tokens, but the model's maximum sequence length is 128. Use /new to start a new conversation" in shown
    assert shown.count("tokens/s]") == 1


def test_ctrl_c_stops_an_answer_and_not_the_conversation(capsys, monkeypatch):
    class Talk:
        num_tokens = 3

        def answer(self, line):
            yield "so far"
            raise KeyboardInterrupt

    chat._answer(Talk(), "Hello")
    shown = capsys.readouterr()
    assert shown.out == "so far [stopped]\n"
    assert shown.err.startswith("[3 tokens, ")

    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert list(chat._input_lines(interactive=True)) == [], "where nothing is written, it ends"


def test_a_missing_template_says_what_to_do(folder, tmp_path, capsys):
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert chat.main(["--checkpoint", str(tmp_path)]) == 2
    assert "--chat_template: null, but the tokenizer has no chat template. Give one" in capsys.readouterr().err
