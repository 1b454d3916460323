"""Generated conversations: the same for the same keys, right answers, and problems in validation that are not in training."""

import dataclasses
import itertools
import json
import re

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.sources.source_config import CorpusConfig
from jaxlm.data.sources.tasks.arithmetic import ArithmeticCorpus, ArithmeticGroups, ArithmeticPairs, ArithmeticPrompts
from jaxlm.data.sources.tasks.base import split_of
from jaxlm.data.sources.tasks.pass_keys import PassKeyCorpus
from jaxlm.data.sources.tasks.spelling import SpellingCorpus, _words
from jaxlm.data.tokenizer.templates import NANOCHAT_TOKENS
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.data.helpers import open_data

SMALL = {"num_train": 300, "num_validation": 60}
PAIRS = ArithmeticPairs(num_train=120, num_validation=40)
GROUPS = ArithmeticGroups(num_train=60, num_validation=20)
CORPORA = {"arithmetic": ArithmeticCorpus(**SMALL), "spelling": SpellingCorpus(**SMALL)}


def conversations(corpus: CorpusConfig, split: str = "train") -> list[list[dict]]:
    return [record["messages"] for record in corpus.records(split)]


def calls(messages: list[dict]) -> list[tuple[str, str]]:
    """Each call of a conversation with the part that follows it."""
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    return [
        (part["text"], following["text"])
        for content in contents
        for part, following in itertools.pairwise(content)
        if (part["type"], following["type"]) == ("python", "python_output")
    ]


def test_every_corpus_and_field_has_a_test():
    found = {
        name: [f.name for f in dataclasses.fields(kind)] for name, kind in CorpusConfig.get_known_choices().items()
    }
    shared = ["num_train", "num_validation", "seed"]
    own = {name: fields for name, fields in found.items() if ":" not in name and not name.startswith("acme")}
    assert own == {
        "arithmetic": [*shared, "stories", "follow_ups"],
        "arithmetic_pairs": [*shared, "stories"],
        "arithmetic_groups": [*shared, "stories", "group_size"],
        "arithmetic_prompts": [*shared, "stories"],
        "spelling": [*shared, "words", "counts"],
        "pass_keys": [*shared, "min_characters", "max_characters", "digits"],
    }


@pytest.mark.parametrize("name", CORPORA)
def test_the_same_keys_give_the_same_conversations(name):
    corpus = CORPORA[name]
    assert conversations(corpus) == conversations(dataclasses.replace(corpus))
    assert (len(conversations(corpus)), len(conversations(corpus, "validation"))) == (300, 60)
    assert conversations(dataclasses.replace(corpus, num_train=100)) == conversations(corpus)[:100]
    assert conversations(dataclasses.replace(corpus, seed=1)) != conversations(corpus)
    assert corpus.splits == ("train", "validation")
    assert dataclasses.replace(corpus, num_validation=0).splits == ("train",)
    json.dumps(conversations(corpus))


@pytest.mark.parametrize("name", CORPORA)
def test_the_outputs_in_the_data_are_those_of_the_tool(name):
    pairs = [pair for split in CORPORA[name].splits for m in conversations(CORPORA[name], split) for pair in calls(m)]
    assert len(pairs) > 150
    for call, output in pairs:
        assert output == Calculator().run(call) == str(eval(call)), call


def test_answers_of_stories_are_right():
    """Each story is solved again from the numbers in its question."""
    seen = set()
    for first, answer, *_ in conversations(ArithmeticCorpus(num_train=200, stories=1.0, follow_ups=0.0)):
        a, b, c = map(int, re.findall(r"\d+", first["content"]))
        solve = {"gives away": a * b - c, "change": c - a * b, "times as many": (a + b) * c}
        (kind,) = (kind for kind in solve if kind in first["content"])
        seen.add(kind)
        closing = answer["content"][-1]["text"]
        assert int(re.findall(r"-?\d+", closing)[-1]) == solve[kind] >= 0
    assert len(seen) == 3


def test_the_keys_of_arithmetic():
    plain = conversations(ArithmeticCorpus(num_train=100, stories=0.0, follow_ups=0.0))
    assert {len(messages) for messages in plain} == {2}
    assert all(len(calls(messages)) == 1 for messages in plain)
    followed = conversations(ArithmeticCorpus(num_train=100, stories=0.0, follow_ups=1.0))
    assert {len(messages) for messages in followed} == {4}
    for messages in followed:
        (_, output), (call, _) = calls(messages)
        assert call.split()[0] == output.removesuffix(".0"), "a follow-up is about the result before it"


def test_the_keys_of_spelling(tmp_path):
    names = [first + second for first in ("al", "bo", "ca", "do", "eg") for second in ("pha", "tter", "ring", "sten")]
    text = "\n".join(f"{name} {name.title()} {name}." for name in names) + " ab ab once größe größe abcdefghijklm " * 2
    (tmp_path / "words.txt").write_text(text, encoding="utf-8")
    known = {*names, "größe", "once"}
    assert {word for words in _words(f"{tmp_path}/words.txt").values() for word in words} == known
    spelled = conversations(SpellingCorpus(num_train=50, words=f"{tmp_path}/words.txt", counts=0.0))
    for _, answer in spelled:
        (part,) = answer["content"]
        word, letters = re.fullmatch(r"(\w+) is spelled ([\w-]+)\.", part["text"]).groups()
        assert letters.replace("-", "") == word in known
        assert split_of(word) == "train"
    counted = conversations(SpellingCorpus(num_train=50, words=f"{tmp_path}/words.txt", counts=1.0))
    assert all(len(calls(messages)) == 1 for messages in counted)
    assert len({output for m in counted for _, output in calls(m)}) > 1
    versions = {SpellingCorpus(words=words).version for words in (None, f"{tmp_path}/words.txt")}
    assert len(versions) == 2, "other words are other records"


@pytest.mark.parametrize("name", CORPORA)
def test_problems_of_validation_are_not_in_training(name):
    def problems(split):
        for messages in conversations(CORPORA[name], split):
            yield from [call for call, _ in calls(messages)] or [messages[1]["content"][0]["text"]]

    train, validation = set(problems("train")), set(problems("validation"))
    assert not train & validation


def solved(question: str) -> str:
    """The result of a problem, from the numbers and signs of its question alone."""
    numbers = list(map(int, re.findall(r"\d+", question)))
    if len(numbers) == 2:
        (sign,) = re.findall(r" ([-+*/]) ", question)
        a, b = numbers
        return str({"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign])
    a, b, c = numbers
    solve = {"gives away": a * b - c, "change": c - a * b, "times as many": (a + b) * c}
    (result,) = (solve[kind] for kind in solve if kind in question)
    return str(result)


def result_of(answer: str) -> str:
    return re.findall(r"-?\d+", answer)[-1]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_chosen_answer_is_right_and_the_other_wrong_with_the_same_layout(split):
    kinds = set()
    for record in PAIRS.records(split):
        (asked,) = record["prompt"]
        texts = {side: record[side][0]["content"] for side in ("chosen", "rejected")}
        results = {side: result_of(content[-1]["text"]) for side, content in texts.items()}
        assert results["chosen"] == solved(asked["content"]) != results["rejected"]
        assert [part["type"] for part in texts["chosen"]] == [part["type"] for part in texts["rejected"]]
        for content in texts.values():
            for call, output in calls([{"role": "assistant", "content": content}]):
                assert output == str(eval(call))
        kinds.add(len(texts["chosen"]))
    assert len(kinds) == 2, "single expressions and stories"
    assert {len(r["chosen"][0]["content"]) for r in ArithmeticPairs(num_train=30, stories=0.0).records("train")} == {4}


def test_rewards_of_groups_are_those_of_their_answers():
    records = list(GROUPS.records("train"))
    assert records == list(dataclasses.replace(GROUPS).records("train"))
    for record in records:
        asked = record["prompt"][0]["content"]
        rewards = [float(result_of(response) == solved(asked)) for response in record["responses"]]
        assert rewards == record["rewards"]
        assert 0 < sum(rewards) < len(rewards) == 4
        assert all(response.count(token) >= 1 for response in record["responses"] for token in NANOCHAT_TOKENS[5:])
    larger = ArithmeticGroups(num_train=20, group_size=6, stories=1.0).records("train")
    assert {len(record["responses"]) for record in larger} == {6}


def test_prompts_have_the_result_and_a_difficulty():
    for stories, digits in ((0.0, range(2, 7)), (1.0, range(4, 13))):
        records = list(ArithmeticPrompts(num_train=40, stories=stories, seed=3).records("train"))
        assert all(record["answer"] == solved(record["prompt"][0]["content"]) for record in records)
        assert {record["difficulty"] for record in records} <= set(digits)
        assert len({record["difficulty"] for record in records}) > 3


@pytest.mark.parametrize(
    ("words", "said"),
    [("missing.txt", "source.words: 'missing.txt' cannot be read"), ("few.txt", "has 1 words in lower case")],
)
def test_words_that_cannot_be_used_are_refused(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text("word word 12 12 A A")
    with pytest.raises(ConfigError, match=said):
        list(SpellingCorpus(words=words).records("train"))


def test_a_run_reads_them_as_conversations(tmp_path):
    source = {"num_train": 40, "num_validation": 8}
    tokenizer = {"type": "bpe", "pattern": "nanochat", "special_tokens": list(NANOCHAT_TOKENS)}
    section = {
        "cache_dir": f"{tmp_path}/cache",
        "tokenizer": tokenizer,
        "vocab_size": 320,
        "configs": {
            name: {"source": {"type": name, **source}, "format": {"type": "chat", "chat_template": "nanochat"}}
            for name in CORPORA
        },
    }
    config = decode(DataConfig, ConfigSource(section))
    data = open_data(config, 256)
    assert set(data.train) == {"arithmetic", "spelling"}
    assert [len(examples.cache.offsets) - 1 for examples in data.train.values()] == [40, 40]
    assert [len(each.examples.cache.offsets) - 1 for each in data.validation] == [8, 8]
    assert config.corpus.chat_templates() == ["nanochat", "nanochat"]
    with pytest.raises(ConfigError, match="num_train: 0 given, an integer of 1 or more expected"):
        decode(DataConfig, ConfigSource({"source": {"type": "arithmetic", "num_train": 0}}))


def test_documents_with_pass_keys_end_with_their_own():
    corpus = PassKeyCorpus(num_train=200, num_validation=20, min_characters=200, max_characters=300, digits=3)
    texts = {split: [record["text"] for record in corpus.records(split)] for split in ("train", "validation")}
    asked = re.compile(
        r"(.*)\nThe pass key is (\d{3})\. Remember it\. \2 is the pass key\.\n(.*)"
        r"\nWhat is the pass key\? The pass key is \2\.",
        re.DOTALL,
    )
    matches = [asked.fullmatch(text) for text in texts["train"]]
    sizes = [(len(match[1]), len(match[3])) for match in matches]
    assert all(200 <= before + after <= 300 for before, after in sizes)
    assert min(before for before, _ in sizes) == 0 < max(before for before, _ in sizes)
    assert min(after for _, after in sizes) == 0, "the key may also be right before the question"
    assert len({match[2] for match in matches}) > 100
    assert [record["text"] for record in corpus.records("train")] == texts["train"]
    assert not {text[:100] for text in texts["train"]} & {text[:100] for text in texts["validation"]}
    with pytest.raises(ConfigError, match=r"^min_characters: 500 is the default, more than max_characters: 8"):
        decode(PassKeyCorpus, ConfigSource({"type": "pass_keys", "max_characters": 8}))
    for key, most in {"digits": 1000, "min_characters": 10_000_000, "max_characters": 10_000_000}.items():
        with pytest.raises(ConfigError, match=rf"{key}: 2147483647 given, .* at most {most} expected"):
            decode(DataConfig, ConfigSource({"source": {"type": "pass_keys", key: 2**31 - 1}}))
