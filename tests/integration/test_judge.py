"""Judges: a real model's likelihoods, a real HTTP server, both orders, and what goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken.compare.judge import (
    EndpointJudge,
    LikelihoodJudge,
    make_judge,
    win_rate,
    win_rate_against,
)
from alphatoken.errors import ConfigError, DataError


class Endpoint(BaseHTTPRequestHandler):
    """OpenAI's chat completions, as far as a judge asks: prefers the answer that says "good"."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, dict(self.headers), body))
        status, said = server.replies.pop(0) if server.replies else (200, None)
        question = body["messages"][0]["content"]
        first, second = question.split("[Answer A]")[1].split("[Answer B]")
        likes = ["good" in first, "good" in second.split("Reply with")[0]]
        letter = "T" if likes[0] == likes[1] else "A" if likes[0] else "B"
        reply = {"choices": [{"message": {"content": said or letter}}]}
        text = b"not JSON" if said == "broken" else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def endpoint() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.asked, server.replies = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


# --- the rate -----------------------------------------------------------------------------------


def test_both_orders_cancel_a_judge_that_prefers_a_place() -> None:
    first_always = lambda prompt, first, second: 1.0  # noqa: E731
    assert win_rate(first_always, ["q"] * 3, ["a", "b", "c"], ["x", "y", "z"]) == 50.0


def test_the_rate_is_of_wins_with_ties_counted_half() -> None:
    longer = lambda prompt, a, b: 0.5 if len(a) == len(b) else float(len(a) > len(b))  # noqa: E731
    ours, theirs = ["aaa", "a", "bb", "same"], ["b", "bbb", "cc", "same "]
    assert win_rate(longer, ["q"] * 4, ours, theirs) == 100 * (1 + 0 + 0.5 + 0.5) / 4
    with pytest.raises(DataError, match="one answer of each side"):
        win_rate(longer, ["q"], ours, theirs)


# --- an endpoint --------------------------------------------------------------------------------


def test_an_endpoint_is_asked_as_openai_s_is(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = EndpointJudge(endpoint.url, "judge-1", key_variable="JUDGE_KEY")
    assert judge("why?", "a good answer", "bad") == 1.0
    assert judge("why?", "bad", "a good answer") == 0.0
    assert judge("why?", "bad", "worse") == 0.5
    path, headers, body = endpoint.asked[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["model"] == "judge-1"
    assert body["temperature"] == 0
    assert "why?" in body["messages"][0]["content"]
    assert win_rate(judge, ["q", "q"], ["good", "bad"], ["bad", "bad "]) == 75.0


def test_errors_of_the_server_are_tried_again_and_others_are_not(endpoint: Any) -> None:
    judge = EndpointJudge(endpoint.url, "m", tries=3, pause=0.01)
    endpoint.replies += [(500, None), (200, "broken")]
    assert judge("q", "good", "bad") == 1.0
    assert len(endpoint.asked) == 3
    endpoint.replies += [(401, None)]
    with pytest.raises(DataError, match="401"):
        judge("q", "good", "bad")
    assert len(endpoint.asked) == 4
    endpoint.replies += [(503, None)] * 3
    with pytest.raises(DataError, match="503"):
        judge("q", "good", "bad")
    endpoint.replies += [(200, "I cannot say")]
    with pytest.raises(DataError, match="did not say A, B or T"):
        judge("q", "good", "bad")


def test_nobody_answers(endpoint: Any) -> None:
    judge = EndpointJudge("http://127.0.0.1:9/v1", "m", tries=2, pause=0.01)
    with pytest.raises(DataError, match="does not answer"):
        judge("q", "a", "b")


def test_settings_are_checked() -> None:
    for settings, match in (
        ({"kind": "oracle"}, "kind of judge"),
        ({"kind": "endpoint", "url": "localhost", "model": "m"}, "no address"),
        ({"kind": "endpoint", "url": "http://h", "temperature": 1}, "does not take"),
        ({"kind": "endpoint", "url": "http://h", "model": "m", "key_variable": "NO"}, "not set"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_judge(settings)


# --- likelihoods, of a real model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(library_decoder: Path) -> tuple[Any, Any]:
    """A model that has read documents, and its tokenizer."""
    return (
        AutoModelForCausalLM.from_pretrained(library_decoder),
        AutoTokenizer.from_pretrained(library_decoder),
    )


def test_likelihood_is_the_model_s_own(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    judge = LikelihoodJudge(model, tokenizer)
    prompt, answer = "If the object is a class instance,", " the value of the attribute is used."
    before = tokenizer(prompt)["input_ids"]
    after = tokenizer(answer, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        log_probs = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
    wanted = [float(log_probs[len(before) - 1 + i, token]) for i, token in enumerate(after)]
    assert judge.score(prompt, answer) == pytest.approx(sum(wanted) / len(wanted), rel=1e-6)
    assert judge(prompt, answer, " qzx vvk jjq wxz.") == 1.0
    assert judge(prompt, " qzx vvk jjq wxz.", answer) == 0.0
    assert judge(prompt, answer, answer) == 0.5
    assert judge(prompt, "", answer) == 0.0


def test_a_trained_model_wins_against_its_ruin(
    trained: tuple[Any, Any], library_decoder: Path, tmp_path: Path
) -> None:
    model, tokenizer = trained
    torch.manual_seed(0)
    ruined = AutoModelForCausalLM.from_config(model.config).eval()
    questions = tmp_path / "questions.jsonl"
    asked = ["The following statement is", "If the object is"]
    questions.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
    judge = make_judge({"kind": "likelihood", "model": str(library_decoder)})
    options: dict[str, Any] = {"max_new_tokens": 12, "folder": tmp_path}
    assert win_rate_against(model, ruined, tokenizer, questions, judge, **options) == 100.0
    assert win_rate_against(ruined, model, tokenizer, questions, judge, **options) == 0.0
    assert win_rate_against(model, model, tokenizer, questions, judge, **options) == 50.0
    answered = json.loads((tmp_path / "answers.json").read_text())
    assert [one["prompt"] for one in answered] == asked
