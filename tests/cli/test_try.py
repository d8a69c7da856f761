"`hints try`: what was played is kept, what was answered is not asked again, and bad input gets one sentence."
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from bad_server import BadServer, Reply, completion

from composer_replication.core.trace import Trace
from composer_replication.envs.toy.traces import toy_path
from composer_replication.replay.examples import read_pairs

TRY = ("hints", "try", "--sites", 3, "--times", 2, "--seed", 1)


def listing(request):
    "The call of whatever lists a folder; every other answer calls a tool that is not there."
    tools = {t["function"]["name"]: t["function"]["parameters"] for t in request.body["tools"]}
    name = next((n for n in tools if n in ("list_files", "ls", "show_tree")), None)
    lists = name is not None and request.body["seed"] % 2 == 0
    call = (name, json.dumps({tools[name]["required"][0]: "."})) if lists else ("nothing", "{}")
    return Reply(body=completion(calls=[call], finish="tool_calls", usage=(1000, 100)))


@pytest.fixture
def server():
    with BadServer(listing) as server:
        yield server


def model(server):
    return f"m@{server.url}" if server.url.endswith("/v1") else f"m@{server.url}/v1"


def test_an_address_is_asked_once_whatever_is_lost_of_the_branches(rows, server, tmp_path):
    row, = rows(*TRY, "--model", model(server))
    asked = len(server.requests)
    assert row["branches"] == 3 * 2 * 4 and asked >= row["branches"]
    assert {r["seed"] for r in (request.body for request in server.requests)}
    kept = tmp_path / "out/forks/branches.jsonl"
    assert rows(*TRY, "--model", model(server)) == [row]
    lines = kept.read_bytes().splitlines()
    kept.write_bytes(b"\n".join(lines[:-2]) + b"\n" + lines[-1][:40])  # one is gone, one is torn
    assert rows(*TRY, "--model", model(server)) == [row]
    kept.unlink()
    assert rows(*TRY, "--model", model(server)) == [row]
    assert len(server.requests) == asked


def test_a_budget_ends_it_and_the_same_command_goes_on(call, rows, server, tmp_path):
    words = (*TRY, "--model", model(server), "--price", "m=100,100", "--max-turn-tokens", 100)
    done = call(*words, "--budget-usd", 1)
    assert done.exit_code == 3 and "stopped" in done.output and "budget" in done.output
    asked = len(server.requests)
    row, = rows(*words, "--budget-usd", 10)
    assert row["branches"] == 24 and max(request.nth for request in server.requests) == 0
    assert 0 < asked < len(server.requests)


HOLDS = """
import sys
from composer_replication.core.holding import holding
with holding(sys.argv[1]):
    print(1, flush=True)
    sys.stdin.read()
"""


def test_two_commands_do_not_play_into_one_folder(call, rows, server, tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "mine")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"1\n"
    try:
        done = call(*TRY, "--model", model(server), "--out", "mine")
    finally:
        other.communicate()
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and f"(process {other.pid} on " in said and "set --out to another folder" in said, said
    assert not server.requests and rows(*TRY, "--model", model(server), "--out", "mine")[0]["branches"] == 24


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_keeps_what_was_answered(rows, tmp_path, sent):
    ended = threading.Event()  # until then it answers twelve times

    def answer(request):
        return Reply(listing(request).status, listing(request).body, delay=0 if request.number < 12 or ended.is_set() else 600)

    with BadServer(answer) as server:
        words = [str(word) for word in (*TRY, "--model", model(server), "--json")]
        program = "from composer_replication.cli.app import main; main()"
        run = subprocess.Popen([sys.executable, "-c", program, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 240
        while len(server.requests) < 10 and time.monotonic() < until and run.poll() is None:
            time.sleep(0.02)
        assert run.poll() is None
        run.send_signal(sent)
        said = run.communicate()[1]
        assert sent is signal.SIGKILL or run.returncode == 130 and "the same command goes on" in said
        ended.set()
        row, = rows(*words[:-1])
        again = sum(request.nth for request in server.requests)
        assert row["branches"] == 24 and again <= 8  # those under way, whose answers nobody heard


def test_pairs_and_episodes_are_what_other_commands_read(call, rows, tmp_path):
    words = ("hints", "try", "--sites", 6, "--times", 3, "--to", "end", "--max-turns", 8, "--arms", "none,own")
    row, = rows(*words, "--hints", "template", "--max-turn-tokens", 128, "--pairs", "pairs.jsonl", "--episodes", "episodes.jsonl")
    pairs = read_pairs(tmp_path / "pairs.jsonl")
    kept = [json.loads(line) for line in (tmp_path / "out/forks/branches.jsonl").read_text().splitlines()]
    passed = [line for line in kept if line["reward"] == 1]
    episodes = [Trace.from_json(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == len(passed) and row["branches"] == len(kept)
    assert bool(pairs) == bool(passed) and all(pair.pair.source.startswith("fork:") for pair in pairs)
    hints = {line["hint"] for line in kept if line["hint"]}
    shown = [turn.content for episode in episodes for turn in episode.turns]
    assert not any(text.endswith(hint) for text in shown for hint in hints)
    page = (tmp_path / "out/forks/report.html").read_text()
    assert row["verdict"].split(";")[0].split("(")[0] in page.replace("&#39;", "'")


@pytest.mark.parametrize("words, said", [
    (("--arms", "none,best"), "there is no arm 'best'"), (("--to", "there"), "there is no such end"),
    (("--episodes", "e.jsonl"), "add --to end"), ((toy_path(),), "name it with --task"),
    ((toy_path(), "--task", "deletion"), "needs its tasks"),
    ((toy_path(), "--task", "sql"), "no failed turn can be played again"),
    (("--model", "http://127.0.0.1:9/v1"), "names no model"), (("--arms", "none,rules"), "needs a file with text"),
    (("--rules", "nowhere.md"), "needs a file with text")])
def test_bad_input_gets_one_sentence(call, words, said):
    done = call("hints", "try", *words)
    assert done.exit_code == 1 and said in " ".join(done.output.split())
    assert done.output.count("error:") == 1


def test_an_address_that_never_answers_ends_soon(call):
    done = call(*TRY, "--model", "m@http://127.0.0.1:9/v1", "--arms", "none")
    assert done.exit_code == 3 and "gave no answer" in done.output


def test_an_address_of_anthropic_s_form_plays_on(rows, tmp_path):
    def messages(request):
        tools = {t["name"]: t["input_schema"] for t in request.body["tools"]}
        name = next((n for n in tools if n in ("list_files", "ls", "show_tree")), "nothing")
        given = {tools[name]["required"][0]: "."} if name in tools else {}
        return Reply(body={"type": "message", "model": "m", "stop_reason": "tool_use",
                           "usage": {"input_tokens": 9, "output_tokens": 3},
                           "content": [{"type": "tool_use", "id": "t", "name": name, "input": given}]})

    with BadServer(messages) as server:
        row, = rows(*TRY, "--model", f"m@{server.url}/messages")
        asked = len(server.requests)
        assert row["branches"] == asked == 24 and {request.path for request in server.requests} == {"/v1/messages"}
        (tmp_path / "out/forks/branches.jsonl").unlink()
        assert rows(*TRY, "--model", f"m@{server.url}/messages") == [row] and len(server.requests) == asked


def test_rules_stand_in_the_system_message_and_the_turns_stay(rows, server, tmp_path):
    (tmp_path / "AGENTS.md").write_text("# Mine\nSay please.\n")
    row, = rows(*TRY, "--model", model(server), "--arms", "none", "--rules", "AGENTS.md")
    assert list(row["levels"]) == ["none", "rules"] and "the rules in the system message" in row["verdict"]
    asked = {True: [], False: []}
    for messages in (request.body["messages"] for request in server.requests):
        asked["Say please." in str(messages)].append(messages)
    assert len(asked[True]) == len(asked[False]) == 6
    for messages in asked[True]:
        system = dict(messages[0])
        assert system["role"] == "system" and system["content"].endswith("\n\n# Mine\nSay please.")
        plain = system | {"content": system["content"].removesuffix("\n\n# Mine\nSay please.")}
        assert [plain, *messages[1:]] in asked[False]


def test_only_a_rule_that_helps_where_it_speaks_is_kept(call, tmp_path):
    "A real server obeys one rule of the shipped traces; the embedded model reads no system message, and none stays."
    def obeys(request):
        said = request.body["messages"][0]["content"]
        nothing = Reply(body=completion(calls=[("nothing", "{}")], finish="tool_calls"))
        return listing(request) if "list the folder" in said else nothing

    words = ("hints", "rules", "--keep-if-better", "--sites", 24, "--times", 2, "--seed", 3, "--out", "AGENTS.md")
    with BadServer(obeys) as server:
        (tmp_path / "AGENTS.md").write_text("# Mine\n")
        done = call(*words, "--model", model(server))
        asked = len(server.requests)
        assert done.exit_code == 0 and " ".join(done.output.split()).count("dropped: ") == 3
        assert call(*words, "--model", model(server)).exit_code == 0 and len(server.requests) == asked == 96
    written = (tmp_path / "AGENTS.md").read_text()
    assert written.startswith("# Mine\n") and written.count("\n- ") == 1 and "list the folder" in written
    done = call("hints", "rules", "--keep-if-better", "--sites", 8, "--times", 1, "--out", "AGENTS.md", "--model", "embedded")
    assert done.exit_code == 0 and "0 rules in AGENTS.md" in done.output
    assert "\n- " not in (tmp_path / "AGENTS.md").read_text()


@pytest.mark.parametrize("words, said", [
    ((), "no model is named"), (("--model", "embedded", "--task", "sql"), "no failed turn can be played again"),
    (("--model", "embedded", toy_path()), "name it with --task")])
def test_rules_that_cannot_be_played_are_not_written(call, tmp_path, words, said):
    done = call("hints", "rules", "--keep-if-better", "--out", "AGENTS.md", *words)
    assert done.exit_code == 1 and said in " ".join(done.output.split()) and done.output.count("error:") == 1
    assert not (tmp_path / "AGENTS.md").exists()
