"The toy world: solvable, strict, never an executor of what the policy wrote; its convention of teams; its shipped traces."
import gzip
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.core.environment import load
from composer_replication.core.trace import HintContext, ToolCall, Trace, Turn
from composer_replication.envs.toy.env import SPLITS, SYSTEM, WorldEnv, make_world, world_rows
from composer_replication.envs.toy.functions import FIRST
from composer_replication.envs.toy.teams import TEAM_HINTS, TEAMS, TeamEnv, names_module, other_module, team_hints, team_of
from composer_replication.envs.toy.traces import toy_path, toy_traces
from composer_replication.rollout.tool_call_parser import named_call
from composer_replication.traces.error_sites import find_error_sites

sys.path.append(str(Path(__file__).parents[2] / "spikes" / "120-lab-bases"))
from scripted import WorldAgent, plan_steps, record_traces, world_episode, write_call


def started(seed, split="train", kind=WorldEnv):
    env = kind()
    env.reset(str(seed), split)
    return env


def solve(env):
    "Follow the plan."
    plan, result, tools = plan_steps(env.task, env.task.function.code), None, {t.role: t for t in env.task.tools}
    while (step := plan.send(result)).role != "answer":
        result = env.call(ToolCall.parse(*write_call(step, tools[step.role])))
        assert not result.failed


@pytest.mark.parametrize("split", SPLITS)
def test_the_plan_earns_the_reward_and_rows_rebuild_the_task(split):
    env = WorldEnv()
    for row in json.loads(json.dumps(world_rows(15, "plan", split))):
        env.reset(**row)
        assert env.task == make_world(row["seed"], split) and env.tools == tuple(t.schema for t in env.task.tools)
        assert (env.task.task_id, env.task.prompt) == (row["task_id"], row["prompt"][-1]["content"])
        assert env.reward() == 0.0
        solve(env)
        assert env.reward() == 1.0
        env.reset(**row)
        assert env.reward() == 0.0 and env.files == env.task.files  # nothing of the attempt before is left


def test_an_environment_without_a_task_says_so():
    for ask in (WorldEnv().reward, lambda: WorldEnv().call(ToolCall("ls", {}))):
        with pytest.raises(ValueError, match="call reset"):
            ask()


@pytest.mark.parametrize("role, path", [
    *product(("read", "list", "write"), ("../secret.txt", "/etc/passwd", "core/../../secret.txt", "..")),
    *product(("read", "write"), ("tests",))])  # a folder is no file
def test_paths_outside_do_not_exist(path, role):
    env = started(0)
    tool = next(t for t in env.task.tools if t.role == role)
    arguments = {"path": path} | ({"text": "x"} if role == "write" else {})
    result = env.call(ToolCall(tool.name, {tool.arguments[k]: v for k, v in arguments.items()}))
    assert result.error_kind == "runtime_error" and "No such file" in result.text and env.files == env.task.files


def test_nothing_that_the_policy_wrote_is_executed(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **named: pytest.fail("a process was started"))
    env, mark = started(0), tmp_path / "written"
    for text in (f"open({str(mark)!r}, 'w')\n", f"import os\nos.system('touch {mark}')\n", "while True:\n    pass\n",
                 "9" * 10_000, "\ud800", "\0", "(" * 100_000):
        env.files[env.task.path] = text
        assert env.reward() == 0.0 and not mark.exists()


@settings(max_examples=150, deadline=None, database=None)
@given(st.sampled_from(("read", "list", "write")),
       st.lists(st.text(alphabet=st.characters(codec=None), max_size=8), min_size=2, max_size=2), st.booleans())
def test_whatever_is_written_is_answered(role, texts, broken):
    env = started(0)
    tool = next(t for t in env.task.tools if t.role == role)
    values = dict(zip(("path", "text") if role == "write" else ("path",), texts))
    arguments = json.dumps({tool.arguments[k]: v for k, v in values.items()})
    result = env.call(named_call(tool.name, arguments[:-1] if broken else arguments))
    result.text.encode()  # text that a tokenizer can take
    assert result.failed or not broken
    assert env.reward() == 0.0


def test_what_json_cannot_bear_is_answered_too():
    env = started(0)
    name = next(t.name for t in env.task.tools if t.role == "read")
    for arguments in ("[" * 100_000, '{"lines": ' + "9" * 10_000 + "}", '{"path": "\\u0000"}', '{"path": "' + "x" * 5000 + '"}'):
        assert env.call(named_call(name, arguments)).failed
    result = env.call(ToolCall("\ud800", {}))
    assert result.error_kind == "tool_not_found" and result.text.encode() == "Tool not found: \ufffd".encode()


def test_agents_have_the_defects_that_they_were_given():
    tasks = [make_world(f"defects-{i}", "train") for i in range(60)]

    def reasons(agent):
        return {t.fail_reason for task in tasks for t in world_episode(task, agent, 0).turns if t.failed}
    assert reasons(WorldAgent.of()) == set()
    slips = {"name": "tool_not_found", "arguments": "type_error", "json": "json_decode", "world": "runtime_error"}
    for slip, reason in slips.items():
        assert reasons(WorldAgent.of(**{slip: 0.5})) == {reason}


def test_splits_share_no_name_and_no_mix_of_dialects():
    def parts(split):
        tasks = [make_world(str(seed), split) for seed in range(80)]
        return {t.function.name for t in tasks}, {frozenset((x.role, x.dialect) for x in t.tools) for t in tasks}
    for sets in zip(*map(parts, SPLITS)):
        assert all(sets) and not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]


def test_the_world_and_the_statistics_need_no_torch():
    light = "composer_replication.envs.toy.env, composer_replication.envs.toy.traces, composer_replication.experiments.statistics"
    code = f"import {light}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


# ---- teams


def write(env, team):
    tool = next(t for t in env.task.tools if t.role == "write")
    values = {tool.arguments["path"]: env.task.path, tool.arguments["text"]: env.task.function.code}
    return ToolCall(tool.name, values | ({"team": team} if team else {}), "c")


def accepted(env):
    "The teams in whose name the module can be written, found by trying all."
    return [team for team in range(-1, 9) if not env.call(write(env, team or None)).failed]


def test_one_team_can_write_a_module_and_its_first_word_names_it_in_every_split():
    seen = {}
    for split in SPLITS:
        for seed in range(60):
            env = started(seed, split, TeamEnv)
            assert env.reward() == 0.0
            assert accepted(env) == [team_of(env.task.path)] and env.reward() == 1.0
            assert seen.setdefault(env.task.function.name.split("_")[0], env.team) == env.team
    assert len(seen) == len(FIRST) and set(seen.values()) == set(TEAMS)


def test_nothing_but_a_hint_tells_the_team():
    "Two wrong teams are answered alike, and tasks of different teams are shown alike."
    env = started(1, kind=TeamEnv)
    wrong = [t for t in TEAMS if t != team_of(env.task.path)]
    assert len({(r.text, r.error_kind) for r in (env.call(write(env, t)) for t in wrong)}) == 1
    assert env.files == env.task.files  # a rejected write changes nothing
    plain = make_world("1", "train")
    assert (env.task.prompt, env.task.files) == (plain.prompt, plain.files)
    tools = [tool for seed in range(20) for tool in started(seed, kind=TeamEnv).tools]
    teams = [tool["function"]["parameters"]["properties"].get("team") for tool in tools]
    assert {str(t) for t in teams if t} == {"{'type': 'integer'}"} and sum(t is not None for t in teams) == 20


def meta(env, call):
    trace = Trace("t", (Turn("system", SYSTEM), Turn("user", env.task.prompt), Turn("assistant", "", None, (call,)),
                        env.call(call).turn(call)), env.tools)
    site, = find_error_sites(trace)
    return site.kind, HintContext.at(trace, site)


def test_only_the_exact_hint_leads_to_the_team():
    for seed in range(30):
        env = started(seed, "test", TeamEnv)
        right = team_of(env.task.path)
        given = meta(env, write(env, right % 6 + 1))
        says = {quality: team_hints(quality)(*given) for quality in TEAM_HINTS}
        named = {quality: re.findall(r'"(.+)", "team": (\d)\.', text) for quality, text in says.items()}
        assert named["exact"] == [(env.task.path, str(right))] and named["wrong"][0][1] != str(right)
        path, team = named["other"][0]
        assert path == other_module(env.task.path) != env.task.path and team_of(path) == int(team)
        assert named["filler"] == named["empty"] == named["shuffled"] == named["blind"] == named["raw"] == []
        assert named["own"] == named["exact"] and says["own"].startswith("The attempt was")
        assert env.task.path in says["blind"] and not re.search(r"\d", says["blind"].replace(env.task.path, ""))
        words, mixed = says["exact"].split(), says["shuffled"].split()
        assert sorted(mixed) == sorted(words) and not set(zip(mixed, mixed[1:])) & set(zip(words, words[1:]))


def test_of_another_module_than_the_prompts_no_hint_tells_the_team():
    "The environment asks for the team of its task whatever path is written."
    for seed in range(10):
        env = started(seed, "test", TeamEnv)
        tool, right = next(t for t in env.task.tools if t.role == "write"), team_of(env.task.path)
        path = next(p for n in range(99) if team_of(p := other_module(f"core/{n}_a.py")) != right)
        call = ToolCall(tool.name, {tool.arguments["path"]: path, "team": team_of(path), tool.arguments["text"]: "x"}, "c")
        kind, context = meta(env, call)
        assert kind == "runtime_error"
        assert not names_module(context.trace, 2, path) and names_module(context.trace, 2, env.task.path)
        assert not any('"team":' in team_hints(quality)(kind, context) for quality in ("exact", "wrong", "shuffled"))


def test_errors_of_other_kinds_have_the_toy_worlds_hints():
    env = started(3, kind=TeamEnv)
    kind, context = meta(env, ToolCall("no_such_tool", {}, "c"))
    assert kind == "tool_not_found" and "team" not in team_hints("exact")(kind, context)
    kind, context = meta(env, write(env, None))
    assert kind == "type_error" and "`team`" in team_hints("exact")(kind, context)
    assert isinstance(load("composer_replication.envs.toy.teams:TeamEnv"), TeamEnv)


# ---- the shipped traces


def test_recording_again_gives_the_shipped_file_wherever_it_runs(tmp_path):
    random.seed(3)
    before = random.getstate()
    assert not {t.task_id for t in record_traces(1)} & {t.task_id for t in toy_traces()}
    assert random.getstate() == before
    code = "import sys; from scripted import *; sys.stdout.buffer.write(traces_bytes(record_traces()))"
    spike = Path(__file__).parents[2] / "spikes" / "120-lab-bases"
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo",
                        "PYTHONPATH": f"{spike.parents[1]}:{spike}"}
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, check=True, timeout=120).stdout
    shipped = toy_path().read_bytes()
    assert out[4:8] == shipped[4:8] == b"\0\0\0\0" and len(shipped) < 200_000  # no time in the header
    text = gzip.decompress(shipped).decode()  # the lines are compared, not the stream: zlib builds compress differently
    assert gzip.decompress(out).decode() == text
    for word in (tempfile.gettempdir(), str(Path.home()), os.uname().nodename, sys.prefix, "Traceback", "/usr/"):
        assert word not in text, word
