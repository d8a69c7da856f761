# ruff: noqa: E501
"""Sessions of pi, Kimi's wire, Cursor's transcripts, and histories of AutoGen, ADK and pydantic-ai."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.core.trace import Segment, Trace, Turn
from composer_replication.traces.chat.turns import UnknownTurn
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.formats.base import of_known_roles
from composer_replication.traces.formats.pi import read_pi
from composer_replication.traces.read import read_traces

ERROR = "Error: no such file"


def saved(tmp_path, rows, lines=True):
    path, problems = tmp_path / "t.jsonl", []
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return list(read_traces(path, on_problem=problems.append)), [p.what for p in problems]


def held(trace, roles="uata"):
    assert "".join(t.role[0] for t in trace.turns) == roles
    [site] = find_error_sites(trace)
    assert site.context.tool_name == "read" and "no such file" in site.context.error_message


CALL = {"type": "toolCall", "id": "c1", "name": "read", "arguments": {"path": "a"}}
PI = [
    {"type": "session", "version": 3, "id": "s", "cwd": "/w", "timestamp": "2026"},
    {"type": "model_change", "id": "0", "parentId": None, "provider": "p", "modelId": "m"},
    {"type": "message", "id": "1", "parentId": "0", "message": {"role": "user", "content": [{"type": "text", "text": "Go."}], "timestamp": 1}},
    {"type": "message", "id": "2", "parentId": "1", "message": {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, CALL], "model": "m", "stopReason": "toolUse"}},
    {"type": "message", "id": "3", "parentId": "2", "message": {"role": "toolResult", "toolCallId": "c1", "toolName": "read", "content": [{"type": "text", "text": ERROR}], "isError": True}},
    {"type": "message", "id": "4", "parentId": "3", "message": {"role": "assistant", "content": [{"type": "text", "text": "Well."}], "model": "m"}},
]
BRANCH = [
    {"type": "message", "id": "5", "parentId": "3", "message": {"role": "assistant", "content": [CALL | {"id": "c2"}], "model": "m"}},
    {"type": "message", "id": "6", "parentId": "5", "message": {"role": "toolResult", "toolCallId": "c2", "toolName": "read", "content": [{"type": "text", "text": ERROR}], "isError": True}},
    {"type": "message", "id": "7", "parentId": "6", "message": {"role": "assistant", "content": [{"type": "text", "text": "Else."}], "model": "m"}},
]


@pytest.mark.parametrize("order", [1, -1])
def test_a_session_of_pi(tmp_path, order):
    [trace], problems = saved(tmp_path, [PI[0], *PI[1:][::order]])
    held(trace)
    assert not problems and (trace.trace_id, trace.model, trace.source, trace.turns[1].thinking) == ("s", "m", "/w", "Hm.")


def test_each_branch_of_a_session_of_pi_is_a_context_and_each_turn_counts_once(tmp_path):
    [trace], problems = saved(tmp_path, [*PI, *BRANCH])
    assert not problems and len(trace.parts()) == 2 and sorted(trace.sampled_turns) == [k for k, t in enumerate(trace.turns) if t.role == "assistant"]
    assert [[t.content for t in part.turns][-1] for part in trace.parts()] == ["Well.", "Else."] and len(find_error_sites(trace)) == 2


def test_a_session_that_was_rewound_before_any_answer_has_one_context(tmp_path):
    left = {"type": "message", "id": "9", "parentId": "3", "message": {"role": "user", "content": "No."}}
    [trace], _ = saved(tmp_path, [*PI[:5], left, *PI[5:]])
    held(trace)


ROLES = st.lists(st.tuples(st.sampled_from("uaatt"), st.integers(0, 8)), min_size=1, max_size=8)  # role, and how far back the parent is
STRANGE = st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.sampled_from(["telemetry", "narrator"])), max_size=3)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(ROLES, STRANGE, st.booleans())
def test_messages_of_unknown_roles_anywhere_in_a_tree_are_named_and_change_nothing_else(messages, strange, linear):
    role = {"u": "user", "a": "assistant", "t": "toolResult"}
    rows = [(f"m{n}", f"m{n - 1 - (0 if linear else back % n)}" if n else None, role[letter]) for n, (letter, back) in enumerate(messages)]
    if not any(letter == "a" for letter, _ in messages):
        rows.append((f"m{len(rows)}", f"m{len(rows) - 1}", "assistant"))

    def read(rows):
        entries = [{"type": "message", "message": {"role": role, "content": id}} if linear else
                   {"type": "message", "id": id, "parentId": parent, "message": {"role": role, "content": id}} for id, parent, role in rows]
        trace, *problems = read_pi(list(enumerate(entries)), "t")
        return trace, problems

    more = list(rows)
    for n, (at, between, name) in enumerate(strange):
        at %= len(more)
        id, parent, _ = more[at]
        more.insert(at + 1, (f"x{n}", id, name))  # a leaf, or what the message's children follow
        if between or linear:
            more = [(i, f"x{n}" if p == id and i != f"x{n}" else p, r) for i, p, r in more]
    plain, _ = read(rows)
    trace, problems = read(more)
    answers = [n for n, turn in enumerate(plain.turns) if turn.role == "assistant"]
    assert [t.content for t in trace.turns] == [t.content for t in plain.turns] and trace.segments == plain.segments
    assert sorted(problem.role for problem in problems) == sorted({name for *_, name in strange})
    assert list(plain.sampled_turns) == answers
    assert {turn.content for turn in plain.turns if turn.role == "assistant"} == {id for id, _, role in rows if role == "assistant"}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from("ua?"), min_size=1, max_size=8), st.lists(st.sets(st.integers(0, 7), min_size=1), max_size=3))
def test_segments_keep_their_turns_where_others_are_taken_out(letters, places):
    turns = tuple(UnknownTurn("telemetry", str(n)) if letter == "?" else Turn({"u": "user", "a": "assistant"}[letter], str(n)) for n, letter in enumerate(letters))
    turns, free = (*turns, Turn("assistant", "end")), set(range(len(turns)))
    segments = []
    for place in places:
        shown = sorted(k for k in place if k < len(turns))
        own = [k for k in shown if turns[k].role == "assistant" and k in free]
        free -= set(own)
        segments += [Segment(tuple(shown), tuple(own))] if shown else []
    trace = Trace("t", turns, segments=tuple(segments))
    known, _ = of_known_roles(trace)

    def held(trace, part):
        return [[trace.turns[k].content for k in part_of if not isinstance(trace.turns[k], UnknownTurn)] for part_of in (part.turns, part.sampled)]
    assert [held(known, part) for part in known.segments] == [both for part in segments if (both := held(trace, part))[0]]


@pytest.mark.parametrize("kind", ["compaction", "branch_summary"])
def test_a_summary_is_what_the_model_was_told(tmp_path, kind):
    told = {"type": kind, "id": "x", "parentId": "3", "summary": "Before: nothing.", "firstKeptEntryId": "3"}
    [trace], problems = saved(tmp_path, [*PI[:5], told, PI[5] | {"parentId": "x"}])
    held(trace, "uatua")
    assert "Before: nothing." in trace.turns[3].content and not problems


def wire(kind, **payload):
    return {"timestamp": 1.0, "message": {"type": kind, "payload": payload}}


WIRE = [
    {"type": "metadata", "protocol_version": "1.1"}, wire("TurnBegin", user_input="Go."), wire("StepBegin", n=1), wire("ContentPart", type="think", think="Hm"), wire("ContentPart", type="think", think="."),
    wire("ToolCall", type="function", id="c1", function={"name": "read", "arguments": '{"pa'}), wire("ToolCallPart", arguments_part='th": "a"}'),
    wire("ToolResult", tool_call_id="c1", return_value={"is_error": True, "output": "", "message": ERROR, "display": []}), wire("StatusUpdate", context_usage=0.1),
    wire("StepBegin", n=2), wire("ContentPart", type="text", text="We"), wire("ContentPart", type="text", text="ll."), wire("TurnEnd")]


@pytest.mark.parametrize("given", ["Go.", [{"type": "text", "text": "Go."}]])
def test_the_wire_of_kimi(tmp_path, given):
    [trace], problems = saved(tmp_path, [WIRE[0], wire("TurnBegin", user_input=given), *WIRE[2:]])
    held(trace)
    assert not problems and [t.content for t in trace.turns] == ["Go.", "", ERROR, "Well."] and trace.turns[1].thinking == "Hm." and trace.turns[1].tool_calls[0].arguments == {"path": "a"}


def test_a_sub_agent_on_the_wire_of_kimi_is_a_trace_of_its_own(tmp_path):
    inner = [wire("SubagentEvent", task_tool_call_id="c1", event=row["message"]) for row in WIRE[2:-1]]
    traces, problems = saved(tmp_path, [*WIRE[:7], *inner, *WIRE[7:]])
    assert len(traces) == 2 and not problems
    held(traces[0])
    held(traces[1], "ata")


def test_a_transcript_of_cursor(tmp_path):
    rows = [{"role": "user", "message": {"content": [{"type": "text", "text": "Go."}]}},
            {"role": "assistant", "message": {"content": [{"type": "text", "text": "I look."}, {"type": "tool_use", "name": "read", "input": {"path": "a"}}]}},
            {"role": "assistant", "message": {"content": [{"type": "text", "text": "Well."}]}}]
    [trace], problems = saved(tmp_path, rows)
    assert [t.role for t in trace.turns] == ["user", "assistant", "assistant"] and trace.turns[1].tool_calls[0].name == "read" and len(problems) == 1 and "no result" in problems[0]


PYDANTIC = [
    {"kind": "request", "parts": [{"part_kind": "system-prompt", "content": "Be brief."}, {"part_kind": "user-prompt", "content": "Go."}], "instructions": None},
    {"kind": "response", "model_name": "m", "parts": [{"part_kind": "thinking", "content": "Hm."}, {"part_kind": "tool-call", "tool_name": "read", "args": '{"path": "a"}', "tool_call_id": "c1"}]},
    {"kind": "request", "parts": [{"part_kind": "retry-prompt", "content": ERROR, "tool_name": "read", "tool_call_id": "c1"}]},
    {"kind": "response", "model_name": "m", "parts": [{"part_kind": "text", "content": "Well."}]}]
ADK = {"id": "s", "app_name": "a", "user_id": "u", "events": [
    {"author": "user", "content": {"role": "user", "parts": [{"text": "Go."}]}, "invocation_id": "i", "id": "1"},
    {"author": "agent", "content": {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"function_call": {"id": "c1", "name": "read", "args": {"path": "a"}}}]}, "invocation_id": "i", "id": "2"},
    {"author": "agent", "content": {"role": "user", "parts": [{"function_response": {"id": "c1", "name": "read", "response": {"error": ERROR}}}]}, "invocation_id": "i", "id": "3"},
    {"author": "agent", "content": {"role": "model", "parts": [{"text": "We"}]}, "partial": True, "invocation_id": "i", "id": "4"},
    {"author": "agent", "content": {"role": "model", "parts": [{"text": "Well."}]}, "invocation_id": "i", "id": "5"}]}
AUTOGEN = [
    {"type": "TextMessage", "source": "user", "content": "Go.", "models_usage": None}, {"type": "ThoughtEvent", "source": "agent", "content": "Hm."},
    {"type": "ToolCallRequestEvent", "source": "agent", "content": [{"id": "c1", "name": "read", "arguments": '{"path": "a"}'}]},
    {"type": "ToolCallExecutionEvent", "source": "agent", "content": [{"call_id": "c1", "name": "read", "content": ERROR, "is_error": True}]},
    {"type": "ToolCallSummaryMessage", "source": "agent", "content": ERROR}, {"type": "TextMessage", "source": "agent", "content": "Well."}]
CONTEXT = [
    {"type": "UserMessage", "source": "user", "content": "Go."}, {"type": "AssistantMessage", "source": "agent", "thought": "Hm.", "content": [{"id": "c1", "name": "read", "arguments": '{"path": "a"}'}]},
    {"type": "FunctionExecutionResultMessage", "content": [{"call_id": "c1", "name": "read", "content": ERROR, "is_error": True}]}, {"type": "AssistantMessage", "source": "agent", "content": "Well."}]


def camel(value):
    "The same with keys as TypeScript writes them."
    if isinstance(value, dict):
        return {"".join(part if not n else part.title() for n, part in enumerate(k.split("_"))): camel(v) for k, v in value.items()}
    return [camel(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("record, roles", [
    (PYDANTIC, "suata"), ({"messages": PYDANTIC}, "suata"), (ADK, "uata"), (camel(ADK), "uata"), (AUTOGEN, "uata"), ({"messages": AUTOGEN, "stop_reason": None}, "uata"),
    (CONTEXT, "uata"), ({"type": "AssistantAgentState", "version": "1.0.0", "llm_context": {"messages": CONTEXT}}, "uata")])
def test_a_history_of_a_framework(tmp_path, record, roles):
    [trace], problems = saved(tmp_path, record, lines=False)
    held(trace, roles)
    call = next(t for t in trace.turns if t.tool_calls)
    assert not problems and call.thinking == "Hm." and call.tool_calls[0].arguments == {"path": "a"} and trace.turns[-1].content == "Well."


def iflow(chained, compact):
    "A session of iFlow: Claude Code's lines, results in Google's form; every answer names the user's line or the line before as its parent."
    rows = []

    def line(kind, parent, content, **more):
        rows.append({"uuid": f"u{len(rows)}", "parentUuid": parent, "sessionId": "session-1", "type": kind, "isSidechain": False, "userType": "external",
                     "message": {"role": kind, "content": content} | ({"id": f"m{len(rows)}", "model": "glm-5"} if kind == "assistant" else {})} | more)
        return rows[-1]["uuid"]

    first = before = line("user", None, "Go.", cwd="/w", gitBranch=None, version="1.0.0")
    for n, (name, response) in enumerate([("list", {"output": "b"}), ("read", {"error": "no such file"}), ("list", {"output": "b"})]):
        before = line("assistant", before if chained else first, [{"type": "tool_use", "id": f"c{n}", "name": name, "input": {"path": "a"}}])
        held = {"functionResponse": {"id": f"c{n}", "name": name, "response": response}}
        content = held if compact else {"callId": f"c{n}", "responseParts": held, "resultDisplay": {"fileDiff": "-"}}
        before = line("user", before, [{"type": "tool_result", "tool_use_id": f"c{n}", "content": content}], toolUseResult={"toolName": name})
    line("assistant", before if chained else first, [{"type": "text", "text": "Done."}])
    return rows


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("compact", [True, False])
def test_every_answer_of_iflow_is_read_whichever_line_it_names_as_its_parent(tmp_path, chained, compact):
    [trace], problems = saved(tmp_path, iflow(chained, compact))
    held(trace, "uatatata")
    assert trace.turns[2].content == "b" and trace.turns[4].failed and not problems


def test_what_the_user_took_back_stays_out_where_answers_name_one_parent(tmp_path):
    rows = iflow(False, False)
    rows += [rows[0] | {"uuid": "again", "parentUuid": rows[0]["uuid"], "message": {"role": "user", "content": "No, stop."}},
             rows[-1] | {"uuid": "end", "parentUuid": "again", "message": rows[-1]["message"] | {"id": "other"}}]
    [trace], _ = saved(tmp_path, rows)
    assert [t.content for t in trace.turns] == ["Go.", "No, stop.", "Done."]


STS = [
    {"type": "session", "harness": "tomo", "id": "s1", "name": "Fix", "model": "m"},
    {"type": "message", "message": {"role": "user", "content": "Go."}},
    {"type": "message", "message": {"role": "assistant", "content": "", "reasoningContent": "look first",
                                    "toolCalls": [{"id": "c1", "function": {"name": "read", "arguments": '{"path": "a"}'}}]}},
    {"type": "message", "message": {"role": "tool", "toolCallId": "c1", "content": ERROR}},
    {"type": "message", "message": {"role": "assistant", "content": "Done."}},
]


def test_the_hubs_session_traces_are_read_with_their_head(tmp_path):
    [trace], problems = saved(tmp_path, STS)
    held(trace)
    assert (trace.trace_id, trace.model, trace.turns[1].thinking, problems) == ("s1", "m", "look first", [])


def test_the_hubs_branches_are_contexts_of_their_own(tmp_path):
    tree = {"q": None, "a1": "q", "a2": "q"}
    rows = STS[:1] + [{"type": "message", "message": {"id": id, "parent": parent, "role": "user" if id == "q" else "assistant", "content": id}}
                      for id, parent in tree.items()]
    [trace], problems = saved(tmp_path, rows)
    assert [[trace.turns[k].content for k in segment.turns] for segment in trace.segments] == [["q", "a1"], ["q", "a2"]] and not problems


LOOP = [{"type": "metadata", "protocol_version": "1.4"}, {"type": "config.update", "systemPrompt": "You are Kimi."}, {"type": "turn.prompt", "input": [{"type": "text", "text": "Go."}]},
        {"type": "context.append_message", "message": {"role": "user", "content": [{"type": "text", "text": "Go."}], "origin": {"kind": "user"}}},
        *({"type": "context.append_loop_event", "event": event} for event in (
            {"type": "step.begin", "step": 1}, {"type": "content.part", "part": {"type": "text", "text": "I read."}},
            {"type": "tool.call", "toolCallId": "c1", "name": "Read", "args": {"path": "a"}}, {"type": "tool.call", "toolCallId": "c2", "name": "Read", "args": {"path": "b"}},
            {"type": "tool.result", "toolCallId": "c1", "result": {"output": "no such file", "isError": True}}, {"type": "tool.result", "toolCallId": "c2", "result": {"output": "text"}},
            {"type": "step.end", "step": 1}, {"type": "step.begin", "step": 2}, {"type": "content.part", "part": {"type": "text", "text": "Well."}})),
        {"type": "usage.record"}]  # fmt: skip


def test_the_wire_of_kimi_since_protocol_1_4(tmp_path):
    [trace], problems = saved(tmp_path, LOOP)
    assert not problems and trace.format == "kimi-cli" and [t.role for t in trace.turns] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [t.content for t in trace.turns] == ["You are Kimi.", "Go.", "I read.", "no such file", "text", "Well."]
    assert [c.arguments for c in trace.turns[2].tool_calls] == [{"path": "a"}, {"path": "b"}]
    assert [s.context.error_message for s in find_error_sites(trace)] == ["no such file"]


def hosted(kind, text=None, **more):
    return {"id": f"sevt_{kind}", "type": kind} | ({"content": [{"type": "text", "text": text}]} if text else {}) | more


HOSTED = [hosted("session.status_running"), hosted("user.message", "Go."), hosted("span.model_request_start"), hosted("agent.thinking"), hosted("agent.message", "I look."),
          hosted("agent.tool_use", name="bash", input={"command": "ls a"}) | {"id": "sevt_1"}, hosted("agent.mcp_tool_use", name="find", input={"q": "b"}) | {"id": "sevt_2"},
          hosted("agent.tool_result", "ls: a: No such file", tool_use_id="sevt_1", is_error=True), hosted("agent.mcp_tool_result", "b", mcp_tool_use_id="sevt_2", is_error=False),
          hosted("agent.message", "Well."), hosted("session.status_idle")]  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_events_of_a_hosted_agent(tmp_path, wrapped):
    "Bare, or each beside what a program makes of it, whose roles are no chat's."
    rows = [{"role": "agent", "kind": row["type"].split(".")[1], "time": 1, "raw": row} for row in HOSTED] if wrapped else HOSTED
    [trace], problems = saved(tmp_path, rows)
    assert not problems and [t.role for t in trace.turns] == ["user", "assistant", "tool", "tool", "assistant"]
    assert trace.turns[1].content == "I look." and [c.name for c in trace.turns[1].tool_calls] == ["bash", "find"]
    assert [s.context.error_message for s in find_error_sites(trace)] == ["ls: a: No such file"]


NAMED = [{"role": "human", "content": "Go."}, {"role": "Lead (thought)", "content": "Plan."}, {"role": "Lead (-> WebSurfer)", "content": "Search it."},
         {"role": "WebSurfer", "content": "Error: the page does not load"}, {"role": "Lead (-> Assistant)", "content": "Count."}, {"role": "Assistant", "content": "It is 3."},
         {"role": "Lead (termination condition)", "content": "Done."}]  # fmt: skip


@pytest.mark.parametrize("form", ["history", "messages", "lines"])
def test_agents_that_talk_by_name_are_a_chat_of_the_one_that_addresses_the_others(tmp_path, form):
    "As in Who&When and logs of Magentic-One; what one asks another is a call, and the answer its result."
    [trace], problems = saved(tmp_path, NAMED if form == "lines" else [{form: NAMED, "question": "Go."}])
    assert not problems and trace.format == "openai"
    assert [t.role for t in trace.turns] == ["user", "assistant", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trace.turns[1].thinking == "Plan." and trace.turns[4].tool_calls[0].arguments == {"request": "Count."}
    assert [s.context.error_message for s in find_error_sites(trace)] == ["Error: the page does not load"]


def test_a_role_that_names_a_called_tool_is_its_result(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "get_weather", "args": {"city": "x"}, "id": "c1", "type": "tool_call"}]}
    [trace], problems = saved(tmp_path, [{"messages": [{"role": "user", "content": "Go."}, call, {"role": "get_weather", "content": "sunny"}]}])
    assert not problems and [t.role for t in trace.turns] == ["user", "assistant", "tool"] and trace.turns[2].tool_call_id == "c1"
