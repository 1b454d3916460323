"""Conversations in nanochat's layout: ids and masks against an independent transcription that encodes piece by piece."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.best_fit import BestFitConfig
from jaxlm.data.formats.chat import ChatFormat
from jaxlm.data.formats.segments import Segment, Segments
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.templates import NANOCHAT_TOKENS, template_of_tokens
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.data.tokenizer.train_bpe import BpeConfig, train_bpe
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import open_data, small_tokenizer, some_text, write_records


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(content) -> dict:
    return {"role": "assistant", "content": content}


def parts(*pairs: tuple[str, str]) -> dict:
    return assistant([{"type": kind, "text": text} for kind, text in pairs])


SYSTEM = {"role": "system", "content": " Be brief.\n"}
TOOL_TURN = parts(
    ("text", "12 boxes of 7 are "),
    ("python", "12 * 7"),
    ("python_output", "84"),
    ("text", "84. Less 4: "),
    ("python", "84 - 4"),
    ("python_output", "80"),
    ("text", "80 größe."),
)
CONVERSATIONS = {
    "one turn": [user("hello  world\n"), assistant(" value 42")],
    "several turns": [message for n in range(3) for message in (user(some_text(n, 5)), assistant(some_text(9 + n, 7)))],
    "system": [SYSTEM, user("return x"), assistant("def 1999"), user("again"), assistant("🙂")],
    "parts": [user("How many?"), TOOL_TURN],
    "parts after a turn": [user("a"), assistant("b"), user("12 * 7?"), TOOL_TURN, user("thanks"), assistant("")],
    "a call without output": [user("1 / 0?"), parts(("python", "1 / 0"), ("text", " has no value"))],
    "a call at the end": [user("x"), parts(("text", "then "), ("python", "2 + 2"))],
    "only text parts": [user("x"), parts(("text", "self value"))],
    "html and braces": [user("<b>&amp; {{ x }} {% y %}</b>"), assistant("</s> <|im_end|> 'a' \"b\" \\n")],
    "no answer yet": [SYSTEM, user("x"), assistant("y"), user("z")],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = BpeConfig(pattern="nanochat", special_tokens=list(NANOCHAT_TOKENS))
    return train_bpe([some_text(seed) for seed in range(20)], 400, config)


@pytest.fixture(scope="module")
def template(tokenizer) -> ChatTemplate:
    return ChatTemplate.load("nanochat", tokenizer, "key")


def transcribed(tokenizer: Tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """Ids and loss mask of a conversation, each text encoded on its own."""
    special = {token: tokenizer.vocab_size - 9 + number for number, token in enumerate(NANOCHAT_TOKENS)}
    ids, mask = [], []

    def add(tokens: list[int], supervised: bool) -> None:
        ids.extend(tokens)
        mask.extend([supervised] * len(tokens))

    if messages[0]["role"] == "system":
        first = user(messages[0]["content"] + "\n\n" + messages[1]["content"])
        messages = [first, *messages[2:]]
    add([special["<|bos|>"]], False)
    for message in messages:
        if message["role"] == "user":
            add([special["<|user_start|>"]], False)
            add(tokenizer.encode(message["content"]), False)
            add([special["<|user_end|>"]], False)
            continue
        add([special["<|assistant_start|>"]], False)
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            text = tokenizer.encode(part["text"])
            if part["type"] == "text":
                add(text, True)
            elif part["type"] == "python":
                add([special["<|python_start|>"], *text, special["<|python_end|>"]], True)
            else:
                add([special["<|output_start|>"], *text, special["<|output_end|>"]], False)
        add([special["<|assistant_end|>"]], True)
    return ids, mask


def encoded(tokenizer: Tokenizer, messages: list[dict], **keys) -> tuple[list[int], list[bool]]:
    config = ChatFormat(chat_template="nanochat", **keys)
    encoder = config.encoder(tokenizer, bos=True, eos=True, key="data.format")
    rendered = encoder.template.render(messages, "here", mark=config.mask_user_turns)
    segment = Segment(rendered.text, spans=rendered.target_spans)
    (tokens,) = encoder.encode([Segments([[segment]], is_rendered=True)])
    return tokens.ids.tolist(), tokens.target_mask.tolist()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_and_masks_are_those_of_a_transcription(tokenizer, name):
    expected = transcribed(tokenizer, CONVERSATIONS[name])
    assert encoded(tokenizer, CONVERSATIONS[name]) == expected
    everything = encoded(tokenizer, CONVERSATIONS[name], mask_user_turns=False)
    assert everything == (expected[0], [True] * len(expected[0]))


@pytest.mark.slow
def test_transformers_renders_the_same_tokens_and_masks(tokenizer):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend_with_offsets)
    text = ChatTemplate.load("nanochat", tokenizer, "key").text
    # transformers leaves out the last bytes of an answer that ends in a character of several tokens.
    for messages in (messages for name, messages in CONVERSATIONS.items() if name != "system"):
        options = {"chat_template": text, "return_dict": True, "return_assistant_tokens_mask": True}
        found = reference.apply_chat_template(messages, **options)
        ids, mask = transcribed(tokenizer, messages)
        assert found["input_ids"] == ids
        assert [bool(flag) for flag in found["assistant_masks"]] == mask


def call_of(arguments) -> dict:
    return {"type": "function", "function": {"name": "python", "arguments": arguments}}


def test_tool_calls_and_tool_messages_are_the_same_turn(tokenizer, template):
    """The form of OpenAI: a message with the call, one with its output, and one with what follows."""
    apart = [
        user("How many?"),
        {"role": "assistant", "content": "12 boxes of 7 are ", "tool_calls": [call_of("12 * 7")]},
        {"role": "tool", "content": "84"},
        {"role": "assistant", "content": "84. Less 4: ", "tool_calls": [call_of({"expression": "84 - 4"})]},
        {"role": "tool", "content": "80"},
        assistant("80 größe."),
        user("thanks"),
        {"role": "assistant", "tool_calls": [call_of("1 / 0")]},
    ]
    together = [user("How many?"), TOOL_TURN, user("thanks"), parts(("python", "1 / 0"))]
    assert encoded(tokenizer, apart) == transcribed(tokenizer, together)
    # The assistant goes on after an output, and begins a turn after a user.
    whole = template.render(together, "here", mark=False).text
    for end, following in ((3, "84. Less 4: "), (5, "80 größe."), (7, "<|python_start|>1 / 0")):
        prompt = template.prompt(apart[:end], "here")
        assert whole.startswith(prompt + following)


def test_a_prompt_ends_where_the_answer_begins(tokenizer, template):
    messages = CONVERSATIONS["no answer yet"]
    ids, _, _ = tokenizer.encode_with_offsets([template.prompt(messages, "here")])[0]
    begins = tokenizer.vocabulary()["<|assistant_start|>"]
    assert ids.tolist() == [*transcribed(tokenizer, messages)[0], begins]


WRONG = {
    "two users": (
        [user("a"), user("b")],
        "message 2 has the role user after user, but user and assistant must alternate",
    ),
    "assistant first": ([assistant("a"), user("b")], "message 1 has the role assistant after nothing"),
    "two answers": ([user("a"), assistant("b"), assistant("c")], "message 3 has the role assistant after assistant"),
    "system alone": ([SYSTEM], "message 1 is a system message, which a user message must follow"),
    "parts of a system": (
        [{"role": "system", "content": [{"text": "a"}]}, user("a")],
        "message 1 is a system message, and its",
    ),
    "system then assistant": ([SYSTEM, assistant("a")], "message 1 is a system message"),
    "system later": ([user("a"), assistant("b"), SYSTEM], "message 3 has the role system, but system .only first."),
    "user after system counts": ([SYSTEM, user("a"), user("b")], "message 3 has the role user after user"),
    "parts of a user": (
        [user([{"type": "text", "text": "a"}])],
        "message 1 has the role user, and its content must be",
    ),
    "a part of no type": ([user("a"), assistant([{"text": "b"}])], "has a part of the type , but text, python or"),
    "another part": ([user("a"), parts(("user", "b"))], "message 2 has a part of the type user, but text, python or"),
    "a part without text": ([user("a"), assistant([{"type": "text"}])], "message 2 has a part whose text is not text"),
    "an output of nothing": (
        [user("a"), assistant("b"), {"role": "tool", "content": "c"}],
        "message 3 has the role tool",
    ),
    "an output for the user": (
        [user("a"), {"role": "assistant", "tool_calls": [call_of("1")]}, {"role": "tool", "content": "1"}, user("b")],
        "message 3 has the role tool, and the assistant must go on after it",
    ),
    "calls at once": (
        [user("a"), {"role": "assistant", "tool_calls": [call_of("1"), call_of("2")]}],
        "message 2 has several tool_calls",
    ),
    "arguments as JSON": (
        [user("a"), {"role": "assistant", "tool_calls": [call_of('{"expression": "1"}')]}],
        "message 2 has a call whose arguments are not the text of the call",
    ),
    "two arguments": (
        [user("a"), {"role": "assistant", "tool_calls": [call_of({"a": "1", "b": "2"})]}],
        "message 2 has a call whose arguments are not the text of the call",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_conversations_are_refused(template, name):
    messages, said = WRONG[name]
    with pytest.raises(ConfigError, match=rf"here: the chat template \(nanochat\) rejects this conversation.*{said}"):
        template.render(messages, "here", mark=True)


@pytest.fixture
def config(tokenizer, tmp_path) -> TokensConfig:
    tokenizer.save(tmp_path / "tokenizer")
    write(tmp_path, CONVERSATIONS.values())
    places = {"cache_dir": f"{tmp_path}/cache", "tokenizer": f"{tmp_path}/tokenizer"}
    return TokensConfig(train_urls=[f"{tmp_path}/a.jsonl"], format=ChatFormat(chat_template="nanochat"), **places)


def write(folder, conversations) -> None:
    write_records(folder / "a.jsonl", ({"messages": messages} for messages in conversations))


def opened(config: TokensConfig, seq_len: int):
    return open_data(config, seq_len).train[""]


def test_the_row_of_a_wrong_conversation_is_named(config, tmp_path):
    write(tmp_path, [CONVERSATIONS["one turn"], CONVERSATIONS["parts"], WRONG["two users"][0]])
    with pytest.raises(
        ConfigError, match=r"a\.jsonl: line 3: the chat template \(nanochat\) .* message 2 has the role"
    ):
        opened(config, 64)


@pytest.mark.parametrize("packing", [None, BestFitConfig(fill="pad")], ids=["in order", "best fit"])
def test_sequences_hold_conversations_up_to_their_maximum_length(config, tokenizer, packing):
    """What is longer loses its end, ids and mask alike; every other conversation is whole."""
    seq_len = 40
    sequences = opened(dataclasses.replace(config, packing=packing), seq_len)
    columns = sequences.read(np.arange(len(sequences)))
    found = set()
    for row in range(len(sequences)):
        num_inputs = int((columns["segment_ids"][row] > 0).sum())
        ids, last = columns["tokens"][row][:num_inputs].tolist(), int(columns["targets"][row][-1])
        # A full row may have one more token, which is only a target. Padding is 0, a token that no text here has.
        ids += [last] if num_inputs == seq_len and last else []
        supervised = [False, *(columns["loss_mask"][row] > 0).tolist()][: len(ids)]
        begins = [at for at, token in enumerate(ids) if token == tokenizer.bos_id]
        for begin, end in itertools.pairwise([*begins, len(ids)]):
            found.add((tuple(ids[begin:end]), tuple(supervised[begin:end])))
    limit = seq_len + 1
    expected = {tuple(tuple(each[:limit]) for each in transcribed(tokenizer, m)) for m in CONVERSATIONS.values()}
    assert sum(len(ids) == limit for ids, _ in expected) > 1
    # Without a supervised token before the limit, there is nothing to learn.
    assert {piece for piece in expected if any(piece[1][1:])} <= found


def test_a_tokenizer_without_the_special_tokens_is_refused():
    other = small_tokenizer(300)
    with pytest.raises(
        ConfigError, match=r"key: 'nanochat' given, which writes <\|bos\|>, but the tokenizer has no such"
    ):
        ChatTemplate.load("nanochat", other, "key")
    assert ChatTemplate.load("chatml", other, "key").prompt([user("a")], "here").endswith("<|im_start|>assistant\n")
    assert template_of_tokens(other.vocabulary()) == "chatml"
    assert template_of_tokens(NANOCHAT_TOKENS) == "nanochat"
    with pytest.raises(
        ConfigError, match=r"but the tokenizer has no chat template. Give one: chatml, nanochat, a text"
    ):
        ChatTemplate.load(None, other, "key")


def test_a_tokenizer_is_trained_on_the_text_of_parts(tmp_path):
    write(tmp_path, [CONVERSATIONS["parts"], CONVERSATIONS["one turn"]])
    file = TextFile(tmp_path / "a.jsonl", "a.jsonl", "text")
    called = "12 boxes of 7 are 12 * 78484. Less 4: 84 - 48080 größe."
    assert list(ChatFormat().texts(file)) == [f"How many?\n{called}", "hello  world\n\n value 42"]
