"Forks: the state of a failed turn comes back exactly, in every world of ours, or the fork is refused with the first difference."
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from envs_tasks import delete, larder, needs_sandbox
from rollouts import scripted

from composer_replication.core.hint import Hint
from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import Trace, Turn
from composer_replication.envs.deletion.env import FeatureDeletionEnv, deletion_rows
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.rollout.fork import (
    ForkBranch,
    checked_forks,
    find_forks,
    first_difference,
    fork_branches,
    play_forks,
    settled,
    state_digest,
)
from composer_replication.rollout.fork_result import ForkResult, fork_pairs
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.types import Ending, RolloutConfig

GREEDY = RolloutConfig(max_turns=5, max_turn_tokens=64, temperature=0, seed=3)


def source(kind, context):
    return "Look at the list of tools."


class Watched:
    "An environment that keeps the digest of its state before every call."

    def __init__(self, environment, digests):
        self.environment, self.digests = environment, digests

    def __getattr__(self, name):
        return getattr(self.environment, name)

    @property
    def tools(self):
        return self.environment.tools

    def reset(self, **row):
        self.seen = self.digests.setdefault(row["task_id"], [])
        return self.environment.reset(**row)

    def call(self, call):
        self.seen.append(state_digest(self.environment))
        return self.environment.call(call)

    def reward(self, answer=""):
        return None

    def close(self):
        self.environment.close()


@pytest.fixture(scope="module")
def policy():
    return TransformersPolicy(embedded_model("strong"), embedded_tokenizer())


def replayed(policy, factory, rows):
    "Record greedily, fork at every failed turn without a hint, and compare turn and state."
    digests = {}
    recorded = collect(policy, lambda: Watched(factory(), digests), rows, GREEDY)
    traces = {r.trace.trace_id: r.trace for r in recorded}
    forks, refused = find_forks(traces.values(), source, Counter()), {}
    assert forks
    kept = checked_forks(forks, factory, refused)
    assert (len(kept), refused) == (len(forks), {})
    for fork in kept:
        calls = sum(len(turn.tool_calls) for turn in fork.trace.turns[:fork.site.turn])
        assert fork.state is not None and fork.state == digests[fork.task][calls]
    played = play_forks(policy, fork_branches(kept, arms=["none"]), factory, replace(GREEDY, max_turns=1), scored=False)
    for one in played:
        turn = one.fork.trace.turns[one.fork.site.turn]
        again = one.rollout.trace.turns[one.fork.site.turn]
        assert (again.token_ids, again.tool_calls) == (turn.token_ids, turn.tool_calls)
        assert one.rollout.trace.sampled_turns == (one.fork.site.turn,) and one.rollout.ending is Ending.TURNS
    return kept, played


def test_the_recorded_turn_comes_again_in_the_toy_world(policy):
    kept, played = replayed(policy, WorldEnv, world_rows(8, "forks", "test"))
    assert any(fork.site.turn > 4 for fork in kept)  # some lie behind several calls


def test_the_recorded_turn_comes_again_in_sql(policy):
    replayed(policy, SqlEnv, sql_rows(3, "forks", "test", ("easy",)))


@needs_sandbox
def test_the_recorded_turn_comes_again_in_a_repository(policy):
    task = delete(larder(), "initials")
    replayed(policy, lambda: FeatureDeletionEnv([task]), deletion_rows([task]))


CHANGES = {  # of each world: a call that changes its state
    "toy": lambda env: {"name": next(t.name for t in env.task.tools if t.role == "write"),
                        "arguments": dict(zip([a for t in env.task.tools if t.role == "write" for a in t.arguments.values()],
                                              (env.task.path, "x = 1")))},
    "sql": lambda env: {"name": "query", "arguments": {"sql": "SELECT 1"}},
    "deletion": lambda env: {"name": "write_file", "arguments": {"path": "src/larder/new.py", "text": "x = 1"}}}


@pytest.mark.parametrize("world", ["toy", "sql", pytest.param("deletion", marks=needs_sandbox)])
def test_what_an_agent_changed_before_its_failure_is_changed_again(world):
    task = delete(larder(), "initials") if world == "deletion" else None
    factory = {"toy": WorldEnv, "sql": SqlEnv, "deletion": lambda: FeatureDeletionEnv([task])}[world]
    rows = deletion_rows([task]) if task else world_rows(1, "forks")
    rows = sql_rows(1, "forks", "test", ("easy",)) if world == "sql" else rows
    environment = factory()
    environment.reset(**rows[0])
    fresh = state_digest(environment)
    lines = ["<|call|>" + json.dumps(CHANGES[world](environment)), '<|call|>{"name": "nothing_of_this_name", "arguments": {}}']
    environment.close()
    kept = replayed(scripted(lambda text: lines[min(text.count("<|assistant|>"), 2) - 1]), factory, rows)[0]
    assert kept[0].state != fresh  # and it was the recorded one


@pytest.fixture(scope="module")
def fork(policy):
    recorded = collect(policy, WorldEnv, world_rows(8, "forks", "test"), GREEDY)
    return max(find_forks([r.trace for r in recorded], source, Counter()), key=lambda fork: fork.site.turn)


def refusal(fork, factory=WorldEnv):
    refused = {}
    assert not checked_forks([fork], factory, refused)
    return refused[fork.name]


def test_another_answer_or_another_tool_refuses_the_fork(fork):
    told = max(i for i, t in enumerate(fork.trace.turns[:fork.site.turn]) if t.role == "tool")
    turns = list(fork.trace.turns)
    turns[told] = replace(turns[told], content="something else")
    said = refusal(replace(fork, trace=replace(fork.trace, turns=tuple(turns))))
    assert "'something else' is recorded" in said and f"turn {told - 1}" in said
    del turns[told]
    gap = replace(fork, trace=replace(fork.trace, turns=tuple(turns)), site=replace(fork.site, turn=fork.site.turn - 1))
    assert "no recorded answer" in refusal(gap)
    spoken = [replace(t, tool_calls=()) if t.role == "assistant" else t for t in fork.trace.turns]
    assert "answers no call that can be read" in refusal(replace(fork, trace=replace(fork.trace, turns=tuple(spoken))))
    fewer = replace(fork.trace, tools=fork.trace.tools[1:])
    assert "offers other tools" in refusal(replace(fork, trace=fewer))
    assert "split 'nowhere' is unknown" in refusal(replace(fork, row={"task_id": "nowhere-0"}))


def test_every_environment_that_was_made_is_closed(fork):
    "Also where no reset succeeds."
    made = []

    class Refuses:
        tools = ()

        def __init__(self):
            made.append(self)

        def reset(self, **row):
            raise KeyError("no such task")

        def close(self):
            made.remove(self)

    refused = {}
    assert checked_forks([fork, replace(fork, trace=replace(fork.trace, trace_id="other"))], Refuses, refused) == []
    assert len(refused) == 2 and made == []


def test_a_state_that_is_another_the_second_time_ends_the_branch(fork, policy):
    class Drifts(WorldEnv):
        made = 0

        def reset(self, **row):
            super().reset(**row)
            type(self).made += 1
            self.files["drift"] = str(self.made)

        def act(self, role, arguments):
            shown = {k: v for k, v in self.files.items() if k != "drift"}
            kept, self.files = self.files, shown
            try:
                return super().act(role, arguments)
            finally:
                self.files = kept | shown

    kept = checked_forks([fork], Drifts, {})
    branch, = play_forks(policy, fork_branches(kept[:1], arms=["none"]), Drifts, GREEDY)
    assert branch.rollout.ending is Ending.ERROR and "the state is another" in branch.rollout.problem


def test_arms_share_random_numbers_and_repetitions_do_not(fork, policy):
    kept = checked_forks([fork], WorldEnv, {})
    config = RolloutConfig(max_turns=2, max_turn_tokens=64, seed=1)
    branches = [ForkBranch(kept[0], arm, None, time) for time in range(6) for arm in ("none", "again")]
    played = play_forks(policy, branches, WorldEnv, config)
    turns = [tuple(t.token_ids for t in one.rollout.trace.turns if t.token_ids and t.role == "assistant") for one in played]
    assert turns[::2] == turns[1::2] and len(set(turns[::2])) > 1
    apart = play_forks(policy, branches, WorldEnv, config, shared=False)
    own = [tuple(t.token_ids for t in one.rollout.trace.turns if t.token_ids and t.role == "assistant") for one in apart]
    assert own[::2] != own[1::2]


def test_the_agents_own_episode_is_no_part_of_what_a_branch_sampled(fork, policy):
    kept = checked_forks([fork], WorldEnv, {})
    branch, = play_forks(policy, [ForkBranch(kept[0], "own", "Do it.", 0)], WorldEnv, GREEDY)
    trace = branch.rollout.trace
    assert min(trace.sampled_turns) == fork.site.turn
    assert branch.rollout.sampled == sum(len(trace.turns[i].token_ids) for i in trace.sampled_turns)
    calls = [c.id for t in trace.turns for c in t.tool_calls]
    assert len(set(calls)) == len(calls)  # numbered on from the recorded ones


def test_a_hook_without_a_hint_gives_no_fork(fork):
    left_out = Counter()
    assert not find_forks([fork.trace], lambda kind, context: None, left_out)
    assert left_out["no layer had a hint"]
    assert isinstance(fork.hint, Hint) and ToolResult("x").flagged


@pytest.mark.parametrize("a, b, equal", [
    ("<object at 0x7f00deadbeef>", "<object at 0x55aa12345678>", True), ("ran 3 tests in 0.001s", "ran 3 tests in 4.2s", True),
    ("ran 3 tests in 1s", "ran 4 tests in 1s", False), ("/tmp/tmpab12/x.py: no", "/tmp/tmpzz99/x.py: no", True),
    ("/repo/a.py: no", "/repo/b.py: no", False), ("total 12", "total 16", True), ("a\n", "a", True),
    ("drwxr-xr-x 2 root root 4096 May  6 2025 src", "drwxr-xr-x  9 me  me 180 Nov 29 13:40 src", True),
    ('{"out": "total 1\\ndrwxr-xr-x 2 a a 9 May  6 2025 x"}', '{"out":"total 2\\ndrwxr-xr-x 3 b b 8 May  7 2025 x"}', True),
    ('{"out": "a", "rc": 0}', '{"out": "a", "rc": 1}', False), ('{"out": "a', '{"out": "b', False), ("{\udc80", "{\udc80", True),
    ("drwxr-xr-x 2 root root 4096 May  6 2025 src", "drwxrwxr-x 2 root root 4096 May  6 2025 src", False)])
def test_only_what_differs_from_run_to_run_may_differ(a, b, equal):
    assert (first_difference(a, b) is None) is equal and settled(settled(a)) == settled(a)


def test_coupled_draws_keep_the_law_and_agree_more_often():
    numbers = torch.rand(20_000, generator=torch.Generator().manual_seed(1))
    first = torch.randn(50, generator=torch.Generator().manual_seed(2))
    second = first + torch.tensor([3.0] + [0.0] * 49)
    agree = {}
    for coupled in (False, True):
        sampling = Sampling(temperature=0.7, top_k=20, coupled=coupled)
        (a, logprobs), (b, _) = (sampling.draw(x.expand(20_000, 50), numbers) for x in (first, second))
        law, other = (sampling.warpers(None, (x / 0.7)[None]).softmax(-1)[0] for x in (first, second))
        assert (torch.bincount(a, minlength=50) / 20_000 - law).abs().max() < 0.012
        assert torch.allclose(logprobs, (first / 0.7).log_softmax(-1)[a])
        agree[coupled] = (a == b).float().mean().item()
    assert agree[False] < agree[True] <= 1 - (law - other).abs().sum().item() / 2 + 0.02


@pytest.mark.parametrize("others, source, student", [([], "fork:recorded", "recorded"), (["tried"], "fork:played", "tried")])
def test_a_pair_of_a_fork_names_an_action_that_the_student_took(others, source, student):
    def trace(action):
        return Trace("t", (Turn("user", "Go."), Turn("assistant", action)))

    def result(action):
        end = dict(time=0, ending="done", reward=None, works=action == "worked", again=False, turns=1, trace=trace(action))
        return ForkResult("", "t", 1, "task", "tool_error", layer=None, own="", arm="none", hint=None, **end)

    [pair] = fork_pairs(map(result, ["worked", *others]), [trace("recorded")])
    assert (pair.source, pair.student.content, pair.chosen.content) == (source, student, "worked")
