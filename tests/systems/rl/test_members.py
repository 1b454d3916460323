"""What each reward gives, without its process."""

import dataclasses
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.rl.rewards.base import RewardConfig, reward_names
from tests.http_server import serving
from tests.systems.rl.rows import CONTEXT, rows

FILE = Path(__file__).with_name("functions.py")
GSM8K = r"#### (-?[0-9.,]+)"


def reward(context=CONTEXT, /, **keys):
    config = decode(RewardConfig, ConfigSource(keys))
    config.check()
    return config.open(context)


def scores(given, **keys):
    return reward(**keys).score(given)


def test_exact_match_compares_the_last_match_with_the_reference():
    given = rows("#### 1 no, #### 72", "72", " #### 73", answer="9*8\n#### 72")
    assert scores(given, type="exact_match", pattern=GSM8K, reference_pattern=GSM8K) == [1, 0, 0]
    answers = [["Paris", "paris, France"], 72, None, "Paris"]
    given = rows(" Paris\n", "72", "anything", "paris", city=answers)
    assert scores(given, type="exact_match", column="city") == [1, 1, None, 0]
    assert scores(given, type="exact_match", column="city", ignore_case=True) == [1, 1, None, 1]
    with pytest.raises(
        ConfigError, match=r"reference_pattern: .* does not match the reference 'Paris' in the column 'city'"
    ):
        scores(rows("x", city="Paris"), type="exact_match", column="city", reference_pattern=GSM8K)


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("so 9 * 8 = 72\n#### 72", "... #### 72", 1),
        ("#### 1,072", "#### 1072", 1),
        ("#### $72.00", "#### 72", 1),
        ("#### 50%", "50", 1),
        ("#### -3.", "#### -3", 1),
        ("#### .5 litres", "0.50", 1),
        ("72", "#### 72", 0),
        ("#### 72\n#### 73", "#### 72", 0),
        ("#### 72 or so #### many", "#### 72", 0),
        ("####", "#### 72", 0),
    ],
)
def test_math_reads_the_number_of_gsm8k(completion, reference, expected):
    assert scores(rows(completion, answer=reference), type="math", notation="gsm8k") == [expected]


def test_math_refuses_a_reference_without_a_number_and_passes_over_null():
    assert scores(rows("#### 1", answer=None), type="math", notation="gsm8k") == [None]
    with pytest.raises(ConfigError, match="expects a number after #### in the reference, but it is 'many'"):
        scores(rows("#### 1", answer="many"), type="math", notation="gsm8k")


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("Thus $x = \\boxed{\\frac{1}{2}}$.", "0.5", 1),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        ("the answer is \\boxed{72}", "9 * 8 = <<9*8=72>>72\n#### 72", 1),
        ("\\boxed{71}", "$72$", 0),
        ("I do not know", "72", 0),
        ("\\boxed{(1, 2]}", "(1,2]", 1),
        ("\\boxed{2}", "", None),
    ],
)
def test_math_compares_expressions(completion, reference, expected):
    pytest.importorskip("math_verify")
    assert scores(rows(completion, answer=reference), type="math") == [expected]


def test_math_says_how_to_install_its_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"math-verify, which is not installed.*pip install 'math-verify.*notation: gsm8k"
    ):
        reward(type="math")


def test_format_matches_the_whole_completion():
    given = rows("<think>a\nb</think>5", "x<think></think>", "<think></think>")
    assert scores(given, type="format", pattern="<think>.*</think>.*") == [1, 0, 1]


def test_length_is_the_soft_overlong_punishment_of_dapo():
    given = rows(*"abcdef", lengths=[10, 16, 17, 18, 20, 24])
    assert scores(given, type="length", cache_tokens=4) == [0, 0, -0.25, -0.5, -1, -1]
    assert scores(given, type="length") == [-0.5, -0.8, -0.85, -0.9, -1, -1]
    assert scores(given, type="length", max_tokens=40, cache_tokens=24) == pytest.approx(
        [0, 0, -1 / 24, -1 / 12, -1 / 6, -1 / 3]
    )


def test_functions_are_called_by_name():
    given = rows("a", "bcd", answer=["a", None])
    call = lambda name, **keys: scores(given, type="function", function=f"{FILE}:{name}", **keys)  # noqa: E731
    assert call("lengths") == [1, 3]
    assert call("of_row", per="row") == [2, None]
    assert call("waiting", per="row") == [1 + len("data.jsonl:1")] * 2
    assert call("waiting_for_all") == [1, 1]
    assert reward(type="function", function=f"{FILE}:of_row", per="row").columns == ("answer",)


@pytest.fixture
def server():
    with serving() as server:
        yield server


def test_a_reward_model_on_a_server(server):
    given = rows("a", "bb", "ccc", topic="t")
    keys = {"type": "model", "server": {"url": server.url}, "text": "{topic}: {prompt}{completion}", "batch_size": 2}
    assert reward(**keys).columns == ("topic",)

    def vllm(body):
        found = [
            {"index": n, "probs": [len(text) / 4], "num_classes": 1} for n, text in enumerate(body.get("input", []))
        ]
        return {"data": found[::-1]}

    server.answers["/classify"] = vllm
    assert scores(given, **keys) == [11 / 4, 12 / 4, 13 / 4]
    asked = [body for path, body in server.requests if path == "/classify"]
    assert [body["input"] for body in asked] == [["t: prompt a", "t: prompt bb"], ["t: prompt ccc"]]
    assert all(body["use_activation"] is False for body in asked)
    with pytest.raises(ConfigError, match="not that of protocol: sglang"):
        scores(given, **keys, protocol="sglang")
    server.answers["/classify"] = lambda body: [{"embedding": [len(text)]} for text in body["text"]]
    assert scores(given, **keys, protocol="sglang") == [11, 12, 13]
    server.answers["/classify"] = lambda body: {"data": [{"index": 0, "probs": [0.5, 0.5]}]}
    with pytest.raises(ConfigError, match=r"returned 1 outputs with \[2\] values for 2 texts"):
        scores(given, **keys)
    server.faults = [503]
    with pytest.raises(ConfigError, match=r"127.0.0.1:\d+/v1/models gave no answer: status 503 .* 1 attempts"):
        reward(**keys | {"server": {"url": server.url, "num_retries": 0}})
    server.faults = [503]
    with pytest.raises(ConfigError, match=r"status 503 .* 1 attempts"):
        reward(dataclasses.replace(CONTEXT, dry=True), **keys)


@pytest.mark.slow
def test_a_sequence_classifier_gives_what_transformers_gives(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import tokenizers

    vocabulary = {"[UNK]": 0, "prompt": 1, "a": 2, "b": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    # Large weights give rewards of about 4. Smaller rewards are differences that rounding changes by more than 1e-6.
    config = transformers.LlamaConfig(vocab_size=4, num_labels=1, pad_token_id=0, initializer_range=1.0, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    given = rows("a b", "b b a a")
    with torch.inference_mode():
        expected = [float(model(torch.tensor([ids])).logits) for ids in ([1, 2, 3], [1, 3, 3, 2, 2])]
    assert scores(given, type="model", path=str(tmp_path)) == pytest.approx(expected, rel=1e-6)
    config.num_labels = 2
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 2 labels, a reward model with one label"):
        reward(type="model", path=str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "exact_match", "pattern": "("}, "exact_match: pattern: .* not a valid regular expression"),
        ({"type": "format", "pattern": "["}, "format: pattern: .* not a valid regular expression"),
        ({"type": "format", "pattern": "a", "weight": ".inf"}, "weight"),
        ({"type": "length", "max_tokens": 3, "cache_tokens": 4}, "max_tokens: 3 given, but cache_tokens is 4"),
        ({"type": "length", "cache_tokens": 21}, "cache_tokens: 21 given, at most 20 expected"),
        ({"type": "function", "function": "score"}, "`package.module:name` or"),
        ({"type": "function", "function": "no/file.py:score"}, "there is no file no/file.py"),
        ({"type": "function", "function": "no_such_module:score"}, "importing no_such_module failed"),
        ({"type": "function", "function": f"{FILE}:none"}, "names nothing, a function expected"),
        ({"type": "function", "function": f"{FILE}:NUMBER"}, "names a int, a function expected"),
        ({"type": "function", "function": "builtins:abs"}, "the parameter 'x' is positional-only"),
        ({"type": "model"}, "none of path, server given, exactly one expected"),
        ({"type": "model", "path": "x", "server": {"url": "http://x"}}, "path: x given together with server"),
        ({"type": "model", "server": {"url": "localhost:80"}}, "server.url: 'localhost:80' given, an address"),
        ({"type": "model", "server": {"url": "http://x", "api_key_variable": "NO_SUCH"}}, "'NO_SUCH' given, but"),
        ({"type": "model", "server": {"url": "http://x"}, "text": "{prompt}"}, "does not contain {completion}"),
        ({"type": "model", "server": {"url": "http://x"}, "text": "{completion}}"}, "is not a template"),
        (
            {"type": "model", "server": {"url": "http://x"}, "text": "{completion}{0}"},
            "'{0}' given, the name of a column",
        ),
    ],
)
def test_mistakes_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        reward(**keys)


def test_every_reward_has_a_test():
    text = Path(__file__).read_text()
    kinds = RewardConfig.get_known_choices()
    assert set(kinds) == {"exact_match", "format", "function", "length", "math", "model"}
    for kind in kinds.values():
        for field in dataclasses.fields(kind):
            assert field.name in text, f"{kind.__name__}.{field.name}"


def test_names():
    named = lambda *configs: reward_names([decode(RewardConfig, ConfigSource(one)) for one in configs])  # noqa: E731
    one = {"type": "function", "function": "a:right"}
    assert named({"type": "length"}, one, {"type": "length", "name": "short"}) == ["length", "right", "short"]
    with pytest.raises(ConfigError, match="2 rewards have the name 'right'"):
        named(one, one)
    with pytest.raises(ConfigError, match="'reward' given, which is that of the weighted sum"):
        named({"type": "length", "name": "reward"})
