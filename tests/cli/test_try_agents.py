"Recorded episodes of Claude Code, Codex and OpenHands in a folder: brought back in their own words, or refused."
import json
from collections import Counter

import pytest
from envs_tasks import needs_sandbox
from trajectories import claude_code, codex, openhands

import composer_replication.envs.agent_tools  # noqa: F401
from composer_replication.core.trace import ToolCall
from composer_replication.envs.shell import ShellEnv
from composer_replication.rollout.fork import carry_out, checked_forks, find_forks
from composer_replication.traces.read import read_traces

GONE = "cat: b.py: No such file or directory"
PATCH = "*** Begin Patch\n*** Update File: src/a.py\n@@\n x = 1\n+y = 2\n*** End Patch"


def head(code):
    return (f"Chunk ID: 4f{code}\nWall time: 0.0{code}1 seconds\nProcess exited with code {code}\n"
            "Original token count: 9\nOutput:\n")


EPISODES = {  # each enters a folder, changes a file, looks at it, and fails
    "claude-code": (claude_code, [
        ("Bash", {"command": "cd src && ls", "description": "List"}, "a.py", False),
        ("Edit", {"file_path": "/w/src/a.py", "old_string": "x = 1\n", "new_string": "x = 1\ny = 2\n"},
         "The file /w/src/a.py has been updated. Here's the result of running `cat -n` on a snippet:\n     1→x = 1", False),
        ("Read", {"file_path": "/w/src/a.py"},
         "     1→x = 1\n     2→y = 2\n\n<system-reminder>\nBe good.\n</system-reminder>", False),
        ("Write", {"file_path": "/w/new.py", "content": "z = 3\n"}, "File created successfully at: /w/new.py", False),
        ("Bash", {"command": "touch ../x"}, "(Bash completed with no output)", False),
        ("Bash", {"command": "cat b.py"}, f"Exit code 1\n{GONE}", True)], ("Bash", {"command": "cat a.py; cat b.py"})),
    "codex": (codex, [
        ("shell_command", {"command": "cd src && ls", "workdir": "/w"}, head(0) + "a.py\n", False),
        ("apply_patch", PATCH, head(0) + "Success. Updated the following files:\nM src/a.py\n", False),
        ("exec_command", {"cmd": "cat a.py", "workdir": "/w/src", "yield_time_ms": 9}, head(0) + "x = 1\ny = 2\n", False),
        ("shell", {"command": ["bash", "-lc", "cat b.py"], "workdir": "/w/src"}, head(1) + GONE + "\n", True)],
        ("exec_command", {"cmd": "cat src/a.py; cat b.py"})),
    "openhands": (openhands, [
        ("execute_bash", {"command": "cd src && ls"}, "a.py", 0),
        ("str_replace_editor", {"command": "view", "path": "/w"},
         "Here's the files and directories up to 2 levels deep in /w, excluding hidden items:\n/w/\n/w/src/\n/w/src/a.py", 0),
        ("think", {"thought": "Well."}, "Your thought has been logged.", 0),
        ("file_editor", {"command": "insert", "path": "/w/src/a.py", "insert_line": 1, "new_str": "y = 2"},
         "The file /w/src/a.py has been edited. Here's the result of running `cat -n` on a snippet", 0),
        ("str_replace_editor", {"command": "view", "path": "/w/src/a.py", "view_range": [2, 2]},
         "Here's the result of running `cat -n` on /w/src/a.py:\n     2\ty = 2\n", 0),
        ("terminal", {"command": "cat b.py"}, GONE, 1)], ("execute_bash", {"command": "cat a.py; cat b.py"}))}


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "w/src").mkdir(parents=True)
    (tmp_path / "w/src/a.py").write_text("x = 1\n")
    return lambda: ShellEnv(tmp_path / "w", "/w")


def brought(tmp_path, factory, lines):
    "Forks whose state came back, and why the others' did not."
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    forks, refused = find_forks(read_traces(path), lambda kind, context: "Look.", Counter(), lambda trace: {"trace": trace}), {}
    return forks, checked_forks(forks, factory, refused), refused


@needs_sandbox
@pytest.mark.parametrize("format", EPISODES)
def test_an_agents_state_comes_back_in_its_own_words(tmp_path, factory, format):
    make, steps, (name, arguments) = EPISODES[format]
    forks, kept, refused = brought(tmp_path, factory, make(steps))
    assert [fork.trace.format for fork in kept] == [format] and len(forks) == 1 and not refused
    env = factory()
    env.reset(**kept[0].row)
    carry_out(env, kept[0].trace, kept[0].site.turn)
    answer = env.call(ToolCall(name, arguments))
    env.close()
    assert "x = 1\ny = 2" in answer.text and GONE in answer.text and answer.failed
    assert (tmp_path / "w/src/a.py").read_text() == "x = 1\n"


@needs_sandbox
@pytest.mark.parametrize("format, step, said", [
    ("claude-code", ("Grep", {"pattern": "x"}, "src/a.py", False), "Unknown tool 'Grep'"),
    ("claude-code", ("Bash", {"command": "gh pr create -t x"}, "done", False), "pushes, publishes or pays"),
    ("claude-code", ("Read", {"file_path": "/etc/passwd"}, "root", False), "lies outside of /w"),
    ("codex", ("exec", "await tools.exec_command({})", "a.py", False), "Unknown tool 'exec'"),
    ("codex", ("apply_patch", PATCH.replace(" x = 1", " x = 7"), "Success.", False), "Failed to find expected lines"),
    ("openhands", ("browse", {"url": "http://x.y"}, "a page", 0), "Unknown tool 'browse'")])
def test_what_has_no_tool_here_is_refused_with_its_call(tmp_path, factory, format, step, said):
    make, steps, _ = EPISODES[format]
    _, kept, refused = brought(tmp_path, factory, make([step, *steps]))
    assert not kept and said in next(iter(refused.values()))


@needs_sandbox
def test_an_agent_that_is_not_known_is_refused(tmp_path, factory):
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": "cat b.py"})}}
    said = {"role": "tool", "tool_call_id": "c", "content": f"Error: {GONE}"}
    acts = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = {"messages": [{"role": "user", "content": "Mend it."}, acts, said, {"role": "assistant", "content": "Hm."}]}
    forks, kept, refused = brought(tmp_path, factory, [chat])
    assert len(forks) == 1 and not kept and "are not carried out in a folder" in next(iter(refused.values()))
