"""Chat: turns through the template, stop conditions, tool calls, and the error without a template."""

import argparse
import io
from dataclasses import replace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from jaxlm.commands import chat, sample
from jaxlm.commands.chat import Conversation, turn_end_texts, turn_ends
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.templates import NANOCHAT_TOKENS
from jaxlm.data.tokenizer.train_bpe import BpeConfig, train_bpe
from jaxlm.evals.base import EvalContext
from jaxlm.evals.batches import prompt_ids
from jaxlm.evals.samples import SamplesEvalConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.base import Hidden, LanguageModel, vocab_axis
from jaxlm.models.inference.generate import GenerationConfig, generate
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.objectives.next_token import score_batch
from jaxlm.session.generation_options import tool_calls_of
from jaxlm.session.load_model import open_model
from tests.answers import SPECIAL, TEMPLATE, write_tokenizer
from tests.engine.helpers import F32, one_device

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


@pytest.mark.slow
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


@pytest.mark.parametrize("command", [chat, sample])
@pytest.mark.parametrize("count", ["-1", "0"])
def test_commands_refuse_to_generate_no_tokens(folder, monkeypatch, capsys, command, count):
    check_no_tokens(folder, monkeypatch, capsys, command, count)


def check_no_tokens(folder, monkeypatch, capsys, command, count):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert command.main(["--checkpoint", str(folder), "--max_new_tokens", count]) == 2
    assert f"--max_new_tokens: {count} given, 1 or more expected" in capsys.readouterr().err


def test_an_empty_stop_text_is_refused(capsys):
    assert sample.main(["--checkpoint", "nowhere", "--stop", "b", "--stop", ""]) == 2
    assert "--stop: '' given" in capsys.readouterr().err


@pytest.mark.slow
def test_a_conversation_that_is_too_long_is_reported_and_restarted(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'long ' * 200}\n/new\nHello\n"))
    assert chat.main(["--checkpoint", str(folder), "--max_new_tokens", "4"]) == 0
    shown = capsys.readouterr().err
    assert "tokens, but the model's maximum sequence length is 128. Use /reset to start a new conversation" in shown
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


def without_template(folder, copy):
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (copy / path.name).write_bytes(path.read_bytes())
    return open_model(str(copy), {})


def test_a_model_without_a_template_chats_in_chatml(folder, tmp_path, monkeypatch, capsys):
    """The rendered text is transformers' with Qwen's template, which is ChatML; text ends the turn, not a token."""
    named = without_template(folder, tmp_path)
    template = chat._load_template(None, named.tokenizer)
    assert capsys.readouterr().err.startswith("note: the tokenizer has no chat template; chatml is used.")
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert template.prompt(turns, "here") == expected
    assert (turn_ends(template, named.tokenizer), turn_end_texts(template, named.tokenizer)) == ((), ("<|im_end|>",))
    own = ChatTemplate.load(TEMPLATE, named.tokenizer, "key")
    assert turn_end_texts(own, named.tokenizer) == (), "its end is a special token"
    answer = named.tokenizer.encode_batch(["Rome <|is<|im_end|>\n<|im_start|>user"])[0]
    monkeypatch.setattr(chat, "stream_tokens", lambda *_, until, **__: tokens_until(answer, until))
    with named.plan.layout.use():
        talk = Conversation(named.for_inference(), named.tokenizer, template, GenerationConfig(12))
    pieces = list(talk.answer("U"))
    assert len(pieces) > 1
    assert "".join(pieces) == "Rome <|is" == talk.messages[-1]["content"]


def tokens_until(ids, until):
    """One token at a time, as `stream_tokens` yields them."""
    for end in range(1, len(ids) + 1):
        yield [ids[end - 1 : end]]
        if until(ids[:end]):
            return


def test_commands_and_what_looks_like_one(capsys):
    class Talk:
        begun = 0

        def begin(self):
            self.begun += 1

    talk = Talk()
    for line in ("/new", "/reset"):
        chat._obey(talk, line)
    assert talk.begun == 2
    assert capsys.readouterr().err == ""
    chat._obey(talk, "/help")
    listed = capsys.readouterr().err
    assert all(name in listed for name in ("/help", "/reset", "/new", "/exit", "/quit"))
    chat._obey(talk, "/rest")
    assert capsys.readouterr().err == f"/rest is not a command. Did you mean /reset?\n{listed}"
    assert talk.begun == 2
    assert not chat._COMMAND.fullmatch("/etc/hosts has which lines?")


SEQ_LEN = 200


class Scripted(LanguageModel):
    """Says `script[p]` after the token at position p, whatever that is."""

    script: jax.Array
    certainty: jax.Array
    num_tokens: int = eqx.field(static=True)

    Vocab = property(lambda self: vocab_axis(self.num_tokens))
    Pos = property(lambda self: Axis("position", self.script.shape[0]))

    def hidden(self, inputs, *, cache=None, taps=(), key=None):
        following = jax.nn.one_hot(self.script[inputs.positions.array], self.num_tokens) * self.certainty
        return Hidden(hax.named(following, (*inputs.tokens.axes, self.Vocab)), cache)

    def lm_head(self):
        return None

    def init_cache(self, Batch, capacity, dtype):
        return jnp.zeros(())


@pytest.fixture(scope="module")
def nanochat_tokenizer():
    config = BpeConfig(pattern="nanochat", special_tokens=list(NANOCHAT_TOKENS))
    return train_bpe(["What is 12 * 7? It is 84."] * 4, 290, config)


def options(tool=None):
    return argparse.Namespace(tool=tool)


def test_a_tool_answers_in_the_middle_of_a_turn(nanochat_tokenizer):
    """Calls and outputs are shown, and stay parts of the turn: the next prompt has the same tokens."""
    tokenizer = nanochat_tokenizer
    template = ChatTemplate.load("nanochat", tokenizer, "key")
    calls = chat._tool_calls(options(), tokenizer, template)
    ids = lambda text: tokenizer.encode_with_offsets([text])[0][0].tolist()  # noqa: E731
    asked = ids(template.prompt([{"role": "user", "content": "What is 12 * 7?"}], "here"))
    before, output = ids("It is <|python_start|>12 * 7<|python_end|>"), ids("<|output_start|>84<|output_end|>")
    said = [*before, *ids("?" * 4)[:1] * len(output), *ids("84.<|assistant_end|>")]
    script = jnp.zeros(SEQ_LEN, jnp.int32).at[len(asked) - 1 : len(asked) - 1 + len(said)].set(jnp.asarray(said))
    model = Scripted(script, jnp.float32(100.0), tokenizer.vocab_size)
    config = GenerationConfig(64, temperature=0.0, stop_ids=turn_ends(template, tokenizer))
    talk = Conversation(model, tokenizer, template, config, calls=calls)
    assert "".join(talk.answer("What is 12 * 7?")) == "It is <<12 * 7=84>>84."
    assert talk.num_tokens == len(said) - 1
    kinds = {"It is ": "text", "12 * 7": "python", "84": "python_output", "84.": "text"}
    assert talk.messages[1]["content"] == [{"type": kind, "text": text} for text, kind in kinds.items()]
    prompt = ids(template.prompt([*talk.messages, {"role": "user", "content": "And?"}], "here"))
    assert prompt[: len(asked) + len(said)] == [*asked, *before, *output, *ids("84.<|assistant_end|>")]


def test_which_tool_is_used(nanochat_tokenizer, folder):
    plain, tokenizer = open_model(str(folder), {}).tokenizer, nanochat_tokenizer
    assert tool_calls_of(options(), plain) is None, "without tokens for calls, there is no tool"
    assert tool_calls_of(options("none"), tokenizer) is None
    assert tool_calls_of(options("calculator"), tokenizer) == tool_calls_of(options(), tokenizer)
    with pytest.raises(
        ConfigError, match=r"--tool: 'calculator' given, but the model cannot call a tool: .*<\|python_start"
    ):
        tool_calls_of(options("calculator"), plain)
    with pytest.raises(ConfigError, match=r"--tool: 'clock' given\. Allowed: calculator, none, or package"):
        tool_calls_of(options("clock"), tokenizer)
    limits = "{type: calculator, max_exponent: 9, max_characters: 12}"
    calls = tool_calls_of(options(limits), tokenizer)
    assert calls is not None
    assert calls.tool == Calculator(max_characters=12, max_exponent=9)
    with pytest.raises(ConfigError, match=r"^--tool\.max_characters: 5000 given, .*at most 4096 expected"):
        tool_calls_of(options("{type: calculator, max_characters: 5000}"), tokenizer)
    with pytest.raises(
        ConfigError, match=r"^--tool\.digits: no such key in tool \(type calculator\)\. Allowed: max_char"
    ):
        tool_calls_of(options("{type: calculator, digits: 5}"), tokenizer)
    with pytest.raises(
        ConfigError, match=r"--tool: '\{max_exponent: 9\}' given\. Allowed: calculator, none, or package"
    ):
        tool_calls_of(options("{max_exponent: 9}"), tokenizer)
    with pytest.raises(ConfigError, match="there is no dataclass that extends"):
        tool_calls_of(options("jaxlm.commands.chat:Conversation"), tokenizer)
    chatml = ChatTemplate.load("chatml", tokenizer, "key")
    assert chat._tool_calls(options(), tokenizer, chatml) is None, "a template that cannot write calls"
    with pytest.raises(ConfigError, match=r"the chat template \(chatml\) does not write a part of the type python"):
        chat._tool_calls(options("calculator"), tokenizer, chatml)


def test_a_tokenizer_with_nanochats_tokens_chats_in_its_layout(nanochat_tokenizer, capsys):
    template = chat._load_template(None, nanochat_tokenizer)
    assert capsys.readouterr().err.startswith("note: the tokenizer has no chat template; nanochat is used.")
    assert template.prompt([{"role": "user", "content": "U"}], "here").endswith("U<|user_end|><|assistant_start|>")


def test_samples_of_a_run_have_the_outputs_of_a_tool(nanochat_tokenizer):
    tokenizer = nanochat_tokenizer
    ids = lambda text: tokenizer.encode_with_offsets([text])[0][0].tolist()  # noqa: E731
    asked = prompt_ids(tokenizer, "What is 12 * 7?")
    before, output = ids("It is <|python_start|>12 * 7<|python_end|>"), ids("<|output_start|>84<|output_end|>")
    said = [*before, *ids("?" * 4)[:1] * len(output), *ids("84.")]
    script = jnp.zeros(SEQ_LEN, jnp.int32).at[len(asked) - 1 : len(asked) - 1 + len(said)].set(jnp.asarray(said))
    model, kept = Scripted(script, jnp.float32(100.0), tokenizer.vocab_size), []
    context = EvalContext(
        *(one_device(), F32, tokenizer, tokenizer.token_bytes(), (), lambda _: None, SEQ_LEN, score_batch),
        log_sample=lambda prompt, text: kept.append(text),
    )
    options = {"prompts": ["What is 12 * 7?"], "max_new_tokens": len(said), "temperature": 0.0}
    for tool in (Calculator(), None):
        SamplesEvalConfig(**options, tool=tool).open(context).run(model)
    assert kept[0] == "It is <<12 * 7=84>>84."
    assert kept[1].startswith("It is 12 * 7?")
    unable = replace(context, tokenizer=train_bpe(["some text"] * 4, 260))
    with pytest.raises(
        ConfigError, match=r"evals: type samples: tool given, but the model cannot call a tool: .*no token"
    ):
        SamplesEvalConfig(**options, tool=Calculator()).open(unable)
