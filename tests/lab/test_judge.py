"""Judges: a real model's likelihoods, a real HTTP server, both orders, and what goes wrong."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken.errors import ConfigError, DataError
from alphatoken_lab.compare.evaluate import _headline, measure
from alphatoken_lab.compare.judge import (
    EndpointJudge,
    LikelihoodJudge,
    make_judge,
    preferences,
    win_rate,
)
from alphatoken_lab.compare.judge_prompt import read_judge_prompt
from alphatoken_lab.compare.measures import Measures, Score
from alphatoken_lab.compare.opponents import Question, read_questions, stored_answers
from tests.rows import jsonl


class Endpoint(BaseHTTPRequestHandler):
    """OpenAI's chat completions, as far as a judge asks: prefers the answer that says "good"."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, dict(self.headers), body))
        status, said = server.replies.pop(0) if server.replies else (200, None)
        question = body["messages"][0]["content"]
        first, _, second = question.partition("[Answer A]")[2].partition("[Answer B]")
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


def asked(path: Path, texts: Sequence[str]) -> str:
    return str(jsonl(path, [{"prompt": one} for one in texts]))


TEXTS = ["The following statement is", "If the object is"]


def test_a_trained_model_wins_against_its_ruin(
    trained: tuple[Any, Any], library_decoder: Path, tmp_path: Path
) -> None:
    model, tokenizer = trained
    torch.manual_seed(0)
    ruined = AutoModelForCausalLM.from_config(model.config).eval()
    measures = Measures(
        questions_file=asked(tmp_path / "questions.jsonl", TEXTS),
        judge={"kind": "likelihood", "model": str(library_decoder)},
        max_new_tokens=12,
    )

    def rate(one: Any, other: Any) -> dict[str, Any]:
        return measure(
            one, tokenizer, measures, command="sft", start=lambda: other, folder=tmp_path
        )

    assert rate(model, ruined)["target"] == 100.0
    assert rate(ruined, model)["target"] == 0.0
    found = rate(model, model)
    assert found["details"] == {"target/win_rate": 50.0}
    assert found["settings"]["target/win_rate"] == {
        "opponent": "start", "judge": f"likelihood of {library_decoder.name}",
        "judge_prompt": None, "questions": 2, "chat_template": False, "metric": "win rate",
    }  # fmt: skip
    answered = json.loads((tmp_path / "answers-win_rate.json").read_text())
    assert [one["instruction"] for one in answered] == TEXTS
    assert [one["preference"] for one in answered] == [1.5, 1.5]
    assert {"output_1", "output_2", "generator_1", "generator_2", "annotator"} < set(answered[0])


# --- stored answers -----------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "AlpacaEval": (
        [{"instruction": text, "dataset": "d"} for text in TEXTS],
        [{"instruction": f"{text} ", "output": f"to {text}", "generator": "g"} for text in TEXTS],
    ),
    "Arena-Hard": (
        [{"uid": f"u{i}", "category": "c", "prompt": text} for i, text in enumerate(TEXTS)],
        [
            {"uid": f"u{i}", "model": "m", "messages": [
                {"role": "user", "content": "in other words"},
                {"role": "assistant", "content": {"answer": f"to {text}"}}]}
            for i, text in enumerate(TEXTS)
        ],
    ),
    "Arena-Hard as v0.1 had it": (
        [{"question_id": f"u{i}", "turns": [{"content": text}]} for i, text in enumerate(TEXTS)],
        [
            {"question_id": f"u{i}", "model_id": "m",
             "choices": [{"index": 0, "turns": [{"content": f"to {text}", "token_len": 3}]}]}
            for i, text in enumerate(TEXTS)
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("as_list", [False, True])
def test_stored_answers_of_every_layout(layout: str, as_list: bool, tmp_path: Path) -> None:
    """In another order, with answers to further questions: each goes to its own question."""
    rows, stored = LAYOUTS[layout]
    questions, answers = (
        tmp_path / "questions.jsonl",
        tmp_path / f"answers.json{'l' * (not as_list)}",
    )
    jsonl(questions, rows)
    extra = {"instruction": "not asked", "output": "nothing", "uid": "u9"}
    turned = [extra, *reversed(stored)]
    jsonl(answers, [json.dumps(turned)] if as_list else turned)
    found = read_questions(questions)
    assert [one.text for one in found] == TEXTS
    assert stored_answers(answers, found) == [f"to {text}" for text in TEXTS]
    assert stored_answers(answers, read_questions(questions, 1)) == [f"to {TEXTS[0]}"]


def test_means_are_of_all_scores_of_a_part() -> None:
    scores = {
        "target": {"a": Score(40.0, {}), "b": Score(60.0, {})},
        "retention": {"c": Score(30.0, {})},
    }
    assert _headline({}, scores) == {
        "target": 50.0, "retention": 30.0, "overall": 40.0, "unit": "score",
        "retention_unit": "score",
    }  # fmt: skip


def test_stored_answers_to_other_questions_are_refused(tmp_path: Path) -> None:
    questions = [Question(text) for text in TEXTS]
    place = tmp_path / "answers.jsonl"
    for rows, said in (
        ([{"instruction": TEXTS[0], "output": "a"}], "none to 1 of 2, such as 'If the object is'"),
        ([{"instruction": TEXTS[0]}], "holds no stored answer"),
        ([{"output": "a"}], "holds no stored answer"),
        ([{"uid": "u", "choices": [{"turns": []}]}], "holds no stored answer"),
        ([{"instruction": TEXTS[0], "output": one} for one in "ab"], "answered twice"),
    ):
        jsonl(place, rows)
        with pytest.raises(DataError, match=said):
            stored_answers(place, questions)
    place.write_text(json.dumps({"text": "no question"}) + "\n")
    with pytest.raises(DataError, match="has no question"):
        read_questions(place)


def test_several_sets_of_one_model(
    trained: tuple[Any, Any], library_decoder: Path, tmp_path: Path, endpoint: Any
) -> None:
    """Each with its own opponent and judge; the start model is not loaded where nobody asks it."""
    model, tokenizer = trained
    questions = asked(tmp_path / "questions.jsonl", TEXTS)
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps([{"instruction": t, "output": "a good answer"} for t in TEXTS]))
    other = {"kind": "endpoint", "url": endpoint.url, "model": "judge-1"}
    measures = Measures(
        judge_sets={
            "first": {"questions": questions, "opponent": str(stored), "judge": other},
            "second": {"questions": questions, "opponent": str(stored)},
        },
        judge={"kind": "likelihood", "model": str(library_decoder)},
        max_new_tokens=12,
        task_limit=1,
    )
    assert Measures(**json.loads(json.dumps(measures.spec()))) == measures
    found = measure(
        model, tokenizer, measures,
        command="sft", start=lambda: pytest.fail("loaded"), folder=tmp_path,
    )  # fmt: skip
    assert found["details"]["target/first"] == 0.0  # the endpoint likes what is called good
    assert found["details"]["target/second"] == 100.0  # nothing here reads like documents
    assert found["target"] == 50.0
    assert found["settings"]["target/first"]["opponent"] == "stored.json"
    assert found["settings"]["target/first"]["judge"] == "endpoint of judge-1"
    assert len(json.loads((tmp_path / "answers-second.json").read_text())) == 1
    with pytest.raises(ConfigError, match="needs a judge"):
        Measures(judge_sets={"a": {"questions": questions}})
    with pytest.raises(ConfigError, match="mapping with questions"):
        Measures(judge_sets={"a": {"opponent": questions}}, judge=other)


# --- prompts of others --------------------------------------------------------------------------

CHATML = (
    "<|im_start|>system\nYou compare.\n<|im_end|>\n<|im_start|>user\nAsked: {instruction}\n"
    '{"m": "{output_1}", "M": "{output_2}"}\n<|im_end|>'
)
ARENA = "system_prompt: You compare.\nprompt_template: ['{question_1} <{answer_1}> <{answer_2}>']\n"
LATER = "prompt_template: '{QUESTION} <{ANSWER_A}> <{ANSWER_B}>'\n"


def chosen(text: str, **likely: float) -> dict[str, Any]:
    top = [{"token": name, "logprob": math.log(p)} for name, p in likely.items()]
    more = {"logprobs": {"content": [{"top_logprobs": top}]}} if likely else {}
    return {"message": {"content": text}, **more}


def test_prompts_in_the_layouts_of_others(tmp_path: Path) -> None:
    """An answer that holds braces is not replaced in; the reply is read as the family asks."""
    place = tmp_path / "prompt.txt"
    place.write_text(CHATML)
    prompt = read_judge_prompt(place)
    system, user = prompt.messages("why?", "{output_2}", "no")
    assert system == {"role": "system", "content": "You compare."}
    assert user["content"] == 'Asked: why?\n{"m": "{output_2}", "M": "no"}'
    assert prompt.asking() == {"max_tokens": 1, "logprobs": True, "top_logprobs": 5}
    assert prompt.preference(chosen("m")) == 1.0
    assert prompt.preference(chosen("M")) == 0.0
    assert prompt.preference(chosen("M", m=0.2, M=0.6, x=0.1)) == pytest.approx(0.25)
    with pytest.raises(DataError, match="neither m nor M"):
        prompt.preference(chosen("A", A=0.9))
    for text in (ARENA, LATER):
        place = tmp_path / "prompt.yaml"
        place.write_text(text)
        prompt = read_judge_prompt(place)
        assert prompt.messages("q", "a", "b")[-1]["content"] == "q <a> <b>"
        for verdict, wanted in (("A>>B", 1.0), ("A>B", 1.0), ("A=B", 0.5), ("B>A", 0.0)):
            assert prompt.preference(chosen(f"So: [[{verdict}]]")) == wanted
        for said in ("A is better", "[[A>B]] or [[B>A]]"):
            with pytest.raises(DataError, match="no verdict"):
                prompt.preference(chosen(said))


def test_a_prompt_that_is_none_is_refused(tmp_path: Path) -> None:
    place, listed = tmp_path / "prompt.txt", tmp_path / "prompt.yaml"
    place.write_text("Which is better, {first} or {second}?")
    listed.write_text("prompt_template: [a, b]\n")
    settings = {"kind": "endpoint", "url": "http://h", "model": "m"}
    for path, said in (
        (place, "names no question and two answers"),
        (listed, "no prompt_template"),
        (tmp_path / "none", "prompt does not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_judge({**settings, "prompt": str(path)})


def test_an_endpoint_is_asked_with_the_prompt_of_a_file(endpoint: Any, tmp_path: Path) -> None:
    place = tmp_path / "prompt.txt"
    place.write_text(CHATML)
    judge = EndpointJudge(endpoint.url, "m", prompt=str(place))
    endpoint.replies += [(200, "m"), (200, "m")]
    assert preferences(judge, ["q"], ["x"], ["y"]) == [0.5]  # the first place, in both orders
    bodies = [body for _, _, body in endpoint.asked]
    assert [m["role"] for m in bodies[0]["messages"]] == ["system", "user"]
    assert '"m": "x"' in bodies[0]["messages"][1]["content"]
    assert '"m": "y"' in bodies[1]["messages"][1]["content"]
    assert bodies[0]["max_tokens"] == 1
