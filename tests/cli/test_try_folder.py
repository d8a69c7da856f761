"A folder of one's own: recorded shell commands carried out again in a copy, in a sandbox, or refused."
import json
from collections import Counter
from pathlib import Path

import pytest
from bad_server import BadServer, Reply, completion
from envs_tasks import LARDER, needs_sandbox
from trajectories import trajectory

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.shell import ShellEnv, leaves_folder
from composer_replication.rollout.fork import checked_forks, find_forks

STEPS = [("cd /testbed && ls", 0, "a.py\ntest_a.py\n"), ("echo 'y = 2' >> /testbed/a.py", 0, ""),
         ("cat a.py", 0, "x = 1\ny = 2\n"),
         ("python -c 'import a; print(a.z)'", 1, "Traceback (most recent call last):\n  File \"<string>\", line 1, in <module>\n"
          "AttributeError: module 'a' has no attribute 'z'\n"), ("cat b.py", 1, "cat: b.py: No such file or directory\n")]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a.py").write_text("x = 1\n")
    (tmp_path / "project/test_a.py").write_text("")
    return tmp_path / "project"


def written(path, steps):
    path.write_text(json.dumps(trajectory(steps)))
    return path


@needs_sandbox
def test_a_recorded_trajectory_is_played_on_in_a_copy_of_its_folder(rows, folder, tmp_path):
    def reply(request):
        last = request.body["messages"][-1]["content"]
        command = "cat a.py" if "No such file" not in last and len(last) > 60 else "cat b.py"
        return Reply(body=completion(calls=[("bash", json.dumps({"command": command}))], finish="tool_calls"))

    with BadServer(reply) as server:
        row, = rows("hints", "try", written(tmp_path / "one.traj.json", STEPS), "--workspace", folder, "--root", "/testbed",
                    "--model", f"m@{server.url}", "--arms", "none,own", "--times", 1, "--hints", "raw_error")
        assert all("bash" in json.dumps(request.body["tools"]) for request in server.requests)
    assert row["failed_turns"] == 2 and row["branches"] == 4 and not row["left_out"]
    assert (folder / "a.py").read_text() == "x = 1\n"  # only copies were changed
    kept = [json.loads(line) for line in (tmp_path / "out/forks/branches.jsonl").read_text().splitlines()]
    answers = {line["trace"]["turns"][line["turn"] + 1]["content"] for line in kept}
    assert answers <= {"<returncode>0</returncode>\n<output>\nx = 1\ny = 2\n</output>",
                       "<returncode>1</returncode>\n<output>\ncat: b.py: No such file or directory\n</output>"}
    assert {line["works"] for line in kept if "<returncode>1" in line["trace"]["turns"][line["turn"] + 1]["content"]} == {False}


@needs_sandbox
@pytest.mark.parametrize("change, said", [
    ({0: ("cd /testbed && ls", 0, "a.py\nold.py\n")}, "'old.py' is recorded"),
    ({1: ("git push origin main", 0, "")}, "pushes, publishes or pays"),
    ({1: ("cat /testbed/gone.py", 0, "text\n")}, "turn 4")])
def test_what_cannot_be_brought_back_is_refused_with_its_first_difference(call, folder, tmp_path, change, said):
    steps = [change.get(i, step) for i, step in enumerate(STEPS)]
    done = call("hints", "try", written(tmp_path / "one.traj.json", steps), "--workspace", folder, "--root", "/testbed")
    assert done.exit_code == 1 and said in " ".join(done.output.split()) and "no failed turn can be played again" in done.output


# By mini-swe-agent 2.4.6 in a copy of larder at /srv/larder, behind a script.
RECORDED = Path(__file__).parents[1] / "fixtures/mini_swe_agent"


@needs_sandbox
def test_what_mini_swe_agent_recorded_on_larder_is_played_on_in_its_folder(rows, tmp_path):
    "Behind a listing with times and owners, a changed file, and its result; results are in JSON."
    asks = "import urllib.request; urllib.request.urlopen('http://1.1.1.1')"
    command = {"command": f'cat src/larder/labels.py; python3 -c "{asks}"'}
    answer = Reply(body=completion(calls=[("bash", json.dumps(command))], finish="tool_calls"))
    with BadServer(lambda request: answer) as server:
        row, = rows("hints", "try", RECORDED / "larder.traj.json", "--workspace", LARDER, "--root", "/srv/larder",
                    "--model", f"m@{server.url}", "--arms", "none,own", "--times", 1)
    assert row["failed_turns"] == 2 and row["branches"] == 4 and not row["left_out"]
    for line in (tmp_path / "out/forks/branches.jsonl").read_text().splitlines():
        branch = json.loads(line)
        answer = json.loads(branch["trace"]["turns"][branch["turn"] + 1]["content"])
        assert "def initials" in answer["output"] and "def shout" in answer["output"]  # the agent's change is there
        assert answer["returncode"] == 1 and "URLError" in answer["output"] and not branch["works"]
    assert "def shout" not in (LARDER / "src/larder/labels.py").read_text()


@needs_sandbox
def test_what_mini_swe_agent_read_from_a_network_is_refused(call):
    done = call("hints", "try", RECORDED / "network.traj.json", "--workspace", LARDER, "--root", "/srv/larder")
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "turn 4: the answer to 'bash' is another: line 2 is '1' where '0' is recorded" in said


def test_actions_in_text_are_counted_not_guessed(folder):
    turns = (Turn("user", "Mend it."), Turn("assistant", "```bash\ncat b.py\n```"),
             Turn("user", "<returncode>1</returncode>\n<output>\ncat: b.py: No such file\n</output>", observation=True),
             Turn("assistant", "", tool_calls=(ToolCall("bash", {"command": "cat b.py"}, "c"),)),
             Turn("tool", "<returncode>1</returncode>\n<output>\ncat: b.py: No such file\n</output>", tool_call_id="c",
                  observation=True))

    class Never(ShellEnv):
        def reset(self, **row):
            pass

        def state(self):
            return {}

    forks = find_forks([Trace("t", turns, format="mini-swe-agent")], lambda kind, context: "Look.", Counter())
    refused = {}
    assert [fork.site.turn for fork in checked_forks(forks, lambda: Never(folder), refused)] == [1]
    assert "answers no call" in refused["t/3"]


def test_a_workspace_runs_in_a_sandbox_alone(call, folder, tmp_path):
    trace = written(tmp_path / "one.traj.json", STEPS)
    for words, said in ((("--unsafe-local",), "in a sandbox alone"), (("--task", "toy"), "in a sandbox alone"),
                        (("--to", "end"), "nothing scores")):
        done = call("hints", "try", trace, "--workspace", folder, *words)
        assert done.exit_code == 1 and said in " ".join(done.output.split())


@pytest.mark.parametrize("command, leaves", [
    ("git -C /w push", True), ("git stash push", False), ("pip install x && twine upload dist/*", True),
    ("echo npm publishing", False),
    ("curl -d @x https://pay.example/charges", True), ("curl https://example.com/page", False),
    ("stripe charges create", True),
    ("grep -rn 'ssh' .", False), ("ls ~/.ssh", False), ("gh pr create -t x", True), ("python manage.py migrate", False)])
def test_commands_that_leave_the_folder(command, leaves):
    assert bool(leaves_folder(command)) is leaves
