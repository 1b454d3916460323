"""The sampler `server`, with a stand-in that answers as vLLM and SGLang do, or fails."""

import dataclasses
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.models.inference.sampling import Sampling
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.rl.json_server import JsonServer, ServerConfig
from jaxlm.systems.rl.samplers import SamplerConfig, SamplingRequest
from jaxlm.systems.rl.server import _SAMPLE_TEXT, ServerSampler, seed_of
from tests.http_server import serving

EOS = 2
REQUEST = SamplingRequest(step=3, seed=7, rows=(0, 1, 2, 3), max_new_tokens=5, sampling=Sampling(), stop_ids=(EOS,))
ONE_ROW = dataclasses.replace(REQUEST, rows=(0,))
PROMPTS = [[5, 6], [5, 6], [7], [7]]


def completion(body, **changes):
    """What vLLM answers: the length and the tokens follow from the seed."""
    rng = np.random.default_rng(body["seed"])
    size = int(rng.integers(1, body["max_tokens"] + 1))
    is_finished = bool(rng.integers(2))
    tokens = rng.integers(3, 100, size).tolist()
    if is_finished:
        tokens[-1] = body["stop_token_ids"][0]
    else:
        tokens = rng.integers(3, 100, body["max_tokens"]).tolist()
    logps = (-rng.exponential(size=len(tokens))).tolist()
    choice = {
        "index": 0,
        "text": "is not read",
        "logprobs": {"token_logprobs": logps, "tokens": [], "top_logprobs": [], "text_offset": []},
        "finish_reason": "stop" if is_finished else "length",
        "token_ids": tokens,
        "prompt_token_ids": body["prompt"],
    }
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice | changes]}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        server.answers["/v1/completions"] = completion
        server.answers["/collective_rpc"] = lambda body: {"results": [None]}
        server.answers["/reset_prefix_cache"] = lambda body: None
        yield server


class Exported:
    """An export that leaves a file."""

    def __init__(self):
        self.folders: list[Path] = []

    def __call__(self, model, folder):
        assert not folder.exists()
        folder.mkdir()
        (folder / "model.safetensors").write_text(str(model))
        self.folders.append(folder)


@pytest.fixture
def sampler(server, tmp_path):
    """Opens a sampler with these keys, whose retries do not wait."""
    opened: list[ServerSampler] = []

    def make(export=None, **keys):
        place = {"url": server.url} | keys.pop("server", {})
        tree = {"type": "server", "server": place, "weights_folder": str(tmp_path / "weights"), **keys}
        config: Any = decode(SamplerConfig, ConfigSource(tree))
        config.check()
        context: Any = SimpleNamespace(export=export or Exported(), progress=lambda: None, vocab_size=100)
        opened.append(ServerSampler(config, context, JsonServer(config.server, first_pause_s=0.001)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def bodies(server):
    return [body for path, body in server.requests if path == "/v1/completions"]


def test_samples_are_the_tokens_that_the_server_returns(server, sampler):
    found = sampler(model="policy").sample("weights", PROMPTS, REQUEST)
    sent = {body["seed"]: body for body in bodies(server)}
    seeds = [seed_of(REQUEST, row) for row in REQUEST.rows]
    assert (len(set(seeds)), set(sent)) == (4, set(seeds))
    for sample, seed, prompt in zip(found, seeds, PROMPTS, strict=True):
        (choice,) = completion(sent[seed])["choices"]
        assert sent[seed]["prompt"] == prompt
        assert list(sample.tokens) == choice["token_ids"]
        assert list(sample.logps) == choice["logprobs"]["token_logprobs"]
        assert sample.mask == (1,) * len(sample.tokens)
        assert sample.is_finished == (choice["finish_reason"] == "stop")
    expected = {
        "model": "policy",
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "stop_token_ids": [EOS],
        "logprobs": 1,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    assert {name: value for name, value in bodies(server)[0].items() if name not in ("prompt", "seed")} == expected


def test_a_row_does_not_depend_on_the_other_rows(sampler):
    whole = sampler().sample("weights", PROMPTS, REQUEST)
    part = dataclasses.replace(REQUEST, rows=(3, 1))
    few = sampler(max_concurrent=1).sample("weights", [PROMPTS[3], PROMPTS[1]], part)
    assert few == [whole[3], whole[1]]
    for change in ({"step": 4}, {"seed": 8}, {"turn": 1}):
        assert seed_of(dataclasses.replace(REQUEST, **change), 0) != seed_of(REQUEST, 0)


def test_weights_are_exported_before_the_first_request_and_then_at_intervals(server, sampler, tmp_path):
    exported = Exported()
    (tmp_path / "weights" / "weights-3").mkdir(parents=True)  # a process was killed while it exported
    policy = sampler(export=exported, updates_per_export=2)
    for step in (3, 4, 5, 1):
        policy.sample(f"weights of {step}", PROMPTS[:1], dataclasses.replace(REQUEST, step=step, rows=(0,)))
    folders = [tmp_path / "weights" / f"weights-{step}" for step in (3, 5, 1)]  # the run went back to step 1
    assert exported.folders == folders
    reload, reset = "/collective_rpc", "/reset_prefix_cache"
    paths = [path for path, _ in server.requests]
    ask = "/v1/completions"
    assert paths == [reload, reset, ask, ask, reload, reset, ask, reload, reset, ask]
    assert server.requests[0][1] == {"method": "reload_weights", "kwargs": {"weights_path": str(folders[0])}}
    assert list((tmp_path / "weights").iterdir()) == [folders[-1]]
    assert (folders[-1] / "model.safetensors").read_text() == "weights of 1"


def test_sglang_loads_weights_in_its_own_way(server, sampler, tmp_path):
    loaded = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    server.answers["/update_weights_from_disk"] = lambda body: loaded
    policy = sampler(protocol="sglang", logprobs="processed")
    policy.sample("weights", PROMPTS, dataclasses.replace(REQUEST, sampling=Sampling(0.7)))
    folder = str(tmp_path / "weights" / "weights-3")
    assert server.requests[0] == ("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
    assert bodies(server)[0]["temperature"] == 0.7
    loaded |= {"success": False, "message": "shapes differ"}
    with pytest.raises(ConfigError, match=r"data\.sampler: the server did not load .*weights-4: shapes differ"):
        policy.sample("weights", PROMPTS, dataclasses.replace(REQUEST, step=4))


@pytest.mark.parametrize("fault", [503, 429, 500, "close", "cut", "text"])
def test_a_server_that_is_not_ready_is_asked_again(server, sampler, fault):
    expected = sampler().sample("weights", PROMPTS, REQUEST)
    server.faults = [fault] * 3
    assert sampler(server={"num_retries": 3}, max_concurrent=1).sample("weights", PROMPTS, REQUEST) == expected


def test_a_server_that_stays_away_is_one_message(server, sampler):
    server.faults = [503] * 100
    with pytest.raises(ConfigError, match=r"collective_rpc gave no answer: status 503 .* 3 attempts in") as caught:
        sampler(server={"num_retries": 2}).sample("weights", PROMPTS, REQUEST)
    assert str(caught.value).startswith("data.sampler: the server at http://127.0.0.1:")
    server.server_close()
    with pytest.raises(ConfigError, match=r"gave no answer: .*refused"):
        JsonServer(ServerConfig("http://127.0.0.1:9", num_retries=1), first_pause_s=0.001).post("/x", {})


def test_a_failure_is_told_at_once_although_other_requests_wait(server, sampler):
    """No thread that waits keeps the process from ending."""
    policy = sampler(server={"num_retries": 0})
    policy.sample("weights", PROMPTS[:1], ONE_ROW)
    go_on = threading.Event()
    server.faults = [go_on, 400, go_on, go_on]
    with pytest.raises(ConfigError, match=r"completions refuses the request: 400"):
        policy.sample("weights", PROMPTS, REQUEST)
    waiting = [thread for thread in threading.enumerate() if thread.name == "sampler"]
    assert waiting
    assert all(thread.daemon for thread in waiting)
    go_on.set()


def test_a_request_that_times_out_is_not_repeated(server):
    go_on = threading.Event()
    server.faults = [go_on]
    with pytest.raises(ConfigError, match=r"127.0.0.1:\d+/x gave no answer: timed out after timeout_s: 0\.2\. .*raise"):
        JsonServer(ServerConfig(server.url, timeout_s=0.2)).post("/x", {})
    go_on.set()
    until = time.monotonic() + 60  # a busy server may read the request after its sender has given up
    while not server.requests and time.monotonic() < until:
        time.sleep(0.01)
    assert len(server.requests) == 1


def test_an_address_that_has_no_encoding_is_one_message():
    with pytest.raises(ConfigError, match=r"the server at http://a\.\.b/x cannot be asked: .*Correct url"):
        JsonServer(ServerConfig("http://a..b")).post("/x", {})


def test_a_start_asks_the_server_once(server, sampler, tmp_path, monkeypatch):
    config = sampler()._config
    server.answers["/v1/models"] = lambda body: {"object": "list", "data": []}
    server.faults = [503]
    with pytest.raises(
        ConfigError, match=r"data\.sampler\.server: the server at .*/v1/models gave no answer: status 503"
    ):
        config.check_opens(Sampling(), dry=True)
    config.check_opens(Sampling(), dry=True)
    assert not (tmp_path / "weights").exists()
    config.check_opens(Sampling(), dry=False)
    assert (tmp_path / "weights").is_dir()
    del server.answers["/v1/models"]
    config.check_opens(Sampling(), dry=True)  # it answers, although it does not know the request
    server.faults = [401]
    with pytest.raises(ConfigError, match=r"data\.sampler\.server: .*refuses the request: 401"):
        config.check_opens(Sampling(), dry=True)


@pytest.mark.slow
def test_a_start_refuses_a_server_with_other_tokens(server, sampler):
    config, tokens = sampler(model="policy")._config, [7, 8, 9]
    text_of = {7: "a", 8: "b", 9: "c", 10: "bc"}
    tokenizer: Any = SimpleNamespace(
        encode=lambda text: tokens,
        decode=lambda ids: "".join(text_of.get(one, "?") for one in ids),
        vocab_size=100,
        stop_ids=(EOS,),
    )
    for given in (None, {"tokens": tokens, "count": 3}, {"tokens": [7, 10]}, {"count": 3}, "text"):
        if given is not None:
            server.answers["/tokenize"] = lambda body, given=given: given
        for dry in (True, False):
            config.check_tokens(tokenizer, dry=dry)
    path, body = server.requests[-1]
    assert (path, body["prompt"], body["max_tokens"], body["model"]) == ("/v1/completions", [7, 8, 9, 99], 1, "policy")
    for given, shown in (
        ([1, 7, 8], "1, 7, 8"),
        ([7, 8, 9, 100], "7, 8, 9, 100"),
        ([], ""),
        ([7] * 9, "7, " * 8 + "..."),
    ):
        server.answers["/tokenize"] = lambda body, given=given: {"tokens": given}
        other = f"has another vocabulary: it encodes 'The 17 naïve '... as [{shown}], and data.tokenizer as [7, 8, 9]. Serve"
        with pytest.raises(ConfigError, match=re.escape(other)):
            config.check_tokens(tokenizer, dry=True)
    assert server.requests[-1][1] == {"model": "policy", "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
    del server.answers["/tokenize"]
    server.faults = [404, 400]
    begins = (
        r"data\.sampler: the server does not continue a prompt that ends with the last token of data\.tokenizer, 99"
    )
    with pytest.raises(
        ConfigError, match=f"{begins}: .*refuses the request: 400 .*as told.*Serve the model that trains"
    ):
        config.check_tokens(tokenizer, dry=False)
    server.answers["/v1/completions"] = lambda body: completion(body, prompt_token_ids=[1, *body["prompt"]])
    with pytest.raises(
        ConfigError, match=r"answer cannot be used: it has read the prompt \[1, 7, 8, 9, 99\]"
    ) as caught:
        config.check_tokens(tokenizer, dry=False)
    assert str(caught.value).count("Serve the model") == 1
    server.faults = [404, 503]
    with pytest.raises(ConfigError, match=r"data\.sampler\.server: .*gave no answer: status 503") as caught:
        config.check_tokens(tokenizer, dry=True)
    assert "Serve the model" not in str(caught.value)


def test_a_server_is_reachable_that_does_not_know_the_question(server):
    reached = JsonServer(ServerConfig(server.url, num_retries=0)).check_reachable
    server.answers["/v1/models"] = lambda body: {}
    for fault in ("text", "cut", 400, 404, 405, 500, 501):
        server.faults = [fault]
        reached()
    with serving(answers_get=False) as own:
        JsonServer(ServerConfig(own.url, num_retries=0)).check_reachable()
    for fault in (408, 425, 429, 502, 503, 504, "close"):
        server.faults = [fault]
        with pytest.raises(ConfigError, match="gave no answer"):
            reached()
    for fault in (401, 403):
        server.faults = [fault]
        with pytest.raises(ConfigError, match=f"refuses the request: {fault}"):
            reached()


def test_a_server_is_waited_for_until_it_is_ready_only_if_asked(server):
    client = JsonServer(ServerConfig(server.url, num_retries=2), first_pause_s=0.01)
    server.faults = [503, "close"]
    client.check_reachable()
    assert len(server.requests) == 3
    server.faults = [503]
    with pytest.raises(ConfigError, match=r"status 503 .* 1 attempts"):
        client.check_reachable(wait=False)


def test_a_slow_server_is_not_waited_for_longer_than_the_timeout(server, sampler):
    policy = sampler(server={"num_retries": 0, "timeout_s": 0.2})
    policy.sample("weights", PROMPTS[:1], ONE_ROW)
    go_on = threading.Event()
    server.faults = [go_on]
    with pytest.raises(ConfigError, match=r"completions gave no answer: .*timed out"):
        policy.sample("weights", PROMPTS[:1], ONE_ROW)
    go_on.set()


def test_a_request_that_the_server_refuses_is_not_repeated(server, sampler):
    del server.answers["/collective_rpc"]
    with pytest.raises(ConfigError, match=r"refuses the request: 404 .*Start vLLM with VLLM_SERVER_DEV_MODE=1"):
        sampler().sample("weights", PROMPTS, REQUEST)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "None tokens with"),
        (
            {"token_ids": [4, 5, EOS], "logprobs": {"token_logprobs": [-1.0, -2.0]}},
            "3 tokens with 2 log-probabilities given, 1 to 5 of both expected",
        ),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "0 tokens with 0 log-probabilities"),
        ({"token_ids": ["a"], "logprobs": {"token_logprobs": [-1.0]}}, "other values than tokens"),
        (
            {"token_ids": [100], "logprobs": {"token_logprobs": [-1.0]}},
            "the token 100 given, but data.tokenizer has 100 t",
        ),
        ({"token_ids": [4], "logprobs": {"token_logprobs": [None]}}, "null or not finite"),
        ({"token_ids": [4], "logprobs": {"token_logprobs": [float("-inf")]}}, "null or not finite"),
        ({"token_ids": [4], "logprobs": {"token_logprobs": [3.0]}}, "the log-probability 3 given, at most 0 expected"),
        ({"prompt_token_ids": [1, 5, 6]}, r"has read the prompt \[1, 5, 6\]..., but \[5, 6\]... was sent"),
        ({"finish_reason": "abort"}, "finish_reason: 'abort' given"),
        (
            {"token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"},
            r"stopped at the token 9, but only \[2\] end a response",
        ),
        ({"logprobs": None}, "one choice with token_ids, logprobs and finish_reason expected"),
    ],
)
def test_answers_that_cannot_be_used_are_refused(server, sampler, changes, message):
    server.answers["/v1/completions"] = lambda body: completion(body, **changes)
    with pytest.raises(ConfigError, match=rf"data\.sampler: the server's answer cannot be used: .*{message}"):
        sampler().sample("weights", PROMPTS[:1], ONE_ROW)


def test_an_answer_with_another_number_of_choices_is_refused(server, sampler):
    for choices in ([], completion({"seed": 1, "max_tokens": 5, "stop_token_ids": [2], "prompt": []})["choices"] * 2):
        server.answers["/v1/completions"] = lambda body, choices=choices: {"choices": choices}
        with pytest.raises(ConfigError, match="one choice with token_ids"):
            sampler().sample("weights", PROMPTS, REQUEST)


def test_an_api_key_is_sent(server, sampler, monkeypatch):
    with pytest.raises(ConfigError, match=r"data\.sampler\.server\.api_key_variable: 'KEY_OF_TEST' given, but"):
        sampler(server={"api_key_variable": "KEY_OF_TEST"})
    monkeypatch.setenv("KEY_OF_TEST", "of-the-test")
    sampler(server={"api_key_variable": "KEY_OF_TEST"}).sample("weights", PROMPTS, REQUEST)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer of-the-test"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_an_api_key_does_not_follow_a_redirect(server, monkeypatch, status):
    monkeypatch.setenv("KEY_OF_TEST", "of-the-test")
    with serving() as other:
        other.answers["/x"] = lambda body: {}
        server.faults, server.location = [status] * 2, f"{other.url}/x"
        client = JsonServer(ServerConfig(server.url, "KEY_OF_TEST", num_retries=0))
        with pytest.raises(ConfigError, match=rf"/x refuses the request: {status} .*redirects to {other.url}/x"):
            client.post("/x", {})
        with pytest.raises(ConfigError, match="redirects to"):
            client.check_reachable()
        assert not other.requests


@pytest.mark.parametrize("key", ["secret-of\nthe-test", "sécret-of-the-test"])
def test_an_api_key_that_no_header_can_have_is_one_message_without_it(server, monkeypatch, key):
    monkeypatch.setenv("KEY_OF_TEST", key)
    with pytest.raises(ConfigError, match=r"cannot be asked: .*Correct url or key") as caught:
        JsonServer(ServerConfig(server.url, "KEY_OF_TEST")).post("/x", {})
    assert "the-test" not in str(caught.value)


def test_an_answer_that_does_not_end_is_refused(server, monkeypatch):
    monkeypatch.setattr("jaxlm.systems.rl.json_server.largest", lambda: 1000)
    server.answers["/x"] = lambda body: ["much"] * 1000
    with pytest.raises(ConfigError, match=r"/x has more than 1,000 bytes"):
        JsonServer(ServerConfig(server.url)).post("/x", {})
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"protocol": "sglang"},
            "protocol: sglang given together with logprobs: raw, but SGLang's are processed: set logprobs: processed",
        ),
        ({"weights_folder": "gs://bucket/x"}, r"data\.sampler\.weights_folder: 'gs://bucket/x' given, a folder"),
        ({"weights_folder": ""}, r"data\.sampler\.weights_folder: '' given, a folder"),
        ({"server": {"url": "localhost:8000"}}, r"data\.sampler\.server\.url: 'localhost:8000' given, an address"),
        ({"server": {"timeout_s": 0}}, "timeout_s"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"updates_per_export": 0}, "updates_per_export"),
    ],
)
def test_mistakes_are_refused(sampler, keys, message):
    with pytest.raises(ConfigError, match=message):
        sampler(**keys)


def test_raw_log_probabilities_need_temperature_1(sampler):
    with pytest.raises(ConfigError, match=r"logprobs: raw given with temperature: 0\.7"):
        sampler().sample("weights", PROMPTS, dataclasses.replace(REQUEST, sampling=Sampling(0.7)))
    sampler(logprobs="processed").sample("weights", PROMPTS, dataclasses.replace(REQUEST, sampling=Sampling(0.7)))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://[::1", "http://host:port"])
def test_an_invalid_address_is_refused(url):
    with pytest.raises(ConfigError, match=r"^here\.url: .* given, an address such as http://localhost:8000 expected$"):
        ServerConfig(url).check("here")


FILTERED = Sampling(0.7, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.1)


def test_filters_are_sent_and_require_filtered_log_probabilities(sampler, server):
    request = dataclasses.replace(REQUEST, sampling=FILTERED)
    sampler(logprobs="processed").sample("weights", PROMPTS, request)
    sent = bodies(server)[0]
    assert {name: sent[name] for name in FILTERED.changed} == FILTERED.changed
    with pytest.raises(
        ConfigError, match=r"logprobs: raw given with top_p: 0\.9, but raw .* --logprobs-mode processed"
    ):
        sampler().sample("weights", PROMPTS, dataclasses.replace(REQUEST, sampling=Sampling(top_p=0.9)))
    sglang = {"protocol": "sglang", "logprobs": "processed"}
    with pytest.raises(ConfigError, match=r"sglang given with top_k: 50, top_p: 0\.9, min_p: 0\.05, but SGLang's"):
        sampler(**sglang).sample("weights", PROMPTS, request)
    sampler(**sglang)._config.check_sampling(Sampling(0.7, repetition_penalty=1.1))
