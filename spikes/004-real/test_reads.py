"""Spike 004-real's gate on reading: which action is right, and what stands before it."""
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from composer_replication.core.trace import ToolCall
from composer_replication.envs.sql.agents import demonstration, gives_up, misreads
from composer_replication.envs.sql.tasks import sql_rows, task_of
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.tree.template import probe_template

sys.path.append(str(Path(__file__).parent))
import reads


@pytest.fixture(scope="module")
def chat():
    return probe_template(embedded_tokenizer())


@pytest.fixture(scope="module")
def traces():
    rows = sql_rows(6, "reads", "train", ("easy", "medium"))
    return [demonstration(task_of(row["task_id"]), agent, row["task_id"]) for row in rows for agent in (gives_up, misreads)]


@pytest.fixture(scope="module")
def found(traces, chat):
    return list(reads.states(traces, chat))


def test_each_task_gives_one_error_turn_behind_every_source(found):
    by_task = {}
    for state in found:
        by_task.setdefault(state.trace.task_id, []).append(state)
    assert len(by_task) > 3
    for of in by_task.values():
        assert [s.source for s in of] == list(reads.SOURCES) and len({(s.trace.trace_id, s.site.turn) for s in of}) == 1


def test_what_stands_before_the_action_is_the_prompt_with_the_hint_alone(found, chat):
    for state in found:
        text, plain = (chat.tokenizer.decode(list(s.ids)) for s in (state, next(
            s for s in found if s.trace is state.trace and s.source == "none")))
        assert text.endswith(plain[-12:]), "both end where the assistant begins"
        if state.source == "none":
            failed = state.trace.turns[state.site.turn].tool_calls[0]
            assert str(failed.arguments.get("sql")) not in text
        if state.source == "filler":
            assert "harbour was quiet" in text and "harbour" not in plain


def test_no_more_error_turns_than_asked_for(traces, chat, monkeypatch):
    monkeypatch.setattr(reads, "SITES", 2)
    assert len({s.trace.task_id for s in reads.states(traces, chat)}) == 2


def test_right_is_what_the_state_lacks_or_the_answer(found):
    blind = next(s for s in found if s.trace.trace_id.endswith("gives_up"))
    task = task_of(blind.trace.task_id)
    call = lambda name, **arguments: ToolCall(name, arguments)
    assert reads.right(blind, [call("tables")]), "the names of the tables are not known"
    assert reads.right(blind, [call("query", sql=task.reference)])
    assert not reads.right(blind, [call("query", sql="SELECT 1")])
    assert not reads.right(blind, [call("describe", table=task.schema.child.name)]), "a table that was not listed yet"
    assert not reads.right(blind, []) and not reads.right(blind, [call("tables"), call("tables")])
    assert not reads.right(blind, [ToolCall("tables", "{")])
    seen = next(s for s in found if reads.sql.unseen(task_of(s.trace.task_id), s.trace, s.site.turn) is None)
    assert not reads.right(seen, [call("tables")]), "all was seen: only the answer is right"


def test_shares_resample_tasks():
    rows = [{"task": "a", "own": True, "none": False}] * 3 + [{"task": "b", "own": False, "none": False}]
    both = reads.share(rows, "own", "none")
    assert (both.estimate, both.low, both.high) == (0.75, 0.0, 1.0)
    assert reads.share(rows, "own").estimate == 0.75


def test_a_state_without_a_place_for_its_hint_is_left_out(traces, chat):
    site = next(s.site for s in reads.states(traces[:1], chat))
    nameless = replace(traces[0], task_id="another")
    assert reads._behind(nameless, site, chat) == []
