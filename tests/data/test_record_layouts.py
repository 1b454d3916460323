"""What records of the known layouts say: it reaches the tokens and the mask, or is refused, or is listed as not read.

References: the data utilities of TRL, and the chat templates and masks of transformers.
"""

import dataclasses
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.base import TRAIN
from jaxlm.data.formats.chat import ChatFormat, ShareGptFormat, for_template
from jaxlm.data.formats.completions import GroupsFormat, PairsFormat, PromptsFormat, SupervisedFormat, UnpairedFormat
from jaxlm.data.formats.documents import LabeledFormat, PretokenizedFormat, TextFormat
from jaxlm.data.several_completions import PairsConfig
from jaxlm.data.sources import record_files
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.data.tokens import TokensConfig
from jaxlm.session import phase
from tests.data.chat_templates import DEEPSEEK, LLAMA, MARKED, MISTRAL, PHI, QWEN, SPECIAL_TOKENS
from tests.data.helpers import find_files, open_data, small_tokenizer, write_records


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from tokenizers import AddedToken

    base = small_tokenizer(400)
    base._backend.add_special_tokens(
        [AddedToken(t, rstrip=t in SPECIAL_TOKENS[-4:], normalized=False) for t in SPECIAL_TOKENS]
    )
    return Tokenizer(base._backend, base.bos_id, base.eos_id)


@pytest.fixture(scope="module")
def reference(tokenizer):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend_with_offsets, **tokenizer.template_names
    )


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **others):
    return {"role": "assistant", "content": content, **others}


SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def encoded(tokenizer, tmp_path):
    """Reads records with a format, from JSON lines or Parquet: (text, text of the targets) of each document."""

    def encode(records, record_format, suffix="jsonl"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.{suffix}"
        if suffix == "jsonl":
            write_records(path, records)
        else:
            pq.write_table(pa.Table.from_pylist(list(records)), path)
        encoder = record_format.encoder(tokenizer, bos=None, eos=True, key="data.format")
        (file,) = find_files([str(path)], "data.train_urls", "text")
        texts = encoder.encode([raw.content for raw in encoder.read(file)])
        return [None if t is None else _texts(tokenizer, t) for t in texts]

    return encode


def _texts(tokenizer, text):
    ids = text.ids.tolist()
    trained = [] if text.target_mask is None else [i for i, m in zip(ids, text.target_mask, strict=True) if m]
    return tuple(tokenizer.decode(chosen, special=True) for chosen in (ids, trained))


# --- every key is read, refused or listed


def described(tokenizer, tmp_path, records, record_format):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    write_records(path, records)
    config = TokensConfig(train_urls=[str(path)], cache_dir=f"{tmp_path}/cache", format=record_format)
    return config.corpus.sources[0].describe_records(TRAIN, tokenizer)


CHAT = {"messages": [user("a"), assistant("b")]}
LISTED = {
    "OpenAI": (
        {**CHAT, "parallel_tool_calls": False, "functions": TOOLS},
        ChatFormat(),
        "parallel_tool_calls, functions",
    ),
    "tools of a template without any": ({**CHAT, "tools": TOOLS}, ChatFormat(chat_template=LLAMA), "tools"),
    "tools": ({**CHAT, "tools": TOOLS, "chat_template_kwargs": {"thinks": True}}, ChatFormat(), None),
    "turns": (
        {"messages": [{**user("a"), "speaker": "bob"}, assistant("b", weight=1, train=True, train_detail=[])]},
        ChatFormat(),
        "messages[].speaker",
    ),
    "ShareGPT": (
        {
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}],
            "images": ["x"],
        },
        ShareGptFormat(),
        "images",
    ),
    "LLaMA-Factory": (
        {"prompt": "a", "response": "b", "history": [["c", "d"]], "system": "e", "tools": "[]", "weight": 0},
        SupervisedFormat(),
        "history, system, tools, weight",
    ),
    "Alpaca": (
        {"instruction": "a", "input": "b", "output": "c"},
        SupervisedFormat(input_field="instruction", output_field="output"),
        "input",
    ),
    "Alpaca with its input": (
        {"instruction": "a", "input": "b", "output": "c"},
        SupervisedFormat(input_field="instruction", output_field="output", context_field="input"),
        None,
    ),
    "KTO": (
        {"prompt": [user("a")], "completion": [assistant("b", weight=0)], "label": True, "tools": TOOLS, "score": 3},
        UnpairedFormat(),
        "score, completion[].weight",
        "read as messages: prompt, completion",
    ),
    "texts": (
        {"prompt": "a", "completion": "b", "label": True, "tools": TOOLS},
        UnpairedFormat(),
        "tools",
        "read as text: prompt, completion",
    ),
    "groups": (
        {"prompt": "a", "responses": ["b"] * 4, "rewards": [1] * 4, "answer": "c"},
        GroupsFormat(),
        "answer",
        "read as text: prompt",
    ),
    "rewards read the rest": (
        {"prompt": [user("a")], "answer": "4", "tools": TOOLS},
        PromptsFormat(),
        None,
        "read as messages: prompt",
    ),
    "rewards, without tools": (
        {"prompt": "a", "answer": "4", "tools": TOOLS},
        PromptsFormat(),
        "tools",
        "read as text: prompt",
    ),
    "text": ({"text": "a", "url": "b", "empty": "", "none": None}, TextFormat(), "url"),
}


@pytest.mark.parametrize("name", LISTED)
def test_keys_that_nobody_reads_are_listed(tokenizer, tmp_path, name):
    record, record_format, unread, *kinds = LISTED[name]
    own = tokenizer.with_chat_template(QWEN, {})
    assert described(own, tmp_path, [record], record_format) == (
        "; ".join(kinds + ([f"not read: {unread}"] if unread else [])) or None
    )


EACH = "{%% for message in messages %%}%s{{ message.content }}{%% endfor %%}"
MENTIONS = (
    "{# tool_calls, tools, generation #}",
    "<tools>{{ 'tools' }} tool_calls",
    "{% raw %}{{ tools }}{% endraw %}",
)
READINGS = ("message.tool_calls", "message['tool_calls']", "message.get('tool_calls')", "'tool_calls' in message")


@pytest.mark.parametrize("mention", [*MENTIONS, "{{ '<tool_calls>' ~ 'tool_calls' }}"])
def test_a_word_in_the_text_of_a_template_reads_nothing(encoded, tokenizer, tmp_path, mention):
    own = tokenizer.with_chat_template(EACH % mention, {})
    assert described(own, tmp_path, [{**CHAT, "tools": TOOLS}], ChatFormat()) == "not read: tools"
    with pytest.raises(ConfigError, match=r"line 1: message 2 has 'tool_calls', which the chat template .* not read"):
        encoded(calls(CALL), ChatFormat(chat_template=EACH % mention))
    with pytest.raises(ConfigError, match=r"tools_field: 'tools' given, but the chat template reads no tools"):
        encoded([CHAT], ChatFormat(chat_template=EACH % mention, tools_field="tools"))


@pytest.mark.parametrize("reading", [*READINGS, "message | attr('tool_calls')"])
def test_what_a_template_asks_for_is_read(encoded, reading):
    declared = "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    template = ChatTemplate(declared + EACH % f"{{% if {reading} %}}calls{{% endif %}}", "given", {})
    assert "tools" in template.reads.variables
    assert {"tool_calls", "content"} <= set(template.reads.keys)
    assert "message" not in template.reads.variables


def test_a_block_in_a_comment_marks_nothing(encoded):
    (chat,) = encoded([CHAT], ChatFormat(chat_template=QWEN))
    assert encoded([CHAT], ChatFormat(chat_template="{# {% generation %} #}" + QWEN)) == [chat]


DROPPING = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role + m.content }}{% endif %}{% endfor %}"
)


def test_messages_that_a_template_leaves_out_are_listed(tokenizer, tmp_path):
    own = tokenizer.with_chat_template(DROPPING, {})
    messages = [
        SYSTEM,
        user("a"),
        {"role": "developer", "content": "b"},
        assistant("c"),
        {"role": "tool", "content": ""},
    ]
    said = "messages of the role system, messages of the role developer"
    assert described(own, tmp_path, [{"messages": messages}], ChatFormat()) == f"not read: {said}"
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    record = {"conversations": turns, "system": "Be brief."}
    assert described(own, tmp_path, [record], ShareGptFormat()) == "not read: messages of the role system"
    bad = {"conversations": [{"from": "nobody", "value": "a"}]}
    assert described(own, tmp_path, [bad, record], ShareGptFormat()) == "not read: messages of the role system"
    record = {"prompt": messages[:2], "completion": [assistant("c")]}
    found = described(own, tmp_path, [record], SupervisedFormat(output_field="completion"))
    assert found == "not read: messages of the role system"


def test_columns_of_images_and_arrays_are_listed_without_being_read(tokenizer, tmp_path, monkeypatch):
    image = {"bytes": b"x" * 9, "path": "a.png"}
    record = {
        **CHAT,
        "images": [image],
        "image": image,
        "audio": [0.5] * 9,
        "raw": b"y",
        "url": "b",
        "history": [["c"]],
    }
    pq.write_table(pa.Table.from_pylist([record] * 3), tmp_path / "a.parquet")
    columns = []
    opened = record_files.open_table
    monkeypatch.setattr(record_files, "open_table", lambda *given: columns.append(given[1]) or opened(*given))
    config = TokensConfig(train_urls=[f"{tmp_path}/a.parquet"], format=ChatFormat(chat_template=QWEN))
    listed = config.corpus.sources[0].describe_records(TRAIN, tokenizer)
    assert set(listed.removeprefix("not read: ").split(", ")) == set(record) - {"messages"}
    assert columns == [[], ["messages", "url", "history"]]


def test_records_are_described_alike_in_every_kind_of_file(tokenizer, tmp_path):
    part = {"type": "text", "text": "c", "image": {"path": "a.png"}}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "d"}]}
    chat = {"messages": [{"role": "user", "content": [part]}, answer], "rating": 1}
    groups = {"prompt": "a", "responses": ["b", "c"], "rewards": [0.0, 1.0]}
    for name, record, config in (("chat", chat, ChatFormat(chat_template=QWEN)), ("groups", groups, GroupsFormat())):
        with_bytes = json.loads(json.dumps(record))
        for one in with_bytes.get("messages", [])[:1]:
            one["content"][0]["image"]["bytes"] = b"x"
        write_records(tmp_path / f"{name}.jsonl", [record])
        pq.write_table(pa.Table.from_pylist([with_bytes]), tmp_path / f"{name}.parquet")
        said = [
            TokensConfig(train_urls=[f"{tmp_path}/{name}.{kind}"], format=config)
            .corpus.sources[0]
            .describe_records(TRAIN, tokenizer)
            for kind in ("jsonl", "parquet")
        ]
        assert said[0] == said[1]


def test_they_are_listed_at_the_start_by_one_process(tokenizer, tmp_path, monkeypatch):
    tokenizer.save(tmp_path / "tokenizer")
    write_records(tmp_path / "a.jsonl", [CHAT, {**CHAT, "images": ["x.png"]}])
    lines: list[str] = []
    places = {"cache_dir": f"{tmp_path}/cache", "tokenizer": f"{tmp_path}/tokenizer"}
    config = TokensConfig(train_urls=[f"{tmp_path}/a.jsonl"], format=ChatFormat(chat_template=QWEN), **places)
    open_data(config, 64, lines.append)
    assert "train: not read: images" in lines
    monkeypatch.setattr("jaxlm.data.config.is_main_process", lambda: False)
    monkeypatch.setattr(NamedSource, "describe_records", lambda *_: pytest.fail("read by every process"))
    open_data(config, 64)


# --- weights


@pytest.mark.parametrize("template", [QWEN, MARKED], ids=["prefixes", "generation"])
@pytest.mark.parametrize("key", ["weight", "train", "training"])
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_an_answer_with_weight_0_is_not_trained(encoded, template, key, value):
    messages = [user("a"), assistant("self 1", **{key: value}), user("b"), assistant("value 2", **{key: 1}), user("c")]
    messages += [assistant("x 3")]
    ((_, trained),) = encoded([{"messages": messages}], ChatFormat(chat_template=template))
    end = "<|im_end|>\n" if template == QWEN else "<|im_end|>"
    assert trained == f"value 2{end}x 3{end}"
    turns = [
        {
            "from": {"user": "human", "assistant": "gpt"}[m["role"]],
            "value": m["content"],
            **{k: m[k] for k in m if k == key},
        }
        for m in messages
    ]
    assert encoded([{"conversations": turns}], ShareGptFormat(chat_template=template))[0][1] == trained


def test_masks_without_weights_are_those_of_transformers(tokenizer, reference, encoded):
    messages = [SYSTEM, user("a"), assistant("self 1"), user("b"), assistant("value 2")]
    options = {"chat_template": MARKED, "return_dict": True, "return_assistant_tokens_mask": True}
    found = reference.apply_chat_template(messages, **options)
    masked = [i for i, m in zip(found["input_ids"], found["assistant_masks"], strict=True) if m]
    ((text, trained),) = encoded([{"messages": messages}], ChatFormat(chat_template=MARKED))
    assert (text, trained) == tuple(tokenizer.decode(ids, special=True) for ids in (found["input_ids"], masked))
    weighted = [m if m["role"] != "assistant" else {**m, "weight": 1} for m in messages]
    assert encoded([{"messages": weighted}], ChatFormat(chat_template=MARKED)) == [(text, trained)]


@pytest.mark.parametrize(
    ("message", "keys", "said"),
    [
        (assistant("b", weight=0.5), {}, r"line 1: message 2: weight: 0\.5 given for the role 'assistant'"),
        (assistant("b", weight="0"), {}, r"line 1: message 2: weight: '0' given"),
        (
            assistant("b", train_detail=[{"train": False}]),
            {},
            r"line 1: message 2: train_detail: \[\{'train': False\}\] given",
        ),
        ({**user("b"), "train": True}, {}, r"line 1: message 2: train: True given for the role 'user'"),
        (assistant("b", weight=1, train=False), {}, r"line 1: message 2: weight: 1 and train: False given"),
        (assistant("b", training=1.0, train=0), {}, r"line 1: message 2: train: 0 and training: 1\.0 given"),
        (
            assistant("b", weight=0),
            {"mask_user_turns": False},
            r"line 1: message 2 is not to be trained, but data\.format\.",
        ),
    ],
)
def test_weights_that_cannot_be_followed_are_refused(encoded, message, keys, said):
    with pytest.raises(ConfigError, match=said):
        encoded([{"messages": [user("a"), message]}], ChatFormat(chat_template=QWEN, **keys))


# --- tools, and the variables of a record


FORMATS = {
    "chat": (ChatFormat, {"messages": [user("hi"), assistant("yes")]}),
    "supervised": (
        lambda **keys: SupervisedFormat(output_field="completion", **keys),
        {"prompt": [user("hi")], "completion": [assistant("yes")]},
    ),
    "pairs": (PairsFormat, {"prompt": [user("hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}),
    "implicit pairs": (
        PairsFormat,
        {"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]},
    ),
    "unpaired": (UnpairedFormat, {"prompt": [user("hi")], "completion": [assistant("yes")], "label": True}),
    "groups": (
        lambda **keys: GroupsFormat(group_size=2, **keys),
        {"prompt": [user("hi")], "responses": ["yes", "no"], "rewards": [1, 0]},
    ),
    "prompts": (PromptsFormat, {"prompt": [user("hi")]}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tools_and_variables_reach_the_template(encoded, reference, name, suffix):
    make, record = FORMATS[name]
    given = {"tools": TOOLS, "chat_template_kwargs": {"thinks": True}} if name == "prompts" else {"tools": TOOLS}
    ((text, _),) = encoded([{**record, **given}], make(chat_template=QWEN), suffix)
    messages = record.get("messages") or record.get("prompt") or record["chosen"][:1]
    wholes = (
        [messages] if name in ("chat", "prompts") else [[user("hi"), assistant(answer)] for answer in ("yes", "no")]
    )
    options = {"chat_template": QWEN, "tools": TOOLS, "tokenize": False, **given.get("chat_template_kwargs", {})}
    rendered = [
        reference.apply_chat_template(whole, add_generation_prompt=name == "prompts", **options)
        for whole in wholes[: 1 if name in ("supervised", "unpaired") else None]
    ]
    assert "# Tools" in text
    assert text == "".join(rendered)


def test_an_evaluation_writes_the_prompt_that_the_data_has(tokenizer, encoded):
    record = {
        "chat": [SYSTEM, user([{"type": "text", "text": "hi"}])],
        "tools": TOOLS,
        "chat_template_kwargs": {"thinks": True},
    }
    saved = tokenizer.with_chat_template(QWEN, {})
    text, ids = phase._chat_prompt(saved, tokenizer, record, "chat", "here")
    assert [text] == [whole for whole, _ in encoded([record], PromptsFormat("chat", QWEN))]
    assert (tokenizer.decode(ids, special=True), "# Tools" in text, text.endswith("<think>\n")) == (text, True, True)
    with pytest.raises(ConfigError, match=r"here: no messages under 'chat': .* got 'hi'"):
        phase._chat_prompt(saved, tokenizer, {"chat": "hi"}, "chat", "here")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": "add"}, r"line 1: expected a list of tools under 'tools' .*, got 'add' and {}"),
        (
            {"chat_template_kwargs": [1]},
            r"line 1: expected .* a mapping under 'chat_template_kwargs' .* got \[\] and \[1\]",
        ),
    ],
)
def test_other_tools_and_variables_are_refused(encoded, given, said):
    with pytest.raises(ConfigError, match=said):
        encoded([{**CHAT, **given}], ChatFormat(chat_template=QWEN))


# --- values inside messages


CALL = {"type": "function", "function": {"name": "add", "arguments": {"city": "Paris"}}}
OTHER = {
    "type": "function",
    "function": {"name": "eval", "arguments": {"expr": "1 + 1", "deep": {"a": [{"b": 1}, {"c": 2}]}}},
}


def calls(*given):
    return [{"messages": [user("hi"), assistant(None, tool_calls=[call])], "tools": [call]} for call in given]


def test_json_and_tables_give_the_same_tokens(encoded, reference):
    rows = [encoded(calls(CALL, OTHER), ChatFormat(chat_template=QWEN), suffix) for suffix in ("jsonl", "parquet")]
    assert rows[0] == rows[1]
    for (text, _), call in zip(rows[0], (CALL, OTHER), strict=True):
        messages = [user("hi"), {"role": "assistant", "tool_calls": [call]}]
        assert text == reference.apply_chat_template(messages, tools=[call], chat_template=QWEN, tokenize=False)
        assert "null" not in text
    parts = [{"messages": [user([{"type": "text", "text": "a"}]), assistant("b")]}, CHAT]
    with_image = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]
    ((text, _), _) = encoded(
        [{"messages": [user(with_image), assistant("b")]}, parts[0]], ChatFormat(chat_template=QWEN)
    )
    assert text == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


def test_nulls_of_json_are_left_out_too_but_those_in_its_texts_stay(encoded):
    null = {"name": "add", "arguments": {"a": None, "b": 1}}
    ((text, _),) = encoded(calls({"function": null}), ChatFormat(chat_template=QWEN))
    assert text.endswith('"arguments": {"b": 1}}\n</tool_call><|im_end|>\n')
    written = {"name": "add", "arguments": json.dumps(null["arguments"])}
    ((text, _),) = encoded(calls({"function": written}), ChatFormat(chat_template=QWEN))
    assert text.endswith('"arguments": {"a": null, "b": 1}}\n</tool_call><|im_end|>\n')


def test_arguments_are_a_mapping_or_their_json_as_a_template_wants_them(encoded):
    """Templates with `tojson` expect a mapping, those that write what they get expect text."""
    given = {"city": "Zürich", "n": 1}
    for arguments in (given, json.dumps(given, ensure_ascii=False)):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        ((qwen, _),) = encoded(calls(call), ChatFormat(chat_template=QWEN))
        assert '"arguments": {"city": "Zürich", "n": 1}}\n' in qwen
        ((deepseek, _),) = encoded(calls(call), ChatFormat(chat_template=DEEPSEEK))
        assert deepseek.endswith('<call>add\n```json\n{"city": "Zürich", "n": 1}\n```')
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].arguments ~ '.' }}{% endfor %}", "x", {})
    for arguments, expected in (
        ("12 * 7", "12 * 7."),
        ("[1]", "[1]."),
        ('{"a":1}', '{"a":1}.'),
        ({"a": "ü"}, '{"a": "ü"}.'),
    ):
        messages = for_template([assistant(None, tool_calls=[{"name": "add", "arguments": arguments}])])
        assert template.render(messages, "here", mark=False).text == expected


@pytest.mark.parametrize("template", ["chatml", LLAMA, PHI], ids=["chatml", "llama", "phi"])
def test_calls_and_parts_that_a_template_does_not_read_are_refused(encoded, template):
    for call in ({"tool_calls": [CALL]}, {"function_call": CALL["function"]}):
        messages = [user("a"), assistant(None, **call)]
        with pytest.raises(
            ConfigError, match=rf"line 1: message 2 has '{next(iter(call))}', which the chat template .* not read"
        ):
            encoded([{"messages": messages}], ChatFormat(chat_template=template))
    image = [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}]
    with pytest.raises(ConfigError, match=r"line 1: message 1 has '(text|image)', which the chat template"):
        encoded([{"messages": [user(image), assistant("b")]}], ChatFormat(chat_template=template))
    texts = [{"type": "text", "text": "value "}, {"type": "text", "text": "42"}]
    whole, parted = (
        encoded([{"messages": [user(content), assistant(content)]}], ChatFormat(chat_template=template))
        for content in ("value 42", texts)
    )
    assert parted == whole


LIST = EACH % "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("template", ["chatml", LLAMA, LIST], ids=["chatml", "llama", "parts"])
@pytest.mark.parametrize("content", [3, True, {"a": 1}, ["x"], [None], [{"type": "text", "text": ["x"]}]], ids=str)
def test_a_content_without_text_is_not_written_as_python_does(encoded, template, content):
    with pytest.raises(ConfigError, match=r"line 1: message 2: content: .* given, a text or a list of parts expected"):
        encoded([{"messages": [user("a"), assistant(content)]}], ChatFormat(chat_template=template))


def test_a_content_without_parts_is_an_empty_text(encoded):
    whole, parted = (
        encoded([{"messages": [user("a"), assistant("b"), user(content)]}], ChatFormat(chat_template="chatml"))
        for content in ("", [])
    )
    assert parted == whole


@pytest.mark.parametrize("given", ['[{"name": "add"}]', {"name": "add"}, ["add"]], ids=str)
def test_calls_are_mappings(encoded, given):
    with pytest.raises(ConfigError, match=r"line 1: message 2: tool_calls: .* given, a list of mappings expected"):
        encoded([{"messages": [user("a"), assistant(None, tool_calls=given)]}], ChatFormat(chat_template=QWEN))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_record_does_not_set_what_rendering_sets(encoded, name):
    with pytest.raises(
        ConfigError, match=r"under 'chat_template_kwargs' without messages, tools, add_generation_prompt"
    ):
        encoded([{**CHAT, "chat_template_kwargs": {name: []}}], ChatFormat(chat_template=QWEN))


def test_documents_are_a_variable_of_a_record(encoded, reference):
    template = "{% for document in documents %}{{ document.title }}{% endfor %}" + QWEN
    record = {**CHAT, "chat_template_kwargs": {"documents": [{"title": "value"}]}}
    ((text, _),) = encoded([record], ChatFormat(chat_template=template))
    options = {"chat_template": template, "tokenize": False, **record["chat_template_kwargs"]}
    assert text == reference.apply_chat_template(CHAT["messages"], **options)


# --- prompts that are given twice


QUESTION, ANSWER, WRONG = "What is 1?", assistant("self"), assistant("value")
EARLIER = [user("x"), assistant("return")]
TWICE = {
    "as the lists begin": (QUESTION, [user(QUESTION)], [user(QUESTION)]),
    "with a trailing space": (QUESTION + " \n", [user(QUESTION)], [user(QUESTION)]),
    "after a system message": (QUESTION, [SYSTEM, user(QUESTION)], [SYSTEM, user(QUESTION)]),
    "after earlier turns": (QUESTION, [*EARLIER, user(QUESTION)], [*EARLIER, user(QUESTION)]),
    "before later turns": ("x", [*EARLIER, user(QUESTION)], [*EARLIER, user(QUESTION)]),
    "as messages, with a system message": ([user(QUESTION)], [SYSTEM, user(QUESTION)], [SYSTEM, user(QUESTION)]),
    "as messages, in part": ([*EARLIER, user(QUESTION)], [user(QUESTION + " ")], [*EARLIER, user(QUESTION)]),
    "as messages, beside none": ([*EARLIER, user(QUESTION)], [], [*EARLIER, user(QUESTION)]),
    "as a text, beside none": (QUESTION, [], [user(QUESTION)]),
    "as a system message": ([SYSTEM], [user(QUESTION)], [SYSTEM, user(QUESTION)]),
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("template", [QWEN, LLAMA, PHI], ids=["qwen", "llama", "phi"])
def test_a_prompt_is_written_once(encoded, reference, name, template):
    prompt, before, expected = TWICE[name]
    record = {"prompt": prompt, "chosen": [*before, ANSWER], "rejected": [*before, WRONG]}
    ((text, trained),) = encoded([record], PairsFormat(chat_template=template))
    wholes, answers = [], []
    for answer in (ANSWER, WRONG):
        options = {"chat_template": template, "tokenize": False}
        wholes.append(reference.apply_chat_template([*expected, answer], **options))
        header = reference.apply_chat_template(expected, add_generation_prompt=True, **options)
        answers.append(wholes[-1].removeprefix(header))
    # Phi-3's tokens swallow the line break after them.
    spelled = (lambda text: text.replace("|>\n", "|>")) if template == PHI else str
    assert (text, trained) == (spelled("".join(wholes)), spelled("".join(answers)))


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("hello", [user("bye")]),
        ([user("hello")], [SYSTEM, user("bye")]),
        ([SYSTEM], [SYSTEM | {"content": "x"}, user("a")]),
    ],
)
def test_two_prompts_that_differ_are_refused(encoded, prompt, before):
    record = {"prompt": prompt, "chosen": [*before, ANSWER], "rejected": [*before, WRONG]}
    with pytest.raises(
        ConfigError, match=r"line 1: two prompts: .* is not in the messages beside it, which begin with"
    ):
        encoded([record], PairsFormat(chat_template=QWEN))


def test_lists_that_repeat_a_prompt_with_other_spaces_share_it(encoded):
    record = {"chosen": [user("hi "), ANSWER], "rejected": [user("hi"), WRONG]}
    ((_, trained),) = encoded([record], PairsFormat(chat_template=QWEN))
    assert trained == "self<|im_end|>\nvalue<|im_end|>\n"


@pytest.mark.parametrize("template", [QWEN, LLAMA, PHI, MARKED], ids=["qwen", "llama", "phi", "marked"])
@pytest.mark.parametrize("answer", ["yes", " no ", "", "im_end"])
def test_a_prompt_goes_on_with_the_answer_at_its_end(encoded, reference, template, answer):
    prompt = [user("a"), assistant(answer)]
    ((text, _),) = encoded([{"prompt": prompt}], PromptsFormat(chat_template=template))
    options = {"chat_template": template, "continue_final_message": True, "tokenize": False}
    expected = reference.apply_chat_template(prompt, **options)
    assert text == (expected if template != PHI else re.sub(r"\|>\s+", "|>", expected))


def test_pairs_may_part_after_an_answer(encoded, reference):
    shared, sides = [user("a"), assistant("b")], [[user("c"), ANSWER], [user("d"), WRONG]]
    record = dict(zip(("chosen", "rejected"), ([*shared, *side] for side in sides), strict=True))
    ((text, trained),) = encoded([record], PairsFormat(chat_template=QWEN))
    options = {"chat_template": QWEN, "tokenize": False}
    prompt = reference.apply_chat_template(shared, continue_final_message=True, **options)
    wholes = [reference.apply_chat_template([*shared, *side], **options) for side in sides]
    assert (text, trained) == ("".join(wholes), "".join(whole.removeprefix(prompt) for whole in wholes))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_thoughts_reach_a_template_under_the_name_that_it_reads(encoded, reference, tokenizer, tmp_path, name, read):
    template = EACH % f"{{% if message.{read} %}}<think>{{{{ message.{read} }}}}</think>{{% endif %}}"
    messages = [user("a"), assistant("b", **{name: "value"})]
    ((text, _),) = encoded([{"messages": messages}], ChatFormat(chat_template=template))
    assert (
        text
        == reference.apply_chat_template(messages, chat_template=template, tokenize=False)
        == "a<think>value</think>b"
    )
    own = tokenizer.with_chat_template(template, {})
    assert described(own, tmp_path, [{"messages": messages}], ChatFormat()) is None
    assert described(own, tmp_path, [{"messages": [user("a"), assistant("b", thought="c")]}], ChatFormat()) is not None


@pytest.mark.parametrize("after", [[], [user("a"), WRONG]])
def test_an_answer_may_repeat_an_earlier_one(encoded, reference, after):
    prompt, completion = [user("x"), ANSWER, user("a")], [ANSWER, *after]
    records = [{"prompt": prompt, "completion": completion, "label": True}]
    ((text, trained),) = encoded(records, UnpairedFormat(chat_template=QWEN))
    options = {"chat_template": QWEN, "tokenize": False}
    header = reference.apply_chat_template(prompt, add_generation_prompt=True, **options)
    assert text == reference.apply_chat_template([*prompt, *completion], **options) == header + trained


@pytest.mark.parametrize("answer", ["self", "  self", "\n\nself", " "])
def test_a_header_that_swallows_white_space_is_not_trained(encoded, tokenizer, answer):
    messages = [user("a"), assistant(answer)]
    ((_, trained),) = encoded([{"messages": messages}], ChatFormat(chat_template=PHI))
    # What is trained at inference follows the header's token, which has swallowed the white space.
    end = tokenizer.decode([tokenizer.eos_id], special=True)
    assert trained == f"{answer.lstrip()}<|end|>{end}"
    record = {"prompt": messages[:1], "response": messages[1:]}
    assert encoded([record], SupervisedFormat(chat_template=PHI))[0][1] == trained


# --- TRL


TRL_RECORDS = {
    "preference": {"prompt": [SYSTEM, user("hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
    "implicit prompt": {"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]},
    "text beside lists": {
        "prompt": "hi ",
        "chosen": [SYSTEM, user("hi"), ANSWER],
        "rejected": [SYSTEM, user("hi"), WRONG],
    },
    "several turns": {
        "prompt": [user("hi")],
        "chosen": [assistant("a"), user("b"), assistant("c")],
        "rejected": [assistant("a"), user("d"), assistant("e")],
    },
    "completion": {"prompt": [user("hi")], "completion": [assistant("yes")]},
    "completion of several turns": {"prompt": [user("hi")], "completion": [assistant("a"), user("b"), assistant("c")]},
    "label": {"prompt": [user("hi")], "completion": [assistant("a"), user("b"), assistant("c")], "label": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL_RECORDS)
@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL], ids=["qwen", "llama", "mistral"])
def test_prompts_and_completions_are_those_of_trl(encoded, reference, name, template):
    data_utils = pytest.importorskip("trl.data_utils")
    record = TRL_RECORDS[name]
    if template == MISTRAL and "beside" not in name:
        record = {key: [m for m in v if m != SYSTEM] if isinstance(v, list) else v for key, v in record.items()}
    elif template == MISTRAL:
        record = {"prompt": "hi ", "chosen": [user("hi"), ANSWER], "rejected": [user("hi"), WRONG]}
    example = data_utils.maybe_extract_prompt(dict(record)) if "chosen" in record else record
    reference.chat_template = template
    found = data_utils.apply_chat_template(example, reference)
    sides = [found[side] for side in ("chosen", "rejected", "completion") if side in found]
    make = PairsFormat if "chosen" in record else UnpairedFormat if "label" in record else SupervisedFormat
    keys = {"output_field": "completion"} if make is SupervisedFormat else {}
    ((text, trained),) = encoded([record], make(chat_template=template, **keys))
    assert text == "".join(found["prompt"] + side for side in sides)
    assert trained == "".join(sides)


# --- other layouts


def test_the_system_column_of_sharegpt_is_the_system_message(encoded):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    usual = ShareGptFormat(chat_template=QWEN)
    ((text, _),) = encoded([{"conversations": turns, "system": "Be brief."}], usual)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na")
    own = [{"from": "system", "value": "Be brief."}, *turns]
    assert encoded([{"conversations": own, "system": " Be brief."}], usual)[0][0] == text
    assert (
        encoded([{"conversations": own}, {"conversations": own, "system": ""}], usual) == [(text, "b<|im_end|>\n")] * 2
    )
    with pytest.raises(ConfigError, match=r"line 1: 'Be long\.' under 'system' is not the system message"):
        encoded([{"conversations": own, "system": "Be long."}], usual)
    without = dataclasses.replace(usual, system_field=None)
    assert encoded([{"conversations": turns, "system": "x"}], without) == encoded([{"conversations": turns}], usual)


def test_the_input_of_alpaca_follows_its_instruction(encoded, tokenizer):
    alpaca = SupervisedFormat(input_field="instruction", output_field="output", context_field="input")
    records = [{"instruction": "value x", "input": given, "output": "self"} for given in ("42", "", None)]
    plain = SupervisedFormat(separate_with="\n")
    expected = [{"prompt": prompt, "response": "self"} for prompt in ("value x\n42", "value x", "value x")]
    changed = dataclasses.replace(alpaca, separate_with="\n")
    for suffix in ("jsonl", "parquet"):
        assert encoded(records, changed, suffix) == encoded(expected, plain, suffix)
    with pytest.raises(ConfigError, match=r"line 1: no text .* under 'input': the record has the keys instruction"):
        encoded([{"instruction": "a", "output": "b"}], alpaca)
    with pytest.raises(ConfigError, match=r"line 1: 'input' \(context_field\): only a text can follow"):
        encoded([{"instruction": [user("a")], "input": "b", "output": "c"}], alpaca)


def test_messages_can_be_mixed_with_texts_across_records(encoded):
    records = [
        {"prompt": "value", "response": " 42"},
        {"prompt": [user("hi")], "response": [assistant("yes")]},
        {"prompt": "value", "response": ""},
        {"prompt": "hi", "response": [assistant("yes")]},
    ]
    whole = encoded(records, SupervisedFormat(chat_template=QWEN, mask_inputs=False))
    masked = encoded(records, SupervisedFormat(chat_template=QWEN))
    assert (
        masked[1]
        == masked[3]
        == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n", "yes<|im_end|>\n")
    )
    assert masked[2] is None
    assert [text for text, _ in filter(None, whole)] == [text for text, _ in filter(None, masked)]
    assert all(text == trained for text, trained in filter(None, whole))


VALUES = (
    *(None, "", "x", 3, 2.5, True, 10**40, [], [None], [[]], {"a": 1}, [1, "a"], [10**40], [-1], [float("nan")]),
    *([{"role": "user"}], [{"role": None}], [{"role": "user", "content": 3}], [{"role": "user", "content": [3]}]),
    *([assistant("b")], [user("a"), assistant("b", tool_calls=3)], [user("a"), assistant("b", tool_calls=[3])]),
    *([{"from": "human", "value": 3}], [{"from": 3, "value": "a"}], "\ud800", [user("\ufdd0")], [user("\ud800")]),
)
SOUND = {
    **{name: (make(chat_template=QWEN), record) for name, (make, record) in FORMATS.items()},
    "sharegpt": (ShareGptFormat(chat_template=QWEN), {"conversations": [{"from": "gpt", "value": "b"}], "system": "a"}),
    "pretokenized": (PretokenizedFormat(), {"input_ids": [1, 2]}),
    "labeled": (LabeledFormat(), {"input_ids": [1, 2], "labels": [1, 2]}),
    "text": (TextFormat(), {"text": "a"}),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_whatever_a_record_holds_a_message_names_file_and_line(encoded, name, suffix):
    record_format, record = SOUND[name]
    unwritable = (pa.ArrowException, UnicodeEncodeError, OverflowError) if suffix == "parquet" else ()
    place = r"\.jsonl: line 2: " if suffix == "jsonl" else r"\.parquet: (row 1: |column )"
    refused = []
    for key in record:
        for value in VALUES:
            other = {**record, key: value, **({"tools": value} if "chat" in name else {})}
            try:
                encoded([record, other] if suffix == "jsonl" else [other], record_format, suffix)
            except ConfigError as error:
                refused.append(f"{key}: {value!r}: {error}")
            except unwritable:  # a table cannot hold it
                continue
    assert len(refused) > 5
    assert [said for said in refused if not re.search(place, said)] == []


def test_old_caches_of_text_keep_their_keys():
    assert SupervisedFormat().cache_key()["format"].keys() == {
        *("type", "input_field", "output_field", "separate_with", "mask_inputs")
    }


ANSWERS = {"chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("name", "record", "of_version_1", "is_valid"),
    [
        ("supervised", {"prompt": "x", "response": "a"}, (), True),
        ("supervised", {"prompt": [user("x")], "response": [assistant("a")]}, (), False),
        ("preference", {"prompt": "x", **ANSWERS}, ("chat_template",), True),
        ("preference", {"prompt": "x", **{k: [assistant(v)] for k, v in ANSWERS.items()}}, ("chat_template",), False),
        ("chat", {"messages": [user("x"), assistant("a")]}, ("chat_template",), False),
    ],
)
def test_caches_of_texts_outlive_templates_and_those_of_messages_do_not(
    tokenizer, tmp_path, monkeypatch, name, record, of_version_1, is_valid
):
    formats = {"supervised": SupervisedFormat(), "preference": PairsFormat(), "chat": ChatFormat()}
    write_records(tmp_path / "a.jsonl", [record] * 4)
    places = {"cache_dir": f"{tmp_path}/cache", "tokenizer": f"{tmp_path}/tokenizer"}
    kind = PairsConfig if name == "preference" else TokensConfig
    config = kind(train_urls=[f"{tmp_path}/a.jsonl"], format=formats[name], **places)
    tokenizer.with_chat_template(QWEN, {}).save(tmp_path / "tokenizer")
    key = ChatTemplate.cache_key
    with monkeypatch.context() as patch:
        patch.setattr(ChatTemplate, "cache_key", lambda self: {name: key(self)[name] for name in of_version_1})
        open_data(config, 256)
    for template in (QWEN, QWEN.replace("im_end", "IM_END")):
        tokenizer.with_chat_template(template, {}).save(tmp_path / "tokenizer")
        if is_valid:
            open_data(config, 256)
        else:
            with pytest.raises(ConfigError, match=r"was built from other inputs:(.|\n)*conversations: was"):
                open_data(config, 256)


def test_pairs_of_messages_in_tables_open_like_those_in_json(tokenizer, tmp_path):
    records = [
        {
            "prompt": [user("hi")],
            "chosen": [assistant(None, tool_calls=[call])],
            "rejected": [assistant("no")],
            "tools": [call],
        }
        for call in (CALL, OTHER)
    ]
    tokenizer.save(tmp_path / "tokenizer")
    write_records(tmp_path / "a.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    columns = []
    for suffix in ("jsonl", "parquet"):
        places = {"cache_dir": f"{tmp_path}/{suffix}", "tokenizer": f"{tmp_path}/tokenizer"}
        config = PairsConfig(train_urls=[f"{tmp_path}/a.{suffix}"], format=PairsFormat(chat_template=QWEN), **places)
        columns.append(open_data(config, 256).train[""].read(np.arange(2)))
    for name, column in columns[0].items():
        np.testing.assert_array_equal(column, columns[1][name], err_msg=name)
