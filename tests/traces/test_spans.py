# ruff: noqa: E501
"""Spans of model calls, in every convention: one conversation for each history that goes on."""

import json

import pytest

from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

CITY = {"city": "Bonn"}
SYSTEM, ASK, CALL, RESULT, LAST = "Be brief.", "Weather?", ("weather", CITY, "c1"), "Error: no such city", "I do not know."


def chat(until, reasoning=False):
    "The first messages in OpenAI's form."
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(CITY)}}
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": RESULT}, {"role": "assistant", "content": LAST}][:until]


def parts(until):
    "The first messages in the parts of GenAI."
    return [{"role": "system", "parts": [{"type": "text", "content": SYSTEM}]}, {"role": "user", "parts": [{"type": "text", "content": ASK}]},
            {"role": "assistant", "parts": [{"type": "reasoning", "content": "Hm."}, {"type": "tool_call", "id": "c1", "name": "weather", "arguments": CITY}]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": RESULT}]},
            {"role": "assistant", "parts": [{"type": "text", "content": LAST}]}][:until]


def flat(value, key):
    "A value with dotted keys."
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, inner in items for k, v in flat(inner, f"{key}.{name}").items()}
    return {} if value is None else {key: value}


def openinference(messages):
    def one(m):
        calls = [{"tool_call": {"id": c["id"], "function": c["function"]}} for c in m.get("tool_calls", ())]
        return {"message": {k: m.get(k) for k in ("role", "content", "tool_call_id")} | ({"tool_calls": calls} if calls else {})}
    return [one(m) for m in messages]


def traceloop(messages):
    return [{k: m.get(k) for k in ("role", "content", "tool_call_id")} | {"tool_calls": [{"id": c["id"], **c["function"]} for c in m.get("tool_calls", ())]} for m in messages]


TOOL = {"type": "function", "function": {"name": "weather", "description": "W.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
CONVENTIONS = {  # attributes of a model call with so many messages before it
    "genai": lambda n: {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.input.messages": json.dumps(parts(n)), "gen_ai.output.messages": json.dumps([parts(5)[n]]),
                        "gen_ai.tool.definitions": json.dumps([TOOL])},
    "genai with instructions": lambda n: {"gen_ai.system_instructions": json.dumps(parts(1)[0]["parts"]), "gen_ai.response.model": "m", "gen_ai.input.messages": json.dumps(parts(n)[1:]),
                                          "gen_ai.output.messages": json.dumps([parts(5)[n]]), "gen_ai.tool.definitions": json.dumps([TOOL["function"] | {"type": "function"}])},
    "openinference": lambda n: {"openinference.span.kind": "LLM", "llm.model_name": "m", **flat(openinference(chat(n)), "llm.input_messages"),
                                **flat(openinference([chat(5)[n]]), "llm.output_messages"), "llm.tools.0.tool.json_schema": json.dumps(TOOL)},
    "openinference, nested": lambda n: {"openinference": {"span": {"kind": "LLM"}}, "llm": {"model_name": "m", "input_messages": openinference(chat(n)),
                                        "output_messages": openinference([chat(5)[n]]), "tools": [{"tool": {"json_schema": json.dumps(TOOL)}}]}},
    "input and output": lambda n: {"openinference.span.kind": "LLM", "llm.model_name": "m", "input.value": json.dumps({"messages": chat(n), "tools": [TOOL]}),
                                   "output.value": json.dumps({"choices": [{"message": chat(5)[n]}]})},
    "traceloop": lambda n: {"gen_ai.request.model": "m", **flat(traceloop(chat(n)), "gen_ai.prompt"), **flat(traceloop([chat(5)[n]]), "gen_ai.completion"),
                            **flat([{"name": "weather", "description": "W.", "parameters": json.dumps(TOOL["function"]["parameters"])}], "llm.request.functions")},
    "ai sdk": lambda n: {"ai.model.id": "m", "ai.prompt.messages": json.dumps(chat(n)), "ai.response.text": chat(5)[n].get("content") or "", "ai.prompt.tools": [json.dumps(TOOL)],
                         **({"ai.response.toolCalls": json.dumps([{"toolCallId": "c1", "toolName": "weather", "args": json.dumps(CITY)}])} if n == 2 else {})},
}


def otlp(spans):
    def typed(v):
        if isinstance(v, list):
            return {"arrayValue": {"values": [typed(x) for x in v]}}
        if isinstance(v, dict):
            return {"kvlistValue": {"values": [{"key": k, "value": typed(x)} for k, x in v.items() if x is not None]}}
        return {"intValue": str(v)} if isinstance(v, int) else {"stringValue": v}
    made = [{"traceId": "t1", "spanId": s["id"], "parentSpanId": s.get("parent", ""), "name": s["name"], "startTimeUnixNano": str(s["at"] * 10**9),
             "attributes": [{"key": k, "value": typed(v)} for k, v in s["attributes"].items()], "status": {"code": 2} if s.get("failed") else {}} for s in spans]
    return [{"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": made}]}]}]


def console(spans):
    return [{"name": s["name"], "context": {"trace_id": "0xt1", "span_id": s["id"]}, "parent_id": s.get("parent"), "start_time": f"2026-01-01T00:00:{s['at']:02}Z",
             "attributes": s["attributes"], "status": {"status_code": "ERROR" if s.get("failed") else "UNSET"}, "events": []} for s in spans]


def model_calls(convention, orders=(2, 4)):
    "Two model calls, the later one first, and what is around them."
    spans = [{"id": f"m{n}", "parent": "root", "name": "chat m", "at": n, "attributes": CONVENTIONS[convention](n)} for n in orders]
    return [*reversed(spans), {"id": "root", "name": "agent", "at": 1, "attributes": {"openinference.span.kind": "AGENT"}},
            {"id": "x", "parent": "root", "name": "weather", "at": 3, "attributes": {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather", "gen_ai.tool.call.id": "c1"}, "failed": True}]


def saved(tmp_path, rows, lines):
    path, problems = tmp_path / "spans.json", []
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows[0] if len(rows) == 1 else rows, indent=1))
    return list(read_traces(path, on_problem=problems.append)), [p.what for p in problems]


def held(trace, thinking=None):
    assert [(t.role, t.content) for t in trace.turns] == [("system", SYSTEM), ("user", ASK), ("assistant", ""), ("tool", RESULT), ("assistant", LAST)]
    [call] = trace.turns[2].tool_calls
    assert (call.name, call.arguments, call.id) == CALL and trace.turns[3].tool_call_id == "c1"
    assert len(find_error_sites(trace)) == 1


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("form", [otlp, console])
@pytest.mark.parametrize("lines", [True, False])
def test_spans_of_one_conversation_are_one_trace(tmp_path, convention, form, lines):
    [trace], problems = saved(tmp_path, form(model_calls(convention)), lines)
    held(trace)
    assert not problems and trace.model == "m" and trace.tool_names == ("weather",) and trace.turns[3].failed is True
    assert trace.turns[2].thinking == ("Hm." if convention.startswith("genai") else None)


def langfuse(n):
    return {"id": f"g{n}", "traceId": "t1", "type": "GENERATION", "name": "chat", "startTime": f"2026-01-01T00:00:0{n}Z", "model": "m", "parentObservationId": "r",
            "input": {"messages": chat(n), "tools": [TOOL]}, "output": chat(5)[n], "level": "DEFAULT"}


def langfuse_tool():
    return {"id": "x", "traceId": "t1", "type": "TOOL", "name": "weather", "startTime": "2026-01-01T00:00:03Z", "input": CITY, "output": RESULT, "level": "ERROR", "statusMessage": "no"}


@pytest.mark.parametrize("wrap", [lambda rows: [{"id": "t1", "name": "agent", "observations": rows}], lambda rows: [{"data": rows, "meta": {"page": 1}}], lambda rows: rows])
@pytest.mark.parametrize("given", [lambda row: row, lambda row: row | {"input": row["input"]["messages"]} if row["type"] == "GENERATION" else row,
                                   lambda row: row | {"input": json.dumps(row["input"]), "output": json.dumps(row["output"])}])
def test_an_export_of_langfuse(tmp_path, wrap, given):
    rows = [given(row) for row in (langfuse(4), langfuse_tool(), langfuse(2), {"id": "r", "traceId": "t1", "type": "SPAN", "startTime": "2026-01-01T00:00:01Z", "input": "x", "output": "y"})]
    [trace], problems = saved(tmp_path, wrap(rows), False)
    held(trace)
    assert not problems and trace.model == "m" and trace.turns[3].failed is True


def stored(row):
    "The row as Langfuse exports it to a bucket: names with underscores, JSON as text."
    row = {k if k == "model" else "".join(f"_{c.lower()}" if c.isupper() else c for c in k): v for k, v in row.items()}
    row |= {k: json.dumps(row[k]) for k in ("input", "output") if not isinstance(row[k], str)}
    return {"provided_model_name" if k == "model" else k: v for k, v in row.items()}


def listed(**changes):
    "A trace of Langfuse without its observations."
    return {"id": "t1", "timestamp": "2026-01-01T00:00:00Z", "name": "agent", "userId": None, "sessionId": "s", "tags": [], "environment": "default",
            "input": {"messages": chat(2)}, "output": {"messages": chat(5)}} | changes


def defined(row):
    "The row with its tools in a column of their own."
    own = {"description": "W.", "parameters": json.dumps(TOOL["function"]["parameters"])}
    return row | {"input": row["input"]["messages"], "toolDefinitions": {"weather": json.dumps(own)}} if row["type"] == "GENERATION" else row


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("change", [stored, defined, lambda row: stored(defined(row))], ids=["stored", "defined", "both"])
def test_rows_of_langfuses_bucket(tmp_path, lines, change):
    [trace], problems = saved(tmp_path, [change(row) for row in (langfuse(4), langfuse_tool(), langfuse(2))], lines)
    held(trace)
    assert not problems and (trace.trace_id, trace.model, trace.turns[3].failed, trace.tool_names) == ("t1", "m", True, ("weather",))


@pytest.mark.parametrize("trace", [listed(), listed(observations=["g2", "g4"]), listed(observations=[]), listed(output=chat(5)[2:]), stored(listed()),
                                   listed(input=chat(4), output=chat(5)[4]), {"trace": listed(), "observations": [langfuse(2), langfuse_tool(), langfuse(4)]}])
@pytest.mark.parametrize("wrap", [lambda row: [row], lambda row: [{"data": [row], "meta": {"page": 1}}]])
def test_a_trace_of_langfuse_holds_the_whole_conversation(tmp_path, trace, wrap):
    [read], problems = saved(tmp_path, wrap(trace), False)
    held(read)
    assert not problems and read.trace_id == "t1" and read.format == "spans"


def test_a_trace_of_langfuse_without_messages_is_said(tmp_path):
    traces, problems = saved(tmp_path, [listed(input="a question", output=None)], False)
    assert not traces and "none of 1 span holds messages" in problems[0]


def lc(message):
    "A message as LangChain writes it."
    kind = {"system": "SystemMessage", "user": "HumanMessage", "assistant": "AIMessage", "tool": "ToolMessage"}[message["role"]]
    more = {"tool_calls": [{"name": "weather", "args": CITY, "id": "c1", "type": "tool_call"}]} if message.get("tool_calls") else {}
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind], "kwargs": {"content": message.get("content") or "", **more} | (
        {"tool_call_id": "c1"} if kind == "ToolMessage" else {})}


LANGSMITH = {
    "chat": lambda n: ({"messages": [[lc(m) for m in chat(n)]]}, {"generations": [[{"text": "", "type": "ChatGeneration", "message": lc(chat(5)[n])}]]}),
    "wrapped client": lambda n: ({"messages": chat(n), "tools": [TOOL]}, {"choices": [{"message": chat(5)[n]}]}),
    "message": lambda n: ({"messages": chat(n)}, chat(5)[n]),
}


def run(n, way):
    given, made = LANGSMITH[way](n)
    return {"id": f"r{n}", "trace_id": "t1", "run_type": "llm", "name": "ChatOpenAI", "parent_run_id": "root", "start_time": f"2026-01-01T00:00:0{n}", "inputs": given, "outputs": made,
            "extra": {"metadata": {"ls_model_name": "m"}}}


@pytest.mark.parametrize("way", LANGSMITH)
@pytest.mark.parametrize("nested", [True, False])
def test_runs_of_langsmith(tmp_path, way, nested):
    root = {"id": "root", "trace_id": "t1", "run_type": "chain", "name": "agent", "start_time": "2026-01-01T00:00:00", "inputs": {"messages": chat(2)}, "outputs": {"messages": chat(5)}}
    tool = {"id": "x", "trace_id": "t1", "run_type": "tool", "name": "weather", "start_time": "2026-01-01T00:00:03", "parent_run_id": "root", "inputs": {"input": "x"}, "outputs": None, "error": "no"}
    runs = [run(4, way), run(2, way), tool]
    [trace], problems = saved(tmp_path, [root | {"child_runs": runs}] if nested else [*runs, root], False)
    held(trace)
    assert not problems and trace.model == "m"


def test_a_root_run_alone_holds_the_conversation(tmp_path):
    root = {"id": "root", "trace_id": "t1", "run_type": "chain", "name": "agent", "inputs": {"messages": chat(2)}, "outputs": {"messages": chat(5)[2:]}}
    for outputs in (chat(5)[2:], chat(5)):
        [trace], problems = saved(tmp_path, [root | {"outputs": {"messages": outputs}}], False)
        held(trace)


def test_a_history_that_does_not_go_on_is_a_trace_of_its_own(tmp_path):
    other = {"id": "o", "name": "chat m", "at": 3, "attributes": {"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Sum up."}]}]),
                                                                  "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Short."}]}])}}
    traces, problems = saved(tmp_path, otlp([*model_calls("genai"), other]), False)
    assert sorted(len(t.turns) for t in traces) == [2, 5] and not problems and len({t.trace_id for t in traces}) == 2


def test_model_calls_without_their_messages_are_said(tmp_path):
    bare = [{"id": "m", "name": "chat m", "at": 1, "attributes": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}}]
    traces, problems = saved(tmp_path, otlp(bare), False)
    assert not traces and len(problems) == 1 and "1 of 1 model calls holds no messages" in problems[0]
    traces, problems = saved(tmp_path, otlp([*bare, *model_calls("genai")]), False)
    assert len(traces) == 1 and "1 of 3 model calls holds no messages" in problems[0]


EVENTS = [("gen_ai.system.message", {"content": SYSTEM}), ("gen_ai.user.message", {"content": ASK}), ("gen_ai.assistant.message", {"tool_calls": chat(3)[2]["tool_calls"]}),
          ("gen_ai.tool.message", {"content": RESULT, "id": "c1"}), ("gen_ai.choice", {"index": 0, "message": {"role": "assistant", "content": LAST}})]


@pytest.mark.parametrize("where", ["events", "attribute"])
def test_messages_as_events_of_a_span(tmp_path, where):
    [span] = console([{"id": "m", "name": "chat m", "at": 1, "attributes": {"gen_ai.request.model": "m"}}])
    if where == "events":
        span["events"] = [{"name": name, "attributes": {k: v if isinstance(v, str | int) else json.dumps(v) for k, v in body.items()}} for name, body in EVENTS]
    else:
        span["attributes"]["events"] = json.dumps([{"event.name": name, **body} for name, body in EVENTS])
    [trace], problems = saved(tmp_path, [span], True)
    held(trace)


@pytest.mark.parametrize("text", ['[{"name": "Bonn", "type": "town"}]', '["Bonn"]', '"Bonn"', "[1, 2"])
@pytest.mark.parametrize("form", [otlp, console])
def test_a_result_that_looks_like_blocks_stays_as_it_is(tmp_path, text, form):
    messages = json.loads(json.dumps(chat(5)).replace(json.dumps(RESULT), json.dumps(text)))
    attributes = {"openinference.span.kind": "LLM", **flat(openinference(messages[:4]), "llm.input_messages"), **flat(openinference(messages[4:]), "llm.output_messages")}
    [trace], _ = saved(tmp_path, form([{"id": "m", "name": "chat", "at": 1, "attributes": attributes}]), True)
    assert trace.turns[3].content == text
