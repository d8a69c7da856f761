"""`composer-rl replay` and `pairs` against a real server: budgets, resuming, estimates, and what cannot be done."""
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_server import BadServer, Reply, completion
from datasets import load_dataset
from typer.testing import CliRunner

import composer_replication
from composer_replication.cli.app import app
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.replay.examples import read_pairs
from composer_replication.replay.ledger import Ledger
from composer_replication.replay.teachers import trace_states
from composer_replication.traces.export import write_traces

STATES = [state for trace in toy_traces()[:6] for state in trace_states(trace)]


@pytest.fixture
def traces(tmp_path):
    write_traces(toy_traces()[:6], tmp_path / "traces.jsonl")
    return tmp_path / "traces.jsonl"


def two_agree(request):
    "The third model would have done something else."
    calls = [("look", json.dumps({"at": len(request.body["messages"]), "by": request.model == "m-c"}))]
    return Reply(body=completion(request.model, calls=calls, finish="tool_calls", usage=(100, 20)))


@pytest.fixture
def server():
    with BadServer(two_agree) as running:
        yield running


def run(*words):
    "Exit code, JSON lines of the output, and standard error."
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")], result.stderr


def asking(traces, server, *more, names=("a", "b", "c")):
    panel = [word for name in names for word in ("--teachers", f"{name}=m-{name}@{server.url}")]
    return run("replay", traces, "--ledger", traces.parent / "ledger", "--json", *panel, *more)


def test_a_second_run_sends_nothing_and_says_the_same(traces, server):
    folder, page = traces.parent, traces.parent / "replay.html"
    code, rows, problems = asking(traces, server, "--gate", "everyone", "--pairs", folder / "pairs.jsonl", "--report", page)
    distinct = len({s.key for s in STATES})
    assert (code, problems) == (0, "") and rows[-1]["states"] == rows[-1]["finished"] == len(STATES)
    assert rows[-1]["calls"] == len(server.requests) == 3 * distinct
    first = (traces.parent / "pairs.jsonl").read_bytes()
    assert page.read_text().count("<details") == len(STATES) and page.read_text().count("class=pair") == rows[-1]["pairs"]
    again = asking(traces, server, "--gate", "everyone", "--pairs", traces.parent / "pairs.jsonl")
    assert again[1][-1]["calls"] == 0 and len(server.requests) == 3 * distinct
    assert (traces.parent / "pairs.jsonl").read_bytes() == first
    assert all(again[1][-1][name] == rows[-1][name] for name in ("pairs", "votes", "spent_usd"))
    assert len(read_pairs(traces.parent / "pairs.jsonl")) == rows[-1]["pairs"]


def test_it_stops_before_the_budget_and_goes_on_with_a_higher_one(traces, server):
    prices = [word for name in "abc" for word in ("--price", f"m-{name}=1000,2000")]
    code, rows, problems = asking(traces, server, "--budget-usd", "5", *prices, "--max-tokens", "100", "--concurrency", "1")
    with Ledger(traces.parent / "ledger") as ledger:
        assert 0 < ledger.spent().total_usd <= 5
    assert code == 3 and "stopped: budget:" in problems and "give a higher budget to go on" in " ".join(problems.split())
    assert 0 < rows[-1]["finished"] < len(STATES)
    sent = len(server.requests)
    code, rows, _ = asking(traces, server, "--budget-usd", "100000", *prices, "--max-tokens", "100")
    assert code == 0 and rows[-1]["finished"] == len(STATES)
    asked = [json.dumps(request.body) for request in server.requests]
    assert len(asked) == len(set(asked)) > sent  # nothing twice


def test_the_wall_time_ends_it(traces):
    with BadServer(lambda request: Reply(delay=0.3, body=completion(content="done"))) as slow:
        code, rows, problems = asking(traces, slow, "--max-wall", "1", "--concurrency", "1")
    assert code == 3 and "wall time" in problems and rows[-1]["finished"] < len(STATES)


def test_an_estimate_asks_nobody_and_counts_what_is_known(traces, server):
    code, rows, _ = asking(traces, server, "--estimate", "--price", "m-a=1,2")
    distinct = len({s.key for s in STATES})
    assert code == 0 and not server.requests and not (traces.parent / "ledger").exists()
    assert [(r["teacher"], r["calls"], r["known"]) for r in rows] == [(name, distinct, 0) for name in "abc"]
    assert rows[0]["usd"] == pytest.approx((rows[0]["prompt_tokens"] + 2 * rows[0]["completion_tokens"]) / 1e6)
    assert rows[0]["cached_usd"] == rows[0]["usd"] < rows[0]["most_usd"] and rows[1]["usd"] == 0
    asking(traces, server, "--gate", "everyone", names=("a",))
    rows = asking(traces, server, "--estimate")[1]
    assert [(r["calls"], r["known"]) for r in rows] == [(0, distinct), (distinct, 0), (distinct, 0)]


def test_answers_that_failed_are_asked_for_again(traces):
    down = [True]
    broken = Reply(500, {"error": {"message": "down"}})
    with BadServer(lambda request: broken if down[0] and request.model == "m-b" else two_agree(request)) as server:
        code, rows, problems = asking(traces, server, "--gate", "everyone", "--tries", "1")
        assert code == 3 and rows[-1]["finished"] == rows[-1]["pairs"] == 0
        assert "lack answers; run the same command again" in problems and "of them: not answered: HTTP 500: down" in problems
        down[0], sent = False, len(server.requests)
        code, rows, problems = asking(traces, server, "--gate", "everyone")
        assert code == 0 and rows[-1]["finished"] == len(STATES) and len(server.requests) == sent + len({s.key for s in STATES})


def test_one_key_goes_to_one_address(traces, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-one")
    words = [w for host in "ab" for w in ("--teachers", f"{host}=m@https://{host}.example/v1")]
    code, _, problems = run("replay", traces, *words, "--key-env", "THE_KEY", "--price", "m=1,2", "--ledger", traces.parent / "l")
    assert code == 1 and "would go to https://a.example/v1 and https://b.example/v1" in " ".join(problems.split())


def test_only_errors_asks_at_the_turns_that_caused_one(traces, server):
    from composer_replication.traces.siblings import failed_turns
    _, rows, _ = asking(traces, server, "--only-errors")
    assert rows[-1]["states"] == sum(len(failed_turns(t)) for t in toy_traces()[:6]) > 0


@pytest.mark.parametrize("words, sentence", [
    (["--teachers", "nobody/unknown"], "no price is known for nobody/unknown; give one with --price"),
    (["--teachers", "openai/gpt-5.5"], "OPENROUTER_API_KEY is not set"),
    (["--teachers", "x@http://user:pass@127.0.0.1/v1"], "without a login"),
    (["--teachers", "@http://127.0.0.1/v1"], "names no teacher"),
    (["--teachers", "m@http://[bad/v1"], "is no address"),
    (["--teachers", "m@http://127.0.0.1:1/v1", "--price", "m=cheap"], "is no price"),
    (["--gate", "sure", "--teachers", "m@http://127.0.0.1:1/v1"], "cannot give 2 votes"),
    (["--teachers", "m@http://127.0.0.1:1/v1", "--teachers", "m@http://127.0.0.1:1/v1"], "each with a name of its own"),
    (["--teachers", "A=m@http://127.0.0.1:1/v1", "--teachers", "B=m@http://127.0.0.1:1/v1"], "one answer would count as two"),
])
def test_what_cannot_be_asked_is_one_sentence(traces, monkeypatch, words, sentence):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    code, rows, problems = run("replay", traces, "--ledger", traces.parent / "ledger", "--gate", "everyone", *words)
    said = " ".join(problems.replace("│", " ").split())
    assert code in (1, 2) and sentence in said and "Traceback" not in said and not rows


def test_files_that_are_none(tmp_path):
    free = ["--teachers", "m@http://127.0.0.1:1/v1", "--ledger", tmp_path / "ledger"]
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "ledger-not").write_text("x" * 5000)
    write_traces(toy_traces()[:1], tmp_path / "one.jsonl")
    for words, sentence in (([tmp_path / "absent", *free], "no such file"),
                            ([tmp_path / "empty.jsonl", *free], "no trace could be read"),
                            ([tmp_path / "one.jsonl", *free[:2], "--ledger", tmp_path / "ledger-not"], "not a ledger")):
        code, _, problems = run("replay", *words, "--gate", "everyone")
        assert code == 1 and sentence in problems


def test_a_dead_server_is_one_line_and_loses_nothing(traces, server):
    asking(traces, server, "--gate", "everyone", names=("a",))
    panel = ["--teachers", f"a=m-a@{server.url}", "--teachers", "b=m-b@http://127.0.0.1:1/v1", "--gate", "everyone"]
    code, rows, problems = run("replay", traces, "--ledger", traces.parent / "ledger", "--json", *panel)
    assert code == 3 and "no connection to http://127.0.0.1:1/v1" in problems
    assert [r["answers"] for r in rows if r.get("teacher") == "a"] == [len(STATES)] and rows[-1]["finished"] == 0


def test_pairs_are_made_ready_for_training(traces, server):
    folder = traces.parent
    model = Path(composer_replication.__file__).parent / "data" / "models"
    asking(traces, server, "--pairs", folder / "raw.jsonl", "--gate", "everyone")
    code, [row], _ = run("pairs", folder / "raw.jsonl", "--out", folder / "ready.jsonl", "--model", model, "--json")
    assert code == 0 and row["given"] == row["kept"] + sum(v for k, v in row.items() if k not in ("given", "kept"))
    rows = load_dataset("json", data_files=str(folder / "ready.jsonl"), split="train", cache_dir=str(folder / "cache"))
    assert len(rows) == row["kept"] > 0 and {"prompt", "chosen", "rejected", "tools"} <= set(rows.column_names)
    code, _, problems = run("pairs", traces, "--out", folder / "x.jsonl", "--model", model)
    assert code == 1 and "this is no pair of the form" in problems and not (folder / "x.jsonl").exists()


def test_ctrl_c_leaves_a_ledger_to_go_on_from(traces):
    with BadServer(lambda request: Reply(delay=600 * (request.number > 2), body=completion(content="done"))) as slow:
        command = [sys.executable, "-c", "from composer_replication.cli.app import main; main()", "replay", str(traces),
                   "--gate", "everyone", "--teachers", f"a=m@{slow.url}", "--ledger", str(traces.parent / "ledger"),
                   "--concurrency", "1"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while len(slow.requests) < 4 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(2)
        _, problems = process.communicate(timeout=600)
    assert process.returncode not in (0, None) and "Traceback" not in problems
    with Ledger(traces.parent / "ledger") as ledger:
        assert ledger.spent().paid >= 3 and ledger.spent().in_flight == 0


def test_pairs_are_made_of_traces_alone(traces, tmp_path):
    sql = tmp_path / "sql.jsonl"
    turns = [{"role": "user", "content": "Where is the cat in this house, and who has seen it last?"},
             {"role": "assistant", "content": "SELECT place FROM cat"},
             {"role": "user", "content": "no such table: cat", "observation": True, "failed": True},
             {"role": "assistant", "content": "SHOW TABLES"}, {"role": "user", "content": "boxes, cats", "observation": True}]
    sql.write_text(json.dumps({"schema": "composer-trace/1", "trace_id": "a", "turns": turns}) + "\n")
    code, [row], _ = run("pairs", sql, "--make", "recovery", "--out", tmp_path / "out.jsonl", "--json")
    assert code == 0 and row["given"] == row["kept"] == 1
    [example] = read_pairs(tmp_path / "out.jsonl")
    assert (example.pair.chosen.content, example.pair.rejected.content) == ("SHOW TABLES", "SELECT place FROM cat")
    code, _, problems = run("pairs", sql, "--make", "siblings", "--out", tmp_path / "out.jsonl")
    assert code == 1 and "none of the 1 traces holds a pair by siblings" in problems
    code, _, problems = run("pairs", sql, "--make", "luck", "--out", tmp_path / "out.jsonl")
    assert code == 1 and "use siblings or recovery" in problems
