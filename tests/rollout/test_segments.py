"Episodes of several contexts: what the trace keeps, what reads it back, and that one context behaves as before."

from dataclasses import replace

import pytest

from composer_replication.core.trace import Segment, ToolCall, Trace, TraceProblem, Turn
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.report.trace import trace_html
from composer_replication.rollout.types import Ending, Rollout, SegmentTokens
from composer_replication.traces.calls import pair
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.traces.read import read_traces
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import target_turns
from composer_replication.tree.template import probe_template
from composer_replication.tree.text import AlignmentError

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "dig")
)


def called(name, id, *ids):
    return Turn("assistant", tool_calls=(ToolCall(name, {}, id),), token_ids=ids, logprobs=(-0.5,) * len(ids))


def failed(id, text="Error: unknown tool"):
    return Turn("tool", text, tool_call_id=id, observation=True, failed=True)


def forked():
    "Main context; a sub-agent whose call id is the same; the main context again from its first turn on, with another answer."
    turns = (
        Turn("user", "Find it."),
        called("look", "c0", 1, 2),
        failed("c0"),
        called("look", "c1", 3),
        Turn("user", "Dig."),
        called("dig", "c0", 4, 5),
        failed("c0", "Error: unknown tool dig"),
        called("dig", "c1", 6),
        Turn("user", "Summary: look failed."),
        called("look", "c2", 7),
    )
    return Trace(
        "e",
        turns,
        TOOLS[:1],
        segments=(Segment((0, 1, 2, 3), (1, 3)), Segment((4, 5, 6, 7), (5, 7), TOOLS[1:]), Segment((0, 1, 2, 8, 9), (9,))),
    )


def test_a_file_of_traces_keeps_the_segments(tmp_path):
    trace = forked()
    write_traces([trace], tmp_path / "t.jsonl.gz")
    problems = []
    (read,) = read_traces(tmp_path / "t.jsonl.gz", on_problem=problems.append)
    assert read == trace and not problems
    first, helper, again = read.parts()
    assert [part.trace_id for part in read.parts()] == ["e#1", "e#2", "e#3"]
    assert helper.tools == TOOLS[1:] and first.tools == again.tools == TOOLS[:1]
    assert again.turns[1] == first.turns[1] and again.sampled_turns == (4,) and read.sampled_turns == (1, 3, 5, 7, 9)
    assert again.parts() == [again]  # a part is one context


def test_calls_and_errors_are_found_in_their_own_context():
    trace = forked()
    found = pair(trace)
    assert {at: turn for at, (turn, _) in found.causes.items()} == {2: 1, 6: 5} and not found.loose
    assert [(s.turn, s.evidence_turn, s.trace_id) for s in find_error_sites(trace)] == [(1, 2, "e"), (5, 6, "e")]
    # The third context shows the error of a turn that was sampled in the first: it is learnt from once.
    assert [sorted(target_turns(part)) for part in trace.parts()] == [[1], [1], []]
    assert sorted(target_turns(trace.parts()[2], "all")) == []


def test_one_context_is_as_it_was():
    plain = replace(forked().parts()[0], trace_id="p", segments=())
    marked = replace(plain, segments=(Segment((0, 1, 2, 3), (1, 3)),))
    assert plain.parts()[0] is plain and marked.parts()[0] is marked
    assert b"segments" not in plain.to_json() and Trace.from_json(marked.to_json()) == marked
    assert find_error_sites(plain) == find_error_sites(marked) and pair(plain) == pair(marked)


def test_a_prompt_may_show_turns_that_nobody_sampled():
    trace = Trace(
        "few",
        (
            Turn("user", "2+2?"),
            Turn("assistant", "4"),
            Turn("user", "3+3?"),
            Turn("assistant", "6", token_ids=(9,), logprobs=(0.0,)),
        ),
        segments=(Segment((0, 1, 2, 3), (3,)),),
    )
    assert trace.sampled_turns == (3,) and sorted(target_turns(trace, "all")) == []
    Rollout(trace, (1, 2, 3), (9,), (1,), (0.0,), Ending.DONE, None)


def test_no_tree_holds_two_contexts():
    with pytest.raises(AlignmentError, match="3 contexts; build a tree of each"):
        build_tree(forked(), probe_template(embedded_tokenizer()))


def test_a_rollout_holds_the_ids_of_every_segment():
    first = (7,), (1, 2, 50, 3), (1, 1, 0, 1), (-0.5, -0.5, 0.0, -0.5)
    more = (
        SegmentTokens((8,), (4, 5, 51, 6), (1, 1, 0, 1), (-0.5, -0.5, 0.0, -0.5)),
        SegmentTokens((7, 1, 2, 50), (7,), (1,), (-0.5,)),
    )
    rollout = Rollout(forked(), *first, Ending.DONE, 1.0, more=more)
    assert rollout.sampled == 7 and [len(s.completion_ids) for s in rollout.segments] == [4, 4, 1]
    for wrong in (more[:1], more[::-1], (more[0], replace(more[1], completion_mask=(0,))), ()):
        with pytest.raises(AlignmentError, match="differ"):
            replace(rollout, more=wrong)


@pytest.mark.parametrize(
    "segments, said",
    [
        ((Segment((0, 20), ()),), "not there"),
        ((Segment((-1,), ()),), "not there"),
        ((Segment((), ()),), "not there"),
        ((Segment((0, 1), (0,)),), "not its assistant's"),
        ((Segment((0,), (1,)),), "not its assistant's"),
        ((Segment((0, 1), (1,)), Segment((0, 1), (1,))), "sampled in two segments"),
    ],
)
def test_segments_that_do_not_fit_their_turns(segments, said):
    with pytest.raises(TraceProblem, match=said.replace("'", ".")):
        replace(forked(), segments=segments)


def test_the_page_names_the_segments_of_a_turn():
    page = str(trace_html(forked()))
    assert (
        "10 turns in 3 segments" in page and "turn 1, assistant, segments 1, 3" in page and "turn 5, assistant, segment 2" in page
    )
    assert "segment" not in str(trace_html(replace(forked().parts()[0], segments=())))
