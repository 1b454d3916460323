"""Chat tokens and masks against transformers, and the errors for conversations that cannot be rendered."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.chat import ChatFormat, ShareGptFormat
from jaxlm.data.formats.segments import Segment, Segments
from jaxlm.data.tokenizer import chat_template
from jaxlm.data.tokenizer.chat_template import ChatTemplate, turn_end_texts, turn_ends, with_templates
from jaxlm.data.tokenizer.rendering import Job, Limits
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import CHATML, open_data, small_tokenizer, some_text, write_records

PLAIN = """{%- for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>
{% endgeneration %}
    {%- else %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}"""
BEGINS = """{{ bos_token }}{% for m in messages %}{% if loop.index > 6 %}{% break %}{% endif %}
[{{ m.role | upper }}]{% if m.tool is defined %}{{ m.tool | tojson }}{% endif %}
{% if m.role == 'assistant' %} {% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    base = small_tokenizer(300)
    base._backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(base._backend, base.bos_id, base.eos_id)


def conversation(seed: int, turns: int = 3) -> list[dict]:
    messages = [{"role": "system", "content": some_text(seed, 4)}] if seed % 2 else []
    for turn in range(turns):
        messages.append({"role": "user", "content": f" {some_text(100 * seed + turn, 6)} \n"})
        messages.append(
            {"role": "assistant", "content": some_text(100 * seed + turn + 50, 5 + seed), "tool": {"é": turn}}
        )
    return messages


CONVERSATIONS = [conversation(seed, 1 + seed % 4) for seed in range(8)]


def encoded(tokenizer: Tokenizer, template: str, messages, **keys):
    config = ChatFormat(chat_template=template, **keys)
    encoder = config.encoder(tokenizer, bos=True, eos=True, key="data.format")
    assert encoder.template is not None
    rendered = encoder.template.render(messages, "here", mark=config.mask_user_turns)
    segment = Segment(rendered.text, spans=rendered.target_spans)
    return rendered, encoder.encode([Segments([[segment]], is_rendered=True)])[0]


@pytest.mark.parametrize("template", [PLAIN, MARKED, BEGINS], ids=["plain", "marked", "begins"])
def test_tokens_and_masks_are_those_of_transformers(tokenizer, template):
    transformers = pytest.importorskip("transformers")
    names = tokenizer.template_names
    # The text may contain special tokens here, so transformers' copy must not use our setting for plain text.
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend_with_offsets, **names)
    for messages in CONVERSATIONS:
        rendered, tokens = encoded(tokenizer, template, messages)
        options = {"chat_template": template, "return_dict": True}
        text = reference.apply_chat_template(messages, chat_template=template, tokenize=False)
        assert rendered.text == text
        if template == PLAIN:
            found = reference.apply_chat_template(messages, **options)
            assert tokens.ids.tolist() == found["input_ids"]
            continue
        found = reference.apply_chat_template(messages, return_assistant_tokens_mask=True, **options)
        assert tokens.ids.tolist() == found["input_ids"]
        assert tokens.target_mask.astype(int).tolist() == found["assistant_masks"]


def test_without_a_generation_block_each_message_counts_for_the_text_it_adds(tokenizer):
    for messages in CONVERSATIONS:
        (marked, by_block), (plain, by_difference) = (encoded(tokenizer, t, messages) for t in (MARKED, PLAIN))
        assert marked.text == plain.text
        np.testing.assert_array_equal(by_block.target_mask, by_difference.target_mask)
        asked = tokenizer.decode(by_block.ids[by_block.target_mask].tolist(), special=True)
        assert asked == "".join(f"{m['content']}<|im_end|>\n" for m in messages if m["role"] == "assistant")


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", CONVERSATIONS[0], "roles must alternate"),
        ("{{ messages | tojson(1, 2, 3) }}", CONVERSATIONS[0], "TypeError"),
        ("{{ ''.__class__.__mro__ }}", CONVERSATIONS[0], "SecurityError"),
        ("{{ messages[-1].content }}{{ messages | length }}", CONVERSATIONS[0], "text in message 2 cannot be located"),
        (PLAIN, [{"role": "user", "content": "\ufdd0"}], "U\\+FDD0 or U\\+FDD1, which are Unicode noncharacters"),
    ],
)
def test_conversations_that_a_template_cannot_render_are_refused(tokenizer, template, messages, said):
    with pytest.raises(ConfigError, match=said):
        encoded(tokenizer, template, messages)


def test_missing_and_invalid_templates_are_errors(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="but the tokenizer has no chat template"):
        ChatTemplate.load(None, tokenizer, "k")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate.load(f"{tmp_path}/x.jinja", tokenizer, "k")
    with pytest.raises(ConfigError, match=r"\(k\), line 2"):
        ChatTemplate.load("a\n{% if %}", tokenizer, "k")


def test_the_tokenizers_template_is_used_and_saved(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a")
    settings = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": MARKED}]
    pad = {"content": "<|im_end|>"}
    (tmp_path / "a" / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": named, "pad_token": pad})
    )
    loaded = load_tokenizer(str(tmp_path / "a"))
    assert loaded.chat_template == MARKED
    loaded.save(tmp_path / "b")
    again = load_tokenizer(str(tmp_path / "b"))
    assert (again.chat_template, again.template_names) == (MARKED, loaded.template_names)
    assert again.template_names["pad_token"] == "<|im_end|>"
    assert again.fingerprint == loaded.fingerprint == tokenizer.fingerprint
    (tmp_path / "b" / "chat_template.jinja").write_text(PLAIN)
    assert load_tokenizer(str(tmp_path / "b")).chat_template == PLAIN


@pytest.fixture
def config(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    write_records(tmp_path / "a.jsonl", ({"messages": m} for m in CONVERSATIONS))
    return TokensConfig(
        train_urls=[f"{tmp_path}/a.jsonl"],
        cache_dir=f"{tmp_path}/cache",
        tokenizer=f"{tmp_path}/tokenizer",
        format=ChatFormat(chat_template=MARKED),
    )


def sequences_of(config: DataConfig, seq_len: int, log=lambda _: None):
    return open_data(config, seq_len, log).train[""]


def test_masks_reach_the_batch_and_conversations_stay_whole(config, tokenizer):
    said: list[str] = []
    windows = sequences_of(config, 512, said.append)
    columns = windows.read(np.arange(len(windows)))
    asked = []
    for row in range(len(windows)):
        for segment in range(1, columns["segment_ids"][row].max() + 1):
            inside = columns["segment_ids"][row] == segment
            assert columns["positions"][row][inside].tolist() == list(range(inside.sum()))
            asked.append(columns["targets"][row][inside & (columns["loss_mask"][row] > 0)])
    expected = [encoded(tokenizer, MARKED, messages)[1] for messages in CONVERSATIONS]
    assert [ids.tolist() for ids in asked] == [t.ids[1:][t.target_mask[1:]].tolist() for t in expected]
    assert any("sequences of 512 tokens" in line for line in said)
    alone = sequences_of(dataclasses.replace(config, format=ChatFormat(chat_template=MARKED, pack=False)), 512)
    assert len(alone) == len(CONVERSATIONS) > len(windows)


def test_truncation_is_counted_and_logged(config, tokenizer):
    said: list[str] = []
    windows = sequences_of(config, 64, said.append)
    lengths = [len(encoded(tokenizer, MARKED, messages)[1].ids) for messages in CONVERSATIONS]
    lost = sum(max(0, length - 65) for length in lengths)
    assert windows.packed is not None
    assert (windows.packed.num_overlong, windows.packed.num_dropped_tokens) == (sum(n > 65 for n in lengths), lost)
    assert f"documents are longer and were truncated, losing {lost:,} of {sum(lengths):,} tokens" in said[-1]
    first = encoded(tokenizer, MARKED, CONVERSATIONS[0])[1].target_mask
    with pytest.raises(
        ConfigError, match=r"within model\.seq_len \(4\)\. The first, document 1 of a\.jsonl, has"
    ) as found:
        sequences_of(config, 4)
    assert f"has {len(first)} tokens, and the loss begins at token {np.argmax(first) + 1}. Set" in str(found.value)


def test_a_template_without_assistant_tokens_is_an_error(config, tmp_path):
    """transformers and Levanter accept masks of zeros; the run would silently learn nothing."""
    never = MARKED.replace("m.role == 'assistant'", "m.role == 'model'")
    with pytest.raises(ConfigError, match=r"marks no assistant tokens.*generation.* block is empty"):
        sequences_of(dataclasses.replace(config, format=ChatFormat(chat_template=never)), 64)
    others = [[{"role": "gpt", "content": "a"}]]
    write_records(tmp_path / "a.jsonl", ({"messages": m} for m in others))
    with pytest.raises(
        ConfigError, match=r"none of their messages has the role 'assistant'.*record is .*a\.jsonl: line 1"
    ):
        sequences_of(dataclasses.replace(config, format=ChatFormat(chat_template=PLAIN)), 64)


def test_overlong_conversations_can_be_left_out(config, tokenizer):
    said: list[str] = []
    changed = dataclasses.replace(config, format=ChatFormat(chat_template=MARKED, truncation="drop_overlength"))
    windows = sequences_of(changed, 100, said.append)
    texts = [encoded(tokenizer, MARKED, messages)[1] for messages in CONVERSATIONS]
    lengths = [len(text.ids) for text in texts]
    lost = sum(n for n in lengths if n > 101)
    assert 0 < lost < sum(lengths)
    columns = windows.read(np.arange(len(windows)))
    kept = [text for text in texts if len(text.ids) <= 101]
    assert columns["loss_mask"].sum() == sum(text.target_mask[1:].sum() for text in kept)
    assert f"{sum(n > 101 for n in lengths)} documents are longer and were left out, losing {lost:,} of" in said[-1]
    share = sum(text.target_mask[1:].sum() for text in texts) / sum(lengths)
    assert f"loss on {share:.1%} of the documents' tokens" in said[-1]
    # The tokens are the same, so the cache is; what is trained on is not.
    assert windows.cache.fingerprint == sequences_of(config, 100).cache.fingerprint
    assert changed.identity() != config.identity()
    with pytest.raises(ConfigError, match=r"model\.seq_len \(4\) and longer documents are left out"):
        sequences_of(changed, 4)


def test_a_template_gets_the_tools_of_a_conversation(config, tokenizer, tmp_path):
    tools = [{"name": "add", "parameters": {"a": "number"}}]
    template = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + PLAIN
    values = (tools, json.dumps(tools), None, [])
    records = [{"messages": CONVERSATIONS[0], "tools": value} for value in values] + [{"messages": CONVERSATIONS[0]}]
    write_records(tmp_path / "a.jsonl", records)
    with_tools = dataclasses.replace(config, format=ChatFormat(chat_template=template, pack=False, tools_field="tools"))
    rows = sequences_of(with_tools, 512).read(np.arange(5))
    plain = encoded(tokenizer, PLAIN, CONVERSATIONS[0])[0].text
    (listed, *_), (bare, *_) = tokenizer.encode_with_offsets([f"tools: {json.dumps(tools)}\n{plain}", plain])
    for row, value in enumerate((*values, None)):
        expected = listed if value else bare
        assert rows["tokens"][row][: len(expected) - 1].tolist() == expected[:-1].tolist()
        assert rows["loss_mask"][row].sum() == rows["loss_mask"][0].sum() > 0
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend_with_offsets)
    found = reference.apply_chat_template(CONVERSATIONS[0], tools=tools, chat_template=template, tokenize=False)
    rendered = ChatTemplate(template, "here", {}).render(
        CONVERSATIONS[0], "here", mark=False, variables={"tools": tools}
    )
    assert rendered.text == found
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CONVERSATIONS[0], "tools": "add"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1: expected a list of tools under 'tools' .*, got 'add'"):
        sequences_of(dataclasses.replace(with_tools, cache_dir=f"{tmp_path}/other"), 512)
    unread = ChatFormat(chat_template=PLAIN, tools_field="tools")
    with pytest.raises(ConfigError, match=r"format\.tools_field: 'tools' given, but the chat template reads no tools"):
        sequences_of(dataclasses.replace(config, format=unread, cache_dir=f"{tmp_path}/unread"), 512)


def test_conversations_without_answers_are_skipped_and_counted(config, tmp_path):
    said: list[str] = []
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "anybody?"}]}) + "\n")
    windows = sequences_of(config, 64, said.append)
    assert len(windows.cache.offsets) - 1 == len(CONVERSATIONS)
    assert "train: 1 document left out, without a token to compute the loss on" in said


def test_another_template_uses_another_cache(config):
    sequences_of(config, 64)
    changed = dataclasses.replace(config, format=ChatFormat(chat_template=MARKED.replace("user", "User") + " "))
    with pytest.raises(ConfigError, match=r"built from other inputs(.|\n)*chat_template"):
        sequences_of(changed, 64)
    assert dataclasses.replace(config, format=ChatFormat(chat_template=PLAIN)).identity() != config.identity()


def test_tables_give_the_same_tokens(config, tmp_path):
    first = sequences_of(config, 64).cache.fingerprint
    plain = [[{k: v for k, v in m.items() if k != "tool"} for m in messages] for messages in CONVERSATIONS]
    pq.write_table(pa.table({"chat": plain, "other": list(range(8))}), tmp_path / "a.parquet", row_group_size=3)
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.table({"chat": plain}).schema) as writer:
        writer.write_table(pa.table({"chat": plain}))
    (tmp_path / "a.json").write_text(json.dumps([{"chat": m} for m in plain]))
    for kind in ("parquet", "arrow", "json"):
        changed = dataclasses.replace(
            config,
            train_urls=[f"{tmp_path}/a.{kind}"],
            cache_dir=f"{tmp_path}/{kind}",
            format=ChatFormat("chat", chat_template=MARKED),
        )
        assert sequences_of(changed, 64).cache.fingerprint == first


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": "hello"}, "line 1: no messages under 'messages'.*got 'hello'"),
        ({"chat": []}, "line 1: no messages under 'messages'.*Keys of the record: chat"),
        ({"messages": [{"content": "x"}]}, "line 1: no messages"),
        ([1], "line 1: expected a record with keys"),
    ],
)
def test_records_that_are_not_conversations_are_refused(config, tmp_path, record, said):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=said):
        sequences_of(config, 64)


def test_sharegpt_turns_are_messages_with_mapped_roles(config, tmp_path):
    """The same tokens and masks as from messages; other keys of a turn reach the template."""
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "tool"}
    conversations = [[*messages, {"role": "tool", "content": "42"}] for messages in CONVERSATIONS]
    expected = sequences_of(_written(config, tmp_path, "messages", conversations), 64).cache.fingerprint

    def turns(**own):
        return [[{"from": {**names, **own}[m["role"]], "value": m["content"]} for m in each] for each in conversations]

    usual = ShareGptFormat(chat_template=MARKED)
    cases = [
        ("conversations", turns(), usual),
        ("conversations", turns(user="user", assistant="chatgpt", tool="observation"), usual),
        ("talk", turns(assistant="bing"), ShareGptFormat("talk", {"bing": "assistant"}, chat_template=MARKED)),
    ]
    for key, records, how in cases:
        changed = dataclasses.replace(_written(config, tmp_path, key, records), format=how)
        assert sequences_of(changed, 64).cache.fingerprint == expected
    weighted = [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "tool": 7}]]
    with_tool = dataclasses.replace(
        _written(config, tmp_path, "conversations", weighted), format=ShareGptFormat(chat_template=BEGINS)
    )
    assert "[ASSISTANT]7" in "".join(sequences_of(with_tool, 64).show(0, with_tool.corpus.load_tokenizer(print)))


def _written(config: TokensConfig, folder: Path, key: str, conversations: list) -> TokensConfig:
    """The configuration for a new file of these conversations."""
    path = folder / f"written{len(list(folder.glob('written*.jsonl')))}.jsonl"
    write_records(path, ({key: turns} for turns in conversations))
    return dataclasses.replace(config, train_urls=[str(path)], cache_dir=f"{path}.cache")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]},
            r"line 1: turn 2 of 'conversations' is from 'bing', which has no role\. Known: human, .*\{bing: assistant\}",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 1: no conversation under 'conversations'.* messages$"),
        (
            {"conversations": [{"role": "user", "content": "a"}]},
            "line 1: turn 1 .* texts under 'from' and 'value', got",
        ),
        ({"conversations": [{"from": "human", "value": None}]}, "line 1: turn 1 of 'conversations': expected texts"),
        ({"conversations": []}, "line 1: no conversation under 'conversations'"),
    ],
)
def test_records_that_are_not_sharegpt_are_refused(config, tmp_path, record, said):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=said):
        sequences_of(dataclasses.replace(config, format=ShareGptFormat(chat_template=MARKED)), 64)


def test_the_chat_format_names_the_one_of_sharegpt(config, tmp_path):
    turns = [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]]
    changed = _written(config, tmp_path, "messages", turns)
    with pytest.raises(ConfigError, match=r"no messages under 'messages'.*set format\.type to sharegpt"):
        sequences_of(changed, 64)


def test_runs_of_earlier_versions_have_the_same_data():
    before = {"type": "chat", "messages_field": "messages", "chat_template": None, "mask_user_turns": True}
    assert ChatFormat().cache_key() == {"format": before}
    turns = {"type": "sharegpt", "conversations_field": "conversations", "roles": {}}
    assert ShareGptFormat().cache_key() == {"format": turns | {"chat_template": None, "mask_user_turns": True}}


# Template -> what is said of it. Whatever Python raises is one message.
FAILING = {
    "{{ messages|length // 0 }}": "rejects this conversation: ZeroDivisionError: integer division or modulo by zero",
    "{% for i in range(10**9) %}{% endfor %}": "rejects this conversation: OverflowError: Range too big",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "rejects this conversation: RecursionError: ",
    "{{ '{}'.format() }}": "rejects this conversation: IndexError: ",
    "{{ 'é'.encode('ascii') }}": "rejects this conversation: UnicodeEncodeError: ",
    "{{ '%c' % 55296 }}": "rejects this conversation: UnicodeEncodeError: .*surrogates",
    "{{ messages.nothing.at_all }}": "rejects this conversation: UndefinedError: ",
    "{{ ''.__class__.__mro__ }}": "rejects this conversation: SecurityError: ",
    "{{ 'a' * (10**11 * messages|length) }}": r"needs more than 0\.5 GiB of memory",
    "{{ 'a' * 10**11 }}": r"needs more than 0\.5 GiB of memory|MemoryError",  # Jinja folds constants as it compiles
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "(needs|takes) more than",
    "{% for i in range(9999) %}some text{% endfor %}": "needs a text of more than 10,000 characters",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": r"takes more than 0\.15 s of a CPU",
    "{{ 7 ** (10**8 * messages|length) > 0 }}": r"takes more than 0\.15 s of a CPU",
    "{{ lipsum(n=100000) }}": "rejects this conversation: UndefinedError: 'lipsum' is undefined",
    "{{ messages|random }}": ", line 1: No filter named 'random'",
}


@pytest.fixture
def little_time(monkeypatch):
    monkeypatch.setattr(chat_template, "LIMITS", Limits(cpu_s=0.15, memory=1 << 29, characters=10_000))


@pytest.mark.parametrize("template", FAILING)
def test_a_template_that_fails_raises_one_message(template, little_time):
    with pytest.raises(ConfigError, match=rf"^(here: )?the chat template \(x\).*{FAILING[template]}"):
        ChatTemplate(template, "x", {}).render(CONVERSATIONS[0], "here", mark=True)
    ordinary = ChatTemplate("{{ messages|length }}", "x", {})
    assert ordinary.render([{"role": "user", "content": "a"}], "here", mark=False).text == "1", (
        "the next one is rendered"
    )


def test_a_conversation_that_is_nested_too_deeply_is_refused():
    content: list = []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(ConfigError, match=r"here: the chat template .* nested too deeply"):
        ChatTemplate("a", "x", {}).render([{"role": "user", "content": "a", "calls": content}], "here", mark=False)


def test_a_template_that_does_not_compile_is_one_message(tokenizer, little_time):
    deep = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
    for template in (deep, "{{ 7 ** (10**8) > 0 }}", "{% if %}"):
        with pytest.raises(
            ConfigError, match=r"the chat template \(key\)( cannot be compiled: | takes more than |, line 1: )"
        ):
            ChatTemplate.load(template, tokenizer, "key")


@pytest.mark.parametrize("change", ["upper", "trim", "replace('m', 'n')"])
def test_a_template_may_change_what_the_assistant_says(tokenizer, change):
    written = CHATML.replace("{{ m.content }}", f"{{{{ m.content|{change} }}}}")
    template = ChatTemplate.load(written, tokenizer, "key")
    assert turn_end_texts(template, tokenizer) == ("<|end|>",), "this tokenizer has no such token"
    assert with_templates(tokenizer, [written], "key").chat_template == written


def test_a_template_that_leaves_out_the_assistant_has_no_end_of_a_turn(tokenizer):
    template = ChatTemplate("{% for m in messages %}{% if m.role == 'user' %}u{% endif %}{% endfor %}", "x", {})
    assert (turn_ends(template, tokenizer), turn_end_texts(template, tokenizer)) == ((), ())


def test_a_killed_renderer_is_started_again():
    job = Job("{{ messages[0] }}", {"messages": ["a"]}, ((1, False),))
    assert chat_template.RENDERER.render(job) == ["a"]
    os.kill(chat_template.RENDERER._process.pid, signal.SIGKILL)
    assert chat_template.RENDERER.render(job) == ["a"]


_FORK = """
import os
from jaxlm.data.tokenizer.chat_template import RENDERER
from jaxlm.data.tokenizer.rendering import Job
def text(content):
    return RENDERER.render(Job("{{ messages[0] }}", {"messages": [content]}, ((1, False),)))
assert text("a") == ["a"]
child = os.fork()
assert [text(n * (1 if child else -1)) for n in range(10)] == [[str(n * (1 if child else -1))] for n in range(10)]
if child:
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""


@pytest.mark.slow
def test_a_fork_renders_with_a_process_of_its_own():
    """In an interpreter without jax, whose threads may keep locks in a fork."""
    finished = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=300, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "done\ndone\n", "")


@pytest.mark.parametrize("content", ["", "Let me look."])
def test_a_prompt_keeps_the_calls_of_its_last_message(content):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}<{{ m.tool_calls[0].function.name }}>{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    template = ChatTemplate(source, "x", {})
    assert template.prompt(messages, "here") == f"[user]a;[assistant]{content}<find>;[assistant]"
    del messages[1]["tool_calls"]
    assert template.prompt(messages, "here") == f"[user]a;[assistant]{content}".rstrip()
