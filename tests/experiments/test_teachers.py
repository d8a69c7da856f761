"Embedded models as teachers: against transformers' own generation, against the student itself, and into the trainer's trees."
import random
from dataclasses import replace

import pytest
import torch

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.functions import FIRST
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.teams import TEAMS, TeamEnv, team_of
from composer_replication.experiments.teachers import TEAM_PAIRS, LocalTeacher, recorded_pairs, team_pairs
from composer_replication.losses.batch import ComposerDataCollator
from composer_replication.replay.teachers import TeacherCallResult, TraceState, asked_turns, replay_traces, trace_states
from composer_replication.replay.vote import extract_dpo_pairs
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.siblings import action_key

ROWS = world_rows(10, "test-teachers")


@pytest.fixture(scope="module")
def agent():
    return embedded_model(), embedded_tokenizer()


def play(agent, temperature):
    config = RolloutConfig(max_turns=5, max_turn_tokens=64, temperature=temperature)
    return [r.trace for r in collect(TransformersPolicy(*agent), WorldEnv, ROWS, config, 0)]


@pytest.fixture(scope="module")
def traces(agent):
    return play(agent, 1.0)


@pytest.fixture(scope="module")
def states(traces):
    return [s for t in traces for s in trace_states(t)]


# Oracles

def test_a_twin_agrees_with_a_greedy_student_everywhere(agent):
    "The student's loop keeps a cache over sampled ids; the twin reads text afresh. Both must come to the same actions."
    traces = play(agent, 0.0)
    twin = LocalTeacher(*agent, "twin", max_tokens=64)
    seen = 0
    for trace, told in zip(traces, replay_traces(traces, [twin])):
        for turn, [result] in zip(asked_turns(trace), told):
            own = trace.turns[turn]
            assert action_key(result.action) == action_key(own) and result.action.content == own.content
            assert result.completion_tokens == len(own.token_ids)
            seen += 1
    assert seen > 12


def test_answers_are_those_of_generate(agent, states):
    "transformers' own template and its own greedy generation, a state at a time."
    model, tokenizer = agent
    chosen = random.Random(0).sample(states, 12)
    for state, result in zip(chosen, LocalTeacher(model, tokenizer, "t", max_tokens=48).answer(chosen)):
        tools = list(state.tools)
        ids = tokenizer.apply_chat_template(state.messages, tools=tools, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)[0, len(ids):].tolist()
        assert (result.prompt_tokens, result.completion_tokens) == (len(ids), len(out))
        text = tokenizer.decode(out)
        assert all(c.name in text for c in result.action.tool_calls) and result.action.content in text
        assert ("limit of 48 tokens" in result.problem) == (out[-1] != tokenizer.eos_token_id)
        if not result.problem:
            again = tokenizer.apply_chat_template([*state.messages, result.action.to_message()], tools=tools, tokenize=False)
            assert again.endswith(text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_depends_on_its_state_alone(agent, states, temperature):
    def answers(asked):
        teacher = LocalTeacher(*agent, "t", temperature, max_tokens=32, seed=5)
        return {(s.trace_id, s.turn): r for s, r in zip(asked, teacher.answer(asked))}
    together, shuffled = answers(states), random.Random(1).sample(states, len(states))
    told = lambda r: replace(r, seconds=0.0)
    assert all(told(r) == told(together[k]) for k, r in answers(shuffled).items())
    assert all(told(r) == told(together[k]) for k, r in answers(shuffled[:3]).items())
    renamed = replace(states[3], trace_id="other")
    assert answers([renamed])["other", renamed.turn].action == together[states[3].trace_id, renamed.turn].action
    if temperature:
        other = LocalTeacher(*agent, "u", temperature, max_tokens=32, seed=5).answer(states)
        assert [r.action for r in other] != [together[s.trace_id, s.turn].action for s in states]


def test_a_model_whose_cache_cannot_be_forked_gives_the_same_answers(agent, states, monkeypatch):
    teacher = LocalTeacher(*agent, "t", max_tokens=24)
    forked = teacher.answer(states[:8])
    monkeypatch.setattr(agent[0], "_is_stateful", True, raising=False)  # as recurrent models are: every prompt is read whole
    assert [replace(r, seconds=0.0) for r in teacher.answer(states[:8])] == [replace(r, seconds=0.0) for r in forked]


# What does not count

def test_what_is_cut_off_or_unreadable_is_kept_and_does_not_vote(agent, states):
    for r in LocalTeacher(*agent, "t", max_tokens=1).answer(states[:4]):
        assert not r.votes and r.action is not None
        assert (r.problem, r.completion_tokens, r.cut) == ("The answer is cut off at the limit of 1 tokens.", 1, True)
    wild = LocalTeacher(*agent, "t", temperature=2.0, max_tokens=96).answer(states)
    broken = [r for r in wild if any(not c.parsed for c in r.action.tool_calls)]
    assert broken and not any(r.votes for r in broken) and all("Write one JSON object" in r.problem for r in broken)
    assert all(r.action.token_ids is None and r.action.logprobs is None for r in wild)


def test_a_state_that_has_no_tokens_is_told_in_its_result(agent, states):
    half = TraceState("half", (Turn("user", "half \ud800"),))
    first, bad, last = LocalTeacher(*agent, "t", max_tokens=8).answer([states[0], half, states[1]])
    assert bad.action is None and bad.problem and not bad.votes and first.action and last.action


def test_calls_are_numbered_on(agent, states):
    for state, result in zip(states, LocalTeacher(*agent, "t", max_tokens=48).answer(states)):
        made = sum(len(t.tool_calls) for t in state.turns)
        assert [c.id for c in result.action.tool_calls] == [f"call_{made + i}" for i in range(len(result.action.tool_calls))]


# Into the trainer

class Scripted:
    "Teachers that agree on one action everywhere; `says` may be another's name to be the one who does not."

    def __init__(self, name, action):
        self.name, self.action = name, action

    def answer(self, states):
        return [TeacherCallResult(self.name, self.action, prompt_tokens=3, completion_tokens=2) for _ in states]


GO, STOP = Turn("assistant", tool_calls=(ToolCall("go", {"to": "rest"}),)), Turn("assistant", "No more.")
PANEL = [Scripted("a", GO), Scripted("b", GO), Scripted("c", STOP)]


def pairs(agent, teachers, rows=ROWS, turns=4, **limits):
    limits = RolloutConfig(**{"max_turns": turns, "max_tokens": 1024, "max_turn_tokens": 96} | limits)
    return recorded_pairs(TransformersPolicy(*agent), teachers, rows, limits)


@pytest.fixture(scope="module")
def everything(agent):
    return pairs(agent, PANEL)


def test_pairs_become_branches_and_the_student_keeps_its_sampled_ids(agent, everything):
    examples, counts = everything
    assert counts.pairs == sum(len(e.pairs) for e in examples) > 8
    collate = ComposerDataCollator(agent[1])
    batch = collate(examples)
    assert len(collate.excluded) < counts.pairs / 2
    for example, tree in zip(examples, batch.trees):
        for branch in tree.branches:
            span = tree.span(branch.turn)
            if branch.kind == "rejected":
                assert branch.ids[branch.start:] == example.trace.turns[branch.turn].token_ids == tree.ids[span.start:span.end]
            else:
                assert '"go"' in agent[1].decode(branch.ids[branch.start:])


def test_counts_are_those_of_the_pairs_and_votes(agent):
    teachers = [LocalTeacher(*agent, f"t{i}", 0.8, 48 if i else 12) for i in range(3)]  # the first is cut off
    limits = {"max_tokens": 40, "max_turn_tokens": 20, "seed": 3}
    examples, counts = pairs(agent, teachers, **limits)
    traces = [r.trace for r in collect(TransformersPolicy(*agent), WorldEnv, ROWS, RolloutConfig(max_turns=4, **limits))]
    assert [e.trace for e in examples] == [t for t in traces if t.trace_id in {e.trace.trace_id for e in examples}]
    states, keys, tokens, pairs_made = 0, set(), 0, 0
    for trace, told in zip(traces, replay_traces(traces, teachers)):
        for state, results in zip(trace_states(trace), told):
            states += 1
            tokens += 0 if state.key in keys else sum(r.prompt_tokens + r.completion_tokens for r in results)
            keys.add(state.key)
        pairs_made += len(extract_dpo_pairs(trace, told))
    assert (counts.states, counts.pairs, counts.tokens) == (states, pairs_made, tokens)
    assert sum(len(e.pairs) for e in examples) == pairs_made > 0
    assert all(e.pairs for e in examples)


def test_the_same_seed_gives_the_same_pairs(agent):
    def made(seed):
        examples, counts = pairs(agent, PANEL, ROWS[:3], turns=3, seed=seed)
        return examples, replace(counts, seconds=0.0)
    assert made(0) == made(0) != made(1)


def test_the_equal_states_of_attempts_at_one_task_are_asked_once(agent):
    asked = []

    class Counting(Scripted):
        def answer(self, states):
            asked.append(len(states))
            return super().answer(states)
    _, counts = pairs(agent, [Counting("a", GO), Counting("b", GO)], rows=[ROWS[0]] * 6, turns=3)
    assert asked[0] == asked[1] <= counts.states - 5 and counts.tokens == 2 * 5 * asked[0]


def test_no_majority_no_example(agent):
    examples, counts = pairs(agent, PANEL[:1], rows=ROWS[:2], turns=2)
    assert examples == [] and counts.pairs == 0 < counts.states


# The world of teams


def episode(env, *turns):
    "A trace of turns, each a list of (path, team) that are written at once."
    tool = next(t for t in env.task.tools if t.role == "write")
    told = [Turn("user", env.task.prompt)]
    for n, writes in enumerate(turns):
        calls = [ToolCall(tool.name, {tool.arguments["path"]: path, "team": team, tool.arguments["text"]: "x"}, f"c{n}.{i}")
                 for i, (path, team) in enumerate(writes)]
        told += [Turn("assistant", tool_calls=tuple(calls)), *(env.call(call).turn(call) for call in calls)]
    return Trace("t", (*told, Turn("assistant", "Done.")), env.tools)


@pytest.fixture
def teams():
    env = TeamEnv()
    env.reset("4", "dev")
    path, right = env.task.path, team_of(env.task.path)
    wrong, other = [t for t in TEAMS if t != right][:2]
    return env, (path, right), (path, wrong), (path, other)


@pytest.mark.parametrize("kind", TEAM_PAIRS)
def test_a_turn_with_two_calls_makes_no_pair(teams, kind):
    env, right, wrong, other = teams
    trace = episode(env, [wrong, other], [wrong], [right, wrong], [right])
    pair, = team_pairs(trace, kind)
    assert pair.turn == 4 and trace.turns[pair.turn].tool_calls[0].arguments["team"] == wrong[1]
    assert {s.tool_calls[0].arguments["team"] for s in (pair.chosen, pair.rejected)} == {right[1], wrong[1]}


def test_a_recovery_is_a_turn_with_one_call(teams):
    env, right, wrong, other = teams
    assert team_pairs(episode(env, [wrong], [right, other]), "recovery") == []


@pytest.mark.parametrize("kind", TEAM_PAIRS)
def test_a_write_of_another_module_than_the_prompts_makes_no_pair(teams, kind):
    env, right, wrong, other = teams
    elsewhere = (next(p for n in range(99) if team_of(p := f"core/{FIRST[n]}_x.py") != right[1]), wrong[1])
    pair, = team_pairs(episode(env, [elsewhere], [wrong], [right]), kind)
    assert pair.turn == 3
