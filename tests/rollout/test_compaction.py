"Episodes that outgrow their context: what the next one begins with, what is recorded; nothing else differs from our loop."

import json
import threading
from types import SimpleNamespace

import pytest
from rollouts import scripted

from composer_replication.core.errors import InputProblem
from composer_replication.core.tools import ToolResult
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.rollout.compaction import HEADING, REQUEST, Compacting, compaction_metrics
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import Ending, RolloutConfig

LIMITS = RolloutConfig(max_turns=6, max_tokens=600, temperature=0)


def call(name, **arguments):
    return "<|call|>" + json.dumps({"name": name, "arguments": arguments})


class Counting:
    "Every call gives its number and a fact with it."

    tools = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},)
    facts = "fact1", "fact2", "fact3", "never"

    def reset(self, **row):
        self.number = 0

    def call(self, call):
        self.number += 1
        return ToolResult(f"fact{self.number} " + "filler " * 20)

    def reward(self, answer=""):
        return float(self.number)

    def close(self):
        pass


def size(segment):
    return len(segment.prompt_ids) + len(segment.completion_ids)


ROW = {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Look."}], "task_id": "t"}


def test_below_the_limit_it_is_our_loop_to_the_bit():
    policy, rows = TransformersPolicy(embedded_model("teacher-1"), embedded_tokenizer()), world_rows(4, 1, "test")
    ours = collect(policy, WorldEnv, rows, LIMITS)
    theirs = collect(policy, Compacting(WorldEnv, 10**6), rows, LIMITS)
    for mine, other in zip(ours, theirs):
        assert (mine.prompt_ids, mine.completion_ids, mine.completion_mask) == (
            other.prompt_ids,
            other.completion_ids,
            other.completion_mask,
        )
        assert (mine.ending, mine.reward, mine.trace.trace_id) == (other.ending, other.reward, other.trace.trace_id)
        assert other.logprobs == pytest.approx(mine.logprobs, abs=1e-5) and not other.more and not other.counts["compactions"]


def test_a_summary_begins_a_segment_and_all_is_recorded():
    def say(text):
        if REQUEST[:20] in text:
            return "fact2 was seen"
        return "Done." if HEADING.strip() in text and "<|tool|>" in text else call("look")

    (rollout,) = Compacting(Counting, 200).collect(scripted(say), [ROW], LIMITS, 0)
    first, second = rollout.segments
    turns, looks = rollout.trace.turns, sum(len(t.tool_calls) for t in rollout.trace.parts()[0].turns)
    assert (rollout.ending, rollout.reward) == (Ending.DONE, looks + 1.0) and looks >= 2
    begins = [turns[i] for i in rollout.trace.segments[1].turns[:2]]
    assert [t.content for t in begins] == ["S", f"Look.{HEADING}fact2 was seen"]
    (summary,) = [i for i in rollout.trace.sampled_turns if turns[i - 1].content == REQUEST]
    assert turns[summary].content == "fact2 was seen" and rollout.trace.segments[0].sampled[-1] == summary
    assert rollout.counts["summary_tokens"] == len(turns[summary].token_ids) and rollout.counts["compactions"] == 1
    assert (rollout.counts["facts"], rollout.counts["facts_lost"]) == (looks, looks - 1)  # seen by then, and all but fact2
    sampled = [t for i in rollout.trace.sampled_turns for t in turns[i].token_ids]
    assert sum(sum(s.completion_mask) for s in rollout.segments) == len(sampled) == rollout.sampled
    assert size(first) > 200 > len(second.prompt_ids)


def test_the_control_drops_the_oldest_turns():
    (rollout,) = Compacting(Counting, 200, "left").collect(
        scripted(lambda text: "Done." if "fact5" in text else call("look")), [ROW], LIMITS, 0
    )
    second, last = rollout.trace.parts()[1], rollout.trace.parts()[-1]
    first, *_, shown = [t.content.split()[0] for part in (second, last) for t in part.turns if t.role == "tool"]
    assert rollout.ending is Ending.DONE and first != "fact1" and shown == "fact5"
    assert [(t.role, t.content) for t in second.turns[:2]] == [("system", "S"), ("user", "Look.")] and second.turns[
        2
    ].role == "assistant"
    assert len(rollout.more[0].prompt_ids) <= 200 and not rollout.counts["summary_tokens"] and rollout.counts["facts_lost"]
    assert sum(len(s.sampled) for s in rollout.trace.segments) == 6 == len(rollout.trace.sampled_turns)  # none counted twice


def test_a_result_that_is_larger_than_the_context_ends_nothing():
    class Large(Counting):
        def call(self, call):
            self.number += 1
            return ToolResult("word " * 300)

    for way in ("summary", "left"):
        (rollout,) = Compacting(Large, 60, way).collect(
            scripted(lambda text: "short" if REQUEST[:20] in text else call("look")),
            [ROW],
            RolloutConfig(max_turns=4, max_tokens=10**5),
            0,
        )
        assert rollout.ending is Ending.TURNS and rollout.reward


@pytest.mark.parametrize(
    "limits, ending",
    [
        (RolloutConfig(max_turns=3, max_tokens=10**5), Ending.TURNS),
        (RolloutConfig(max_turns=99, max_tokens=150), Ending.TOKENS),
    ],
)
def test_budgets_hold_over_all_contexts(limits, ending):
    (rollout,) = Compacting(Counting, 120).collect(
        scripted(lambda text: "s" if REQUEST[:20] in text else call("look")), [ROW], limits, 0
    )
    assert rollout.ending is ending and rollout.reward is not None
    assert len(rollout.trace.sampled_turns) <= limits.max_turns


@pytest.mark.parametrize(
    "answer, ending, said",
    [
        ("raise", Ending.ERROR, "the call of 'look' raised OSError: gone"),
        ("text", Ending.ERROR, "gave a str; give a ToolResult"),
        ("hang", Ending.TIMEOUT, "the call of 'look' gave no answer within 1.5 seconds"),
    ],
)
def test_what_the_environment_does_wrong(answer, ending, said):
    never = threading.Event()

    class Broken(Counting):
        def call(self, call):
            if answer == "raise":
                raise OSError("gone")
            return "text" if answer == "text" else never.wait(60)

    (rollout,) = Compacting(Broken, 999).collect(scripted(lambda text: call("look")), [ROW], RolloutConfig(tool_timeout=1.5), 0)
    never.set()
    assert (rollout.ending, rollout.reward) == (ending, 0.0 if answer == "hang" else None) and said in rollout.problem


def test_the_summary_of_a_database_is_what_the_query_comes_from():
    "Ten questions: the policy knows only what stands in its context; a summary keeps it, the control loses it."

    def policy_of(task, names):
        def say(text):
            text = text.partition("<|user|>")[2]
            seen = [t.name for t in task.schema.tables if f'"table": "{t.name}"' in text or f"described {t.name}" in text]
            known = [name for name in names if name in text]
            if REQUEST[:20] in text:
                return f"Known: {' '.join(known)}; {', '.join(f'described {name}' for name in seen)}"
            if '"name": "query"' in text:
                return "Done."
            unseen = [t.name for t in task.schema.tables if t.name not in seen]
            return (
                call("describe", table=unseen[0])
                if unseen
                else call("query", sql=task.reference if len(known) == len(names) else "SELECT 1")
            )

        return scripted(say)

    earned = {}
    for row in sql_rows(10, 3, "train", ["easy"]):
        world = SqlEnv()
        world.reset(**row)
        for way in ("summary", "left", "none"):
            factory = Compacting(SqlEnv, 10**6 if way == "none" else 280, "left" if way == "none" else way)
            (rollout,) = factory.collect(
                policy_of(world.task, world.facts), [row], RolloutConfig(max_turns=10, max_tokens=4000), 0
            )
            earned.setdefault(way, []).append(rollout.reward)
    assert {way: sum(rewards) for way, rewards in earned.items()} == {"none": 10, "summary": 10, "left": 0}


def test_metrics_are_means_over_episodes_summaries_and_facts():
    one = {"episodes": 1, "compactions": 2, "summary_tokens": 30, "facts": 4, "facts_lost": 1}
    none = {"episodes": 1, "compactions": 0, "summary_tokens": 0, "facts": 0, "facts_lost": 0}
    assert compaction_metrics([one, none]) == {
        "context/compactions": 1.0,
        "context/summary_tokens": 15.0,
        "context/facts_lost": 0.25,
    }
    assert compaction_metrics([none]) == {"context/compactions": 0.0} and compaction_metrics([{}, {}]) == {}


def test_what_cannot_be():
    class Messages:
        name, patience = "m", 1.0

        def reply(self, *_):
            raise AssertionError

    for settings in ((0, "summary"), (9, "right")):
        with pytest.raises(InputProblem, match="will not do"):
            Compacting(Counting, *settings)
    with pytest.raises(InputProblem, match="m gives messages"):
        Compacting(Counting, 9).collect(Messages(), [ROW], LIMITS, 0)


def test_a_recipe_names_a_limit():
    from composer_replication.recipes.load import episode_factory
    from composer_replication.recipes.recipe import load_recipe
    from composer_replication.recipes.recipe_file import RecipeProblem

    brought = SimpleNamespace(brought=SimpleNamespace(environment=WorldEnv))
    factory = episode_factory(load_recipe("toy", {"context_tokens": "200", "compaction": "left"}), brought)
    assert (factory.factory, factory.context_tokens, factory.way) == (WorldEnv, 200, "left")
    wrongs = {
        "compaction='right' is unknown; use 'summary' or 'left'": {"context_tokens": "9", "compaction": "right"},
        "a context has at least 1 token": {"context_tokens": "0"},
        "an agent keeps its contexts itself": {"context_tokens": "9", "agent": "{command: x}"},
        "context_tokens with rollout: trl would change nothing": {"context_tokens": "9", "rollout": "trl"},
    }
    for said, settings in wrongs.items():
        with pytest.raises(RecipeProblem, match=said):
            load_recipe("toy", settings)
    with pytest.raises(RecipeProblem, match="context_tokens=9 without a task"):
        load_recipe("toy-traces", {"context_tokens": "9"})
