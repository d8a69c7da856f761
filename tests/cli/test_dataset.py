"`composer-rl dataset`: what is written is read by `datasets` alone, and no secret is in it."
import json
import signal
from collections import Counter

import pytest
from datasets import load_dataset
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.replay.dataset import scrubbed_pairs, scrubbed_trace
from composer_replication.replay.examples import place_pairs, write_pairs
from composer_replication.replay.pairs import DPOPair, sibling_pairs
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.traces.scrub import PATTERNS, scrub, scrub_text
from composer_replication.traces.siblings import SiblingIndex

SECRETS = {  # made up; in parts, so that no scanner takes this file for a leak
    "private key": "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "model API key": "sk-" + "ant-api03-" + "aB3" * 9, "GitHub token": "ghp_" + "a1" * 18,
    "Hugging Face token": "hf_" + "Ab" * 17, "AWS key": "AKIA" + "Q" * 16, "Google key": "AIza" + "x" * 35,
    "Slack token": "xoxb-" + "1" * 12, "JSON web token": "eyJ" + "a" * 20 + "." + "b" * 20 + "." + "c" * 9,
    "Stripe key": "sk_" + "live_" + "a1" * 12, "GitLab token": "glpat" + "-" + "x9" * 10,
    "package index token": "npm_" + "a1" * 18,
    "e-mail address": "ann.b@mail.example.org"}
MORE = [("-----BEGIN PGP " + "PRIVATE KEY BLOCK-----\nlQdG\n-----END PGP PRIVATE KEY BLOCK-----", "private key"),
        ("x-api-key: " + "0123456789abcdef", "assigned secret"), ("accessToken=" + "a1b2c3d4e5f6g7", "assigned secret"),
        ("'dbPassword': '" + "correct-horse-7'", "assigned secret"),
        ("redis://:" + "hunter22@cache:6379", "password in an address"),
        (r"C:\Users\annbee\x.py", "user name"), ("C:\\\\Users\\\\annbee\\\\x.py", "user name")]
IN_CONTEXT = {"basic credentials": ("Authorization: Basic ", "YW5uOmh1bnRlcjIy"),
              "bearer token": ("Authorization: Bearer ", "q1" * 12),
              "password in an address": ("git clone https://", "me:hunter2"),
              "assigned secret": ("DB_PASSWORD=", "correct-horse-7-battery"), "user name": ("/home/", "annbee")}


def read_back(folder):
    files = str(folder / "d" / "data" / "*.parquet")
    return load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "c"))


def run(*words):
    return CliRunner().invoke(app, ["dataset", *map(str, words)])


@pytest.mark.parametrize("kind", PATTERNS)
def test_every_pattern_finds_its_secret_and_nothing_of_it_stays(kind):
    before, secret = ("see ", SECRETS[kind]) if kind in SECRETS else IN_CONTEXT[kind]
    counts = Counter()
    behind = "@host/x and more" if kind == "password in an address" else " and more"
    shown = scrub_text(before + secret + behind, counts)
    assert secret not in shown and counts[kind] == 1 and f"<{kind}>" in shown and shown.endswith("and more")


@pytest.mark.parametrize("text, kind", MORE)
def test_other_forms_of_a_secret_are_found(text, kind):
    counts = Counter()
    shown = scrub_text(f"see {text} there", counts)
    left = [s for s in ("lQdG", "0123456789", "a1b2c3", "correct-horse", "hunter22", "annbee") if s in shown]
    assert counts == {kind: 1} and not left, shown
    assert scrub({"x-api-key": "0123456789abcdef"}, Counter()) == {"x-api-key": "<assigned secret>"}


@pytest.mark.parametrize("text", [
    "a basic understanding of it", "Basic authentication", "tokens: 512", "max_tokens=4096", "the secret of it"])
def test_plain_words_stay(text):
    assert scrub_text(text, Counter()) == text


def test_a_secret_under_its_name_is_found_in_parsed_arguments_and_in_json_within_json():
    key = "a1b2c3d4e5f6" + "g7h8i9"
    counts = Counter()
    given = {"user": "bob", "api_key": key, "more": [{"db_password": key, "tokens": 12345678901234}], "key": "short"}
    hidden = "<assigned secret>"
    assert scrub(given, counts) == given | {"api_key": hidden, "more": [{"db_password": hidden, "tokens": 12345678901234}]}
    assert counts == {"assigned secret": 2}
    body = json.dumps({"status": 200, "body": json.dumps({"api_key": key, "again": json.dumps({"token": key})})})
    hidden = scrub_text(body, counts)
    assert key not in hidden and counts["assigned secret"] == 4
    assert json.loads(json.loads(hidden)["body"])["api_key"] == "<assigned secret>"


@given(st.text(max_size=300))
def test_scrubbing_twice_changes_nothing_more(text):
    once = scrub_text(text, Counter())
    assert scrub_text(once, Counter()) == once


def test_long_text_is_scrubbed_in_time_that_grows_with_it():
    "No pattern runs away on text that almost fits: with its square it takes minutes, and is stopped after 20 s of a core."
    def too_long(*_):
        raise AssertionError("a pattern runs away")

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)  # of this process's own time, however busy the machine is
    try:
        for piece in ("a@", "token=", "/home/", "sk-", "-eyJ", "eyJ" + "a" * 9 + ".", "x_" * 30 + "key ", "http://a:"):
            scrub_text(piece * (400_000 // len(piece)), Counter())
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_traces_as_a_data_set(tmp_path):
    traces = toy_traces()[:6]
    call = ToolCall("sh", {"cmd": [f"export K={SECRETS['AWS key']}"]})
    turns = (Turn("user", f"use {SECRETS['GitHub token']}"),
             Turn("assistant", "", "I am ann@example.org", (call,), token_ids=(1, 2), logprobs=(-.1, -.2)))
    secret = Trace("s", turns, gold="GOLD SOLUTION", reward=0.5)
    write_traces([*traces, secret], tmp_path / "t.jsonl.gz")
    words = ("--out", tmp_path / "d", "--licence", "CC-BY-4.0", "--json")
    done = run("traces", tmp_path / "t.jsonl.gz", *words)
    row = json.loads(done.stdout)
    assert row["scrubbed"] == {"GitHub token": 1, "e-mail address": 1, "AWS key": 1} and row["counts"]["traces"] == 7
    data = read_back(tmp_path)
    for trace, shown in zip(traces, data):
        assert (shown["trace_id"], shown["reward"], shown["messages"]) == (trace.trace_id, trace.reward, trace.to_messages())
        errors = [(e["turn"], e["kind"]) for e in map(json.loads, shown["errors"])]
        assert errors == [(site.turn, site.kind) for site in find_error_sites(trace)]
    card, whole = (tmp_path / "d" / "README.md").read_text(), str(data[6])
    assert not any(text in whole for text in ("GOLD", "ann@", SECRETS["AWS key"])) and "token_ids" not in data.column_names
    assert "license: cc-by-4.0" in card and "# d" in card and "| AWS key | 1 |" in card and "| Slack token | 0 |" in card
    assert str(tmp_path) not in card and "t.jsonl.gz" in card


BIG = [2**70 + 1, -2**64, 2**64]


def test_integers_above_64_bits_stay_what_they_are(tmp_path):
    parameters = {"type": "object", "properties": {"n": {"maximum": BIG[0]}}}
    tools = ({"type": "function", "function": {"name": "f", "parameters": parameters}},)
    turns = (Turn("user", "go"), Turn("assistant", tool_calls=(ToolCall("f", {"n": BIG, "in": {"it": BIG[0]}}),)))
    shown = scrubbed_trace(Trace("t", turns, tools=tools), Counter())
    assert shown.turns == turns and shown.tools == tools and type(shown.turns[1].tool_calls[0].arguments["n"][0]) is int
    write_traces([shown], tmp_path / "t.jsonl")
    done = run("traces", tmp_path / "t.jsonl", "--out", tmp_path / "d", "--licence", "other")
    assert done.exit_code == 0, done.output
    assert str(BIG[0]) in str(read_back(tmp_path)[0]["messages"])
    pair = DPOPair("t", 1, Turn("assistant", tool_calls=(ToolCall("f", {"n": BIG[0]}),)), turns[1], "mine")
    write_pairs(place_pairs([pair], [shown]), tmp_path / "p.jsonl")
    [kept] = scrubbed_pairs(tmp_path / "p.jsonl", Counter())
    assert kept.pair.chosen.tool_calls[0].arguments == {"n": BIG[0]}


def test_pairs_as_a_data_set(tmp_path):
    traces = toy_traces()
    index = SiblingIndex(traces)
    pairs = [pair for trace in traces for pair in sibling_pairs(trace, index)]
    write_pairs(place_pairs(pairs, traces), tmp_path / "p.jsonl")
    done = run("pairs", tmp_path / "p.jsonl", "--out", tmp_path / "d", "--licence", "other")
    assert done.exit_code == 0 and f"pairs {len(pairs)}" in done.stdout and "Replaced: nothing." in done.stdout
    data = read_back(tmp_path)
    assert len(data) == len(pairs) and {"prompt", "chosen", "rejected", "tools"} <= set(data.column_names)
    assert data[0]["chosen"] != data[0]["rejected"] and data[0]["prompt"][0]["role"] == "system"


def test_what_is_no_pair_is_told_by_its_own_place(tmp_path):
    traces = toy_traces()
    pairs = place_pairs([pair for trace in traces for pair in sibling_pairs(trace, SiblingIndex(traces))][:3], traces)
    write_pairs(pairs, tmp_path / "p.jsonl")
    lines = (tmp_path / "p.jsonl").read_text().splitlines()
    for name, text, said in (("foreign", [*lines[:2], '{"a": 1}', lines[2]], "foreign.jsonl, line 3: this is no pair"),
                             ("empty", [], "empty.jsonl: the file holds no pairs")):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(text) + "\n" * bool(text))
        done = run("pairs", tmp_path / f"{name}.jsonl", "--out", tmp_path / name, "--licence", "other")
        assert done.exit_code == 1 and f"{tmp_path}/{said}" in done.stderr.replace("\n", ""), done.stderr
        assert not (tmp_path / name).exists()


def test_pairs_that_differ_in_a_secret_only_leave_nothing_to_publish(tmp_path):
    trace = Trace("t", (Turn("user", "Go."), Turn("assistant", f"key {SECRETS['AWS key']}"), Turn("user", "So?")))
    other = Turn("assistant", "key " + SECRETS["AWS key"][:-1] + "R")
    write_pairs(place_pairs([DPOPair("t", 1, other, trace.turns[1], "by hand")], [trace]), tmp_path / "p.jsonl")
    mine, its = (Turn("assistant", tool_calls=(ToolCall("login", {"key": key}, id),))
                 for key, id in ((SECRETS["AWS key"], "call_1"), (SECRETS["AWS key"][:-1] + "R", "call_2")))
    whole = Trace("t", (Turn("user", "Go."), mine, Turn("tool", "So?", tool_call_id="call_1", observation=True)))
    write_pairs(place_pairs([DPOPair("t", 1, its, mine, "by hand")], [whole]), tmp_path / "calls.jsonl")
    done = run("pairs", tmp_path / "calls.jsonl", "--out", tmp_path / "c", "--licence", "other")
    assert done.exit_code == 1 and "differ in a secret only" in done.stderr.replace("\n", " "), done.stderr
    done = run("pairs", tmp_path / "p.jsonl", "--out", tmp_path / "d", "--licence", "other")
    assert done.exit_code == 1 and "differ in a secret only" in done.stderr.replace("\n", " ") and "/tmp/tmp" not in done.stderr


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    done = run("traces", "--out", tmp_path, "--licence", "other")
    assert done.exit_code == 1 and "holds other files" in done.stderr and [p.name for p in tmp_path.iterdir()] == ["mine"]
