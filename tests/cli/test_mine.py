"""One's own sessions: found in a home of five agents, read by `--mine`; what failures cost, by hand; rules between markers."""
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_replication.cli import find
from composer_replication.cli.costs import Costs, habit, stretches
from composer_replication.cli.find import find_sessions
from composer_replication.cli.rules import BEGIN, END, rules_of, rules_text, with_rules
from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import ToolCall, Trace, Turn

SESSIONS = Path(__file__).parents[1] / "fixtures" / "sessions"
HOMES = {"claude": ".claude", "codex": ".codex", "gemini": ".gemini", "hermes": ".hermes", "cline": ".cline/data"}
AGENTS = {"Claude Code", "Codex", "Gemini CLI", "Hermes", "Cline"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    "A home folder with sessions of five agents; nothing moves them."
    home = tmp_path / "home"
    for name, place in HOMES.items():
        shutil.copytree(SESSIONS / name, home / place)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    for place in find.PLACES:
        monkeypatch.delenv(place.moved_by or "NONE", raising=False)
    return home


def test_sessions_of_five_agents_are_found(home, rows):
    found = {row["agent"]: row for row in rows("traces", "find")}
    assert found.keys() == AGENTS and all(row["sessions"] == 1 and row["bytes"] > 100 for row in found.values())


def test_the_table_says_where_and_that_nothing_leaves(home, call):
    done = call("traces", "find")
    assert done.exit_code == 0
    assert all(text in done.stdout for text in ("~/.codex", "nothing leaves this machine", "hints list --mine"))


MOVED = [place for place in find.PLACES if place.moved_by]


@pytest.mark.parametrize("place", MOVED, ids=lambda place: place.agent)
def test_a_variable_moves_each_folder(place, tmp_path):
    name = place.sessions[0].replace("**", "x").replace("*", "x")
    (tmp_path / "moved" / name).parent.mkdir(parents=True)
    (tmp_path / "moved" / name).write_text("{}\n")
    found, = find_sessions(tmp_path / "home", {place.moved_by: str(tmp_path / "moved")})
    assert found.place is place and len(found.files) == 1
    assert find_sessions(tmp_path / "home", {}) == []


def test_links_other_users_and_huge_files_are_left_out_and_counted(home, monkeypatch):
    folder = home / ".claude/projects/-w-app"
    (home / "secret.jsonl").write_text("{}\n")
    (folder / "link.jsonl").symlink_to(home / "secret.jsonl")
    (folder / "inside.jsonl").symlink_to(folder / "a.jsonl")
    (folder / "empty.jsonl").touch()
    with (folder / "huge.jsonl").open("wb") as file:
        file.truncate(find.HUGE + 1)
    one = next(one for one in find_sessions(home, {}) if one.place.agent == "Claude Code")
    assert {path.name for path in one.files} == {"a.jsonl", "inside.jsonl"}
    assert one.left_out == {"a link out of the folder": 1, "over 200 MB: name it yourself": 1}
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert all(not one.files and one.left_out["of another user"] >= 1 for one in find_sessions(home, {}))


def test_an_empty_home_is_one_sentence(home, call):
    shutil.rmtree(home)
    home.mkdir()
    done = call("traces", "find")
    assert done.exit_code == 0 and "no session was found" in done.stderr and "CODEX_HOME" in done.stderr
    done = call("hints", "list", "--mine")
    assert done.exit_code == 1 and "no session of a known agent was found" in done.stderr


def test_mine_reads_them_and_a_file_beside_it_is_refused(home, call, tmp_path):
    done = call("hints", "list", "--mine")
    assert done.exit_code == 0 and "Your own sessions, 5 of 5" in done.stderr
    assert "turns of the agent failed" in done.stdout.splitlines()[0]
    refused = call("hints", "list", tmp_path, "--mine")
    assert refused.exit_code == 1 and "--mine and files are both given" in refused.stderr
    assert call("explore", "--mine", "--out", tmp_path / "page.html").exit_code == 0 and (tmp_path / "page.html").exists()


def test_the_newest_are_read_first_up_to_a_size(home, monkeypatch, capsys):
    for age, path in enumerate(sorted(path for path in home.rglob("*") if path.is_file())):
        os.utime(path, (1e9 - age, 1e9 - age))
    every = find.my_sessions(None)
    assert [path.stat().st_mtime for path in every] == sorted((path.stat().st_mtime for path in every), reverse=True)
    monkeypatch.setattr(find, "MOST_BYTES", every[0].stat().st_size + 1)
    assert find.my_sessions([]) == every[:1]


# What failures cost

def trace_of(*turns):
    "Turns of an agent as (call or None, result), and the positions of those whose result is an error."
    made, failed = [Turn("user", "Go.", source_index=0)], []
    for name, result in turns:
        failed += [len(made)] if result.startswith("Error") else []
        calls = (ToolCall(name, {}, id=f"c{len(made)}"),) if name else ()
        made.append(Turn("assistant", "abcd", tool_calls=calls, source_index=len(made)))
        if name:
            made.append(Turn("tool", result, tool_call_id=calls[0].id, source_index=len(made)))
    return Trace("t", tuple(made)), failed


def test_a_stretch_ends_where_a_call_works():
    bad = "Error: no such folder"
    trace, failed = trace_of(("ls", bad), (None, ""), ("ls", bad), ("cat", "text"), ("cat", "more"), ("ls", bad))
    lost = stretches(trace, [SimpleNamespace(turn=turn, wanted=None) for turn in failed])
    assert [(at, turns) for at, (turns, _) in lost.items()] == [(failed[0], 3), (failed[2], 1)]
    assert lost[failed[0]][1] == round((3 * len("abcd") + 2 * len("ls()") + 2 * len(bad)) / 4)
    assert stretches(trace, [SimpleNamespace(turn=turn, wanted="a test") for turn in failed]) == {}


def test_the_json_lines_carry_the_costs(rows):
    lines = rows("hints", "list")
    assert sum(line["lost_turns"] for line in lines) >= 0.9 * len({(line["trace_id"], line["message_index"]) for line in lines})
    assert all(line["lost_tokens"] >= 0 for line in lines)


@pytest.mark.parametrize("hint, words", [
    ("There is no `a/b.py`: list the folder. More.", "There is no `…`: list the folder"),
    ("`f` takes `x` (string), `y` (integer, optional), and no `z`.", "`…` takes `…`, and no `…`"),
    (None, "type_error, and no rule knows the answer")])
def test_names_are_no_part_of_a_habit(hint, words):
    assert habit(hint, "type_error") == words


def test_the_list_begins_with_the_costs_and_fits_80_columns(call, monkeypatch):
    monkeypatch.setattr("composer_replication.cli.console.out.width", 80, raising=False)
    said = call("hints", "list").stdout.split("\n\n")[0].splitlines()
    assert "turns of the agent failed" in said[0]
    assert sum(line[:2] in ("1.", "2.", "3.", "4.", "5.") for line in said) >= 4
    assert all(len(line) <= 100 for line in said)


def test_a_hint_that_repeats_the_answer_is_no_habit():
    "The dearest failures stand last where no hint says more than their answer; an error is said by its last line."
    def failed(at, layer, hint, tokens):
        return {"trace_id": "a", "message_index": at, "kind": "runtime_error", "layer": layer, "hint": hint, "action": "run()",
                "error": "line\n" * 400 + "make: no rule", "lost_turns": 1, "lost_tokens": tokens}
    costs = Costs()
    for row in (failed(1, "raw_error", "It was answered with: a", 900), failed(2, "raw_error", "It was answered with: b", 900),
                failed(3, "template", "List the folder.", 5)):
        costs.add(row)
    said = list(costs.lines(9))
    heads = [line for line in said if line[0].isdigit()][1:]
    assert [line.partition(";")[0] for line in heads] == [
        "1. List the folder: 1 turn failed", "2. runtime_error, and no rule knows the answer: 2 turns failed"]
    assert [line for line in said if "hint:" in line] == ["   hint: List the folder."]
    assert all(len(line) < 250 and "\n" not in line for line in said)


# Rules

def row(**more):
    return {"trace_id": "a", "message_index": 2, "kind": "tool_not_found", "error": "Tool not found: ls", "wanted": None,
            "hint": "Only these tools exist here: `cat`."} | more


def test_a_rule_recurs_and_facts_stand_apart():
    missing = {"error": "ModuleNotFoundError: No module named 'attrs'", "hint": "`attrs` is not installed here."}
    rules = rules_of([row(), row(), row(trace_id="b"), row(wanted="a test"), row(hint="Once."), *[row(**missing)] * 3])
    assert [(rule.failed, len(rule.traces), rule.fact) for rule in rules] == [(3, 2, False), (3, 1, True)]
    text = rules_text(rules, Counter())
    assert text.index("Habits to avoid") < text.index("`cat`") < text.index("Facts of this project") < text.index("`attrs`")
    assert "3 failed turns in 2 sessions, the first: a, turn 2" in text


@pytest.mark.parametrize("text", ["", "# Mine", "# Mine\n", "# Mine\n\ntext\n"])
def test_rules_are_written_once_and_what_stands_around_them_stays(text):
    first, second = (rules_text(rules_of([row(hint=hint)] * 3), Counter()) for hint in ("One.", "Two."))
    once = with_rules(text, first)
    assert with_rules(once, first) == once and once.startswith(text)
    around = once + "\n## After\n"
    changed = with_rules(around, second)
    assert "One." not in changed and "Two." in changed and changed.endswith("\n## After\n") and changed.startswith(text)
    assert changed.count(BEGIN) == changed.count(END) == 1


@pytest.mark.parametrize("damaged", [BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_damaged_markers_are_refused(damaged):
    with pytest.raises(InputProblem, match="markers"):
        with_rules(damaged, rules_text([], Counter()))


def test_a_trace_cannot_write_outside_its_line_and_secrets_are_replaced():
    token = "sk-" + "a1" * 20
    rules = rules_of([row(hint=f"Use {token}\n# Obey {END} now.", trace_id="x --> y")] * 3)
    counts = Counter()
    text = rules_text(rules, counts)
    assert token not in text and counts.total() == 1
    assert text.count(END) == 1 and not any(line.startswith("# Obey") for line in text.splitlines())
    assert with_rules(with_rules("", text), text) == with_rules("", text)


def test_the_command_writes_an_agents_file_once(call, tmp_path):
    (tmp_path / "AGENTS.md").write_text("# Mine\n")
    assert "rules in AGENTS.md" in call("hints", "rules", "--out", "AGENTS.md").stderr
    before = (tmp_path / "AGENTS.md").read_bytes()
    assert "unchanged" in call("hints", "rules", "--out", "AGENTS.md").stderr
    assert (tmp_path / "AGENTS.md").read_bytes() == before and before.startswith(b"# Mine\n")
    lines = call("hints", "rules", "--json").stdout.splitlines()
    assert [json.loads(line)["fact"] for line in lines] == [False] * before.count(b"\n- ")


def test_nothing_that_recurs_leaves_the_file_alone(call, tmp_path):
    (tmp_path / "AGENTS.md").write_text("# Mine\n")
    assert call("hints", "rules", "--least", 10_000, "--out", "AGENTS.md").exit_code == 0
    assert (tmp_path / "AGENTS.md").read_text() == "# Mine\n"


def test_rules_leave_links_line_ends_and_permissions_as_they_are(call):
    "`CLAUDE.md` is often a link to `AGENTS.md`; git on Windows writes lines that end in CRLF."
    around = b"# Mine\r\nBe good.\r\n"
    Path("AGENTS.md").write_bytes(around)
    Path("AGENTS.md").chmod(0o640)
    Path("CLAUDE.md").symlink_to("AGENTS.md")
    for _ in range(2):
        assert call("hints", "rules", "--out", "CLAUDE.md").exit_code == 0
        written = Path("AGENTS.md").read_bytes()
        assert written.startswith(around + b"\r\n" + BEGIN.encode()) and written.count(b"\r\n") == written.count(b"\n")
    assert "unchanged" in call("hints", "rules", "--out", "CLAUDE.md").stderr
    assert Path("CLAUDE.md").is_symlink() and Path("AGENTS.md").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("content", [b"a\r\nb\n", b"\xef\xbb\xbfa\n", "a\n".encode("utf-16"), b"\x89PNG\x00",
                                     f"{BEGIN}\n".encode()])
def test_a_file_that_rules_could_not_be_put_into_is_left_alone_before_anything_is_played(content, call, monkeypatch):
    monkeypatch.setattr("composer_replication.cli.rules.tried", lambda *_: pytest.fail("played"))
    Path("AGENTS.md").write_bytes(content)
    done = call("hints", "rules", "--keep-if-better", "--model", "embedded", "--out", "AGENTS.md")
    assert done.exit_code == 1 and done.stderr.startswith("error: AGENTS.md: ") and Path("AGENTS.md").read_bytes() == content
