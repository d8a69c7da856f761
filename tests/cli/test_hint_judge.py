# ruff: noqa: E501
"""`hints list`: a judge asked over HTTP, once and at its price; wanted failures apart; blame."""

import json

import pytest
from bad_server import BadServer, Reply, completion
from typer.testing import CliRunner

from composer_replication.cli.app import app

LONG = "I now explain at length what this step does and why it is good. " * 20
BROKEN = 'Traceback (most recent call last):\n  File "/w/a.py", line 1, in <module>\n    x = one\nNameError: name \'one\' is not defined'


def chat(*steps):
    "Steps are (text, tool, arguments, answer)."
    messages = [{"role": "user", "content": "Make a.py."}]
    for n, (text, tool, arguments, answer) in enumerate(steps):
        call = {"id": f"c{n}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        messages += [{"role": "assistant", "content": text, "tool_calls": [call]}, {"role": "tool", "tool_call_id": f"c{n}", "content": answer}]
    return {"messages": messages}


@pytest.fixture
def traces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        chat((LONG, "read", {"path": "a.py"}, "x = 1"), ("", "read", {"path": "b.py"}, "Error: no such file")),
        chat(
            ("", "Write", {"file_path": "/w/a.py", "content": "x = one\n"}, "ok"),
            ("", "bash", {"command": "python a.py"}, BROKEN),
            ("The new test should fail now.", "bash", {"command": "pytest"}, "1 failed in 0.1s\nExit code: 1"),
        ),
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def listed(*words):
    result = CliRunner().invoke(app, ["hints", "list", *map(str, words), "--json"])
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")], result.stderr


def test_a_judge_is_asked_about_patterns_alone_once_and_at_its_price(traces):
    with BadServer(lambda request: Reply(body=completion(request.model, "Say it in one sentence.", usage=(1000, 10)))) as server:
        asked = (traces, "--detectors", "long_explanation", "--judge", server.url, "--model", "m", "--price", "m=2,10")
        code, rows, said = listed(*asked)
        [judged] = [row for row in rows if row["layer"] == "judge"]
        assert (code, judged["kind"], judged["hint"]) == (0, "long_explanation", "Say it in one sentence.")
        assert len(server.requests) == 1 and "pattern of communication" in server.requests[0].question and LONG[:40] in server.requests[0].question
        assert {row["layer"] for row in rows if row["kind"] != "long_explanation"} <= {"template", "raw_error", None}
        assert "asked 1 times: 1,000 and 10 tokens, $0.0021" in said
        assert listed(*asked)[1] == rows and len(server.requests) == 1  # kept in out/judge
        assert "asked 0 times" in listed(*asked)[2]


def test_a_judge_that_says_none_or_nothing_leaves_the_template(traces):
    for behave, words in ((lambda r: Reply(body=completion(r.model, "NONE")), "asked 1 times"), (lambda r: Reply(401), "1 times without an answer")):
        with BadServer(behave) as server:
            code, rows, said = listed(traces, "--detectors", "long_explanation", "--judge", server.url, "--model", "m")
        [judged] = [row for row in rows if row["kind"] == "long_explanation"]
        assert code == 0 and judged["layer"] == "template" and words in said


@pytest.mark.parametrize(
    "words, says",
    [
        (("--judge", "http://127.0.0.1:9/v1"), "belong together"),
        (("--model", "m"), "belong together"),
        (("--judge", "https://far.example/v1", "--model", "no-such-model"), "price"),
        (("--blame", "everybody"), "shown or cause"),
        (("--hints", "judge"), "--judge"),
    ],
)
def test_what_does_not_fit_is_said(traces, words, says):
    code, rows, said = listed(traces, *words)
    assert code == 1 and not rows and says in said, said


def test_wanted_failures_are_listed_apart_and_blame_moves_with_its_proof(traces):
    code, rows, _ = listed(traces)
    [wanted] = [row for row in rows if "wanted" in row]
    assert code == 0 and wanted["hint"] is None and wanted["wanted"] == "it was said: The new test should fail now."
    shown = next(row for row in rows if "one" in row["error"])
    assert shown["message_index"] == 3 and "blame" not in shown
    caused = next(row for row in listed(traces, "--blame", "cause")[1] if "one" in row["error"])
    assert caused["message_index"] == 1 and caused["evidence_index"] == 4 and "was written in message 1" in caused["blame"]
    assert "blame" not in next(row for row in listed(traces)[1] if "one" in row["error"])  # the setting does not stay
    text = CliRunner().invoke(app, ["hints", "list", str(traces)])
    assert "wanted: 1" in text.stdout and "1 of 3 failures were wanted" in text.stderr
