"""The world of teams, asked from outside: which writes it takes, what it shows, and what its hints say."""
import re

import pytest

from composer_replication.core.environment import load
from composer_replication.core.trace import HintContext, ToolCall, Trace, Turn
from composer_replication.envs.toy.env import SYSTEM, make_world, world_rows
from composer_replication.envs.toy.functions import FIRST, SPLITS
from composer_replication.envs.toy.teams import TEAM_HINTS, TEAMS, TeamEnv, names_module, other_module, team_hints, team_of
from composer_replication.traces.error_sites import find_error_sites


def started(seed, split="train"):
    env = TeamEnv()
    env.reset(str(seed), split)
    return env


def write(env, team):
    tool = next(t for t in env.task.tools if t.role == "write")
    values = {tool.arguments["path"]: env.task.path, tool.arguments["text"]: env.task.function.code}
    return ToolCall(tool.name, values | ({"team": team} if team else {}), "c")


def accepted(env):
    "The teams in whose name the module can be written, found by trying all."
    return [team for team in range(-1, 9) if not env.call(write(env, team or None)).failed]


@pytest.mark.parametrize("split", SPLITS)
def test_one_team_can_write_a_module_and_earns_the_reward(split):
    for seed in range(8):
        env = started(seed, split)
        assert env.reward() == 0.0
        assert accepted(env) == [team_of(env.task.path)] and env.reward() == 1.0


def test_the_team_follows_from_the_first_word_in_every_split():
    seen = {}
    for split in SPLITS:
        for seed in range(60):
            env = started(seed, split)
            seen.setdefault(env.task.function.name.split("_")[0], set()).update(accepted(env))
    assert all(len(teams) == 1 for teams in seen.values()) and len(seen) == len(FIRST)
    assert {team for teams in seen.values() for team in teams} == set(TEAMS)


def test_nothing_but_a_hint_tells_the_team():
    "Two wrong teams are answered alike, and tasks of different teams are shown alike."
    env = started(1)
    wrong = [t for t in TEAMS if t != team_of(env.task.path)]
    assert len({(r.text, r.error_kind) for r in (env.call(write(env, t)) for t in wrong)}) == 1
    assert env.files == env.task.files  # a rejected write changes nothing
    plain = make_world("1", "train")
    assert (env.task.prompt, env.task.files) == (plain.prompt, plain.files)
    teams = [tool["function"]["parameters"]["properties"].get("team") for seed in range(20) for tool in started(seed).tools]
    assert {str(t) for t in teams if t} == {"{'type': 'integer'}"} and sum(t is not None for t in teams) == 20


def meta(env, call):
    trace = Trace("t", (Turn("system", SYSTEM), Turn("user", env.task.prompt), Turn("assistant", "", None, (call,)),
                        env.call(call).turn(call)), env.tools)
    site, = find_error_sites(trace)
    return site.kind, HintContext.at(trace, site)


def test_only_the_exact_hint_leads_to_the_team():
    for seed in range(30):
        env = started(seed, "test")
        right = team_of(env.task.path)
        given = meta(env, write(env, right % 6 + 1))
        says = {quality: team_hints(quality)(*given) for quality in TEAM_HINTS}
        told = {quality: re.findall(r'"(.+)", "team": (\d)\.', text) for quality, text in says.items()}
        assert told["exact"] == [(env.task.path, str(right))] and told["wrong"][0][1] != str(right)
        path, team = told["other"][0]
        assert path == other_module(env.task.path) != env.task.path and team_of(path) == int(team)
        assert told["filler"] == told["empty"] == told["shuffled"] == told["blind"] == told["raw"] == []
        assert told["own"] == told["exact"] and says["own"].startswith("The attempt was")
        assert env.task.path in says["blind"] and not re.search(r"\d", says["blind"].replace(env.task.path, ""))
        words = says["exact"].split()
        mixed = says["shuffled"].split()
        assert sorted(mixed) == sorted(words) and not set(zip(mixed, mixed[1:])) & set(zip(words, words[1:]))


def test_of_another_module_than_the_prompts_no_hint_tells_the_team():
    "The environment asks for the team of its task whatever path is written."
    for seed in range(10):
        env = started(seed, "test")
        tool, right = next(t for t in env.task.tools if t.role == "write"), team_of(env.task.path)
        path = next(p for n in range(99) if team_of(p := other_module(f"core/{n}_a.py")) != right)
        call = ToolCall(tool.name, {tool.arguments["path"]: path, "team": team_of(path), tool.arguments["text"]: "x"}, "c")
        kind, context = meta(env, call)
        assert kind == "runtime_error"
        assert not names_module(context.trace, 2, path) and names_module(context.trace, 2, env.task.path)
        assert not any('"team":' in team_hints(quality)(kind, context) for quality in ("exact", "wrong", "shuffled"))


def test_errors_of_other_kinds_have_the_toy_worlds_hints():
    env = started(3)
    kind, context = meta(env, ToolCall("no_such_tool", {}, "c"))
    assert kind == "tool_not_found" and "team" not in team_hints("exact")(kind, context)
    kind, context = meta(env, write(env, None))
    assert kind == "type_error" and "`team`" in team_hints("exact")(kind, context)


def test_a_recipe_finds_the_world_by_its_name():
    env = load("composer_replication.envs.toy.teams:TeamEnv")
    env.reset(**world_rows(1, 0)[0])
    assert isinstance(env, TeamEnv)
