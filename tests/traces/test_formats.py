"""Foreign formats: Claude Code sessions against hand-written expectations, and damaged records of every format."""

import copy
import json
import math
from pathlib import Path

import orjson
import pytest
from chats import answered, came_back, says, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_replication.core.plugins import plugin_names
from composer_replication.core.trace import ToolCall, Trace, TraceProblem, Turn
from composer_replication.traces.calls import command_of
from composer_replication.traces.chat.fields import with_tools
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.traces.formats.base import FORMATS, known_formats, read_record, register_format
from composer_replication.traces.formats.mini_swe_agent import returned
from composer_replication.traces.read import loose_ends, read_traces

CLAUDE = Path(__file__).parents[1] / "fixtures" / "claude_code"

CALLS_MADE = [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": [1, {"b": null}]}'}}]
CALL, RESULT = says("assistant", "I look.", tool_calls=CALLS_MADE), answered("Error: nothing here")
HEAD = {"trace_id": "t", "source": "s", "model": "m", "task_id": 1, "reward": 0.5}
OWN = (
    Turn("user", "U"),
    Turn("assistant", "A", "R", (ToolCall("f", {"x": 1}, "c"),)),
    Turn("tool", "Error", tool_call_id="c", observation=True, failed=True),
)
SOLUTION = (
    '## Documentation\nfind: F.\nParameters: {"k": "v"}\n\n## Task Instruction\nI\n\n## Standard Answer\n1. x\n\n'
    "## AI Assistant's Solution\n1. Function: find\nParameters: {}\nRetruns: Status Code: 404. Response: no\n"
    "2. Final Response: F\n"
)
RECORDS = {
    "openai": HEAD
    | {
        "messages": [says("system", "S"), says("user", "U"), CALL, RESULT],
        "info": {"task": {"actions": [{"name": "x", "kwargs": {}}]}},
        "tools": [{"name": "find"}],
    },
    "tau2": HEAD
    | {
        "messages": [
            says("assistant", None, turn_idx=0, tool_calls=[{"id": "a", "name": "f", "arguments": {"x": 1}}]),
            says("tool", "Error: no", id="a", error=True, requestor="assistant"),
        ],
        "reward_info": {"action_checks": [{"action": {"name": "f"}}]},
    },
    "mini-swe-agent": HEAD
    | {
        "exit_status": "Submitted",
        "submission": "d",
        "messages": [
            says("user", "U"),
            says("assistant", reasoning_content="R", tool_calls=CALLS_MADE),
            answered("<returncode>2</returncode>\n<output>\nbad\n</output>"),
            says("exit", "d"),
        ],
    },
    "anthropic": HEAD
    | {
        "system": "S",
        "env_tool_results": [{"message_index": 2, "tool_use_id": "c", "matched": True, "fail_reason": "invalid_path"}],
        "messages": [
            says("user", "U"),
            says(
                "assistant",
                [{"type": "thinking", "thinking": "R"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"p": 1}}],
            ),
            says(
                "user",
                [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "no"}], "is_error": True}],
            ),
        ],
    },
    "swe-agent": HEAD
    | {
        "raw": {
            "history": [
                says("system", "S"),
                says("user", "demo", is_demo=True),
                says("user", "U"),
                says("assistant", "I edit.\n```\nedit\n```", thought="I edit.", action="edit"),
                says("user", "Your proposed edit has introduced new syntax error(s)."),
            ]
        }
    },
    "intercode": HEAD
    | {
        "query": "Q",
        "turn_history": {
            "actions": ["SELECT", "submit"],
            "thoughts": ["T", "T"],
            "rewards": [0, 0],
            "valid_action": [False, True],
            "observations": ["Error executing query: Unknown column 'x' in 'field list'"] * 2,
        },
    },
    "toolbench": HEAD
    | {
        "functions": [{"name": "now", "parameters": {}}],
        "query": "Q",
        "train_messages": [
            [
                says("user", "U"),
                says("assistant", None, function_call={"name": "now", "arguments": "{}"}),
                says("function", '{"error": "Timeout", "response": ""}', name="now"),
            ]
        ],
    },
    "toolalpaca": HEAD | {"raw": {"output": "o", "input": [says("user", SOLUTION)]}},
    "bfcl": HEAD
    | {
        "raw": {
            "id": "b",
            "valid": False,
            "error": ["E"],
            "error_type": "ast_decoder:decoder_failed",
            "model_result_raw": "prose",
            "prompt": {"question": [[says("user", "U")]], "function": [{"name": "f", "parameters": {"type": "dict"}}]},
            "possible_answer": [{"f": {}}],
        }
    },
    "verifiers": {
        "version": 1,
        "verifiers": {"version": "0.4.0"},
        "id": "t",
        "task": {"data": {"id": 1}},
        "agent": {"config": {"model": "m"}},
        "nodes": [
            {"message": says("user", "U")},
            {"parent": 0, "message": says("assistant", "left")},
            {"parent": 0, "message": {"role": "assistant", "tool_calls": [{"id": "c1", "name": "find", "arguments": "{}"}]}},
            {"parent": 2, "message": answered("Error: nothing here", name="find")},
        ],
        "rewards": {"tests": {"score": 1.0, "weight": 0.5}, "style": None},
        "tools": [{"type": "function", "name": "find", "parameters": {}}],
    },
    "composer": orjson.loads(Trace("t", OWN, gold="g", reward=1.0).to_json()),
}


@pytest.mark.parametrize("name", RECORDS)
def test_each_format_is_recognised_and_its_failure_found(name):
    trace = read_record(RECORDS[name])
    assert trace.format == name
    if name == "composer":
        return
    assert (trace.trace_id, trace.model, trace.task_id, trace.reward) == ("t", "m", "1", 0.5)
    sites = find_error_sites(trace)
    assert len(sites) == 1 and trace.turns[sites[0].turn].role == "assistant"
    assert loose_ends(trace) is None
    assert Trace.from_json(trace.to_json()) == trace


def test_tool_blocks_are_seen_however_late_the_first_one_comes():
    talk = [{"role": role, "content": [{"type": "text", "text": "So?"}]} for role in ("user", "assistant")] * 20
    record = RECORDS["anthropic"] | {"messages": talk + RECORDS["anthropic"]["messages"]}
    assert len(find_error_sites(read_record(record))) == 1


def test_anthropics_tool_schemas_are_read():
    schema = {"type": "object", "properties": {"p": {"type": "integer"}}, "required": ["p"]}
    record = RECORDS["anthropic"] | {"tools": [{"name": "f", "description": "F.", "input_schema": schema}]}
    wanted = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": schema}}
    assert read_record(record).tools == (wanted,)
    assert with_tools(read_record(RECORDS["anthropic"]), record["tools"]).tools == (wanted,)


def test_rewards_stand_where_a_harness_writes_them_itself():
    def without(name):
        return {key: value for key, value in RECORDS[name].items() if key != "reward"}

    assert read_record(without("tau2") | {"reward_info": {"reward": 1.0, "action_checks": None}}).reward == 1.0
    assert read_record(RECORDS["tau2"] | {"reward_info": {"reward": 1.0}}).reward == 0.5  # the record's own comes first
    assert read_record(without("intercode") | {"summary": {"max_reward": 0.25}}).reward == 0.25
    assert read_record(without("tau2") | {"reward_info": None}).reward is None


def test_gold_is_the_reference_and_nothing_else():
    gold = {name: read_record(record).gold for name, record in RECORDS.items()}
    known = {
        "openai": '[{"name":"x","kwargs":{}}]',
        "tau2": '[{"name":"f"}]',
        "toolalpaca": "1. x",
        "bfcl": '[{"f":{}}]',
        "composer": "g",
    }
    assert gold == dict.fromkeys(RECORDS) | known


def values(record, path=()):
    "The path of every value inside a JSON value."
    if path:
        yield path
    for key, value in record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ():
        yield from values(value, (*path, key))


def mutate(record, path, kind, junk):
    "The record with the value at a path replaced, left out or cut short."
    record = copy.deepcopy(record)
    inside = record
    for key in path[:-1]:
        inside = inside[key]
    old = inside[path[-1]]
    if kind == "drop":
        del inside[path[-1]]
    elif kind == "cut" and isinstance(old, str | list):
        inside[path[-1]] = old[: len(old) // 2]
    else:
        inside[path[-1]] = junk
    return record


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.sampled_from(["assistant", "tool", "text", "tool_use", "{", '{"a"']),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "type", "text", "name", "content", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_record_gives_a_trace_or_a_trace_problem(data):
    record = RECORDS[data.draw(st.sampled_from(sorted(RECORDS)))]
    for _ in range(data.draw(st.integers(1, 3))):
        paths = list(values(record))
        if not paths:
            break
        record = mutate(
            record, data.draw(st.sampled_from(paths)), data.draw(st.sampled_from(["drop", "cut", "junk"])), data.draw(JUNK)
        )
    try:
        trace = read_record(record)
    except TraceProblem as problem:
        assert "\n" not in str(problem)
        return
    assert Trace.from_json(trace.to_json()) == trace
    loose_ends(trace)
    for site in find_error_sites(trace):
        assert trace.turns[site.turn].role == "assistant" and site.turn <= site.evidence_turn
        assert (site.message_index, site.evidence_index) == (
            trace.turns[site.turn].source_index,
            trace.turns[site.evidence_turn].source_index,
        )


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_session_gives_traces_or_problems(tmp_path_factory, data):
    rows = [json.loads(line) for line in (CLAUDE / "session.jsonl").read_text().splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        rows = mutate(
            rows,
            data.draw(st.sampled_from(list(values(rows)))),
            data.draw(st.sampled_from(["drop", "cut", "junk"])),
            data.draw(JUNK),
        )
    path = tmp_path_factory.mktemp("claude") / "s.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    problems: list = []
    for trace in read_traces(path, on_problem=problems.append):
        find_error_sites(trace)
    assert all(isinstance(p, TraceProblem) for p in problems)


def test_claude_code_session():
    trace, side = read_traces(CLAUDE / "session.jsonl", strict=True)
    assert side.trace_id.startswith(trace.trace_id + "/") and "/nowhere" in repr(side.turns)
    read = "user user assistant tool assistant tool tool user assistant tool assistant tool assistant".split()
    assert [t.role for t in trace.turns] == read
    assert [t.source_index for t in trace.turns] == [2, 3, 4, 7, 8, 11, 12, 18, 19, 21, 24, 25, 26]
    first, both = trace.turns[2], trace.turns[4]
    assert (first.content, first.thinking) == ("I read the file.", "The file should be in the project. I read it first.")
    assert [c.name for c in both.tool_calls] == ["Glob", "Bash"]  # one message in three lines, its results on two branches
    everything = repr(trace.turns)
    for unseen in ("/nowhere", "Write", "529 overloaded"):  # side-chain, rewound branch, the service's own error
        assert unseen not in everything
    assert trace.trace_id.endswith("0001") and trace.model.startswith("claude-sonnet")


def test_claude_code_sites():
    trace, _ = read_traces(CLAUDE / "session.jsonl", strict=True)
    sites = [(s.message_index, s.evidence_index, s.kind, s.context.tool_name) for s in find_error_sites(trace)]
    # `grep -c` with exit code 1 and no output (line 12) is no error, the others are.
    assert sites == [(4, 7, "runtime_error", "Read"), (19, 21, "runtime_error", "Bash"), (24, 25, "tool_not_found", "Counter")]


def test_claude_code_call_whose_line_is_off_the_path(tmp_path):
    rows = [json.loads(line) for line in (CLAUDE / "session.jsonl").read_text().splitlines()]
    end = next(
        i for i, r in enumerate(rows) if r.get("uuid") == "u4"
    )  # the results of the two calls end the file, the second's first
    rows = [*rows[: end - 1], rows[end], rows[end - 1]]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace, *_ = read_traces(tmp_path / "s.jsonl", strict=True)
    assert [c.name for c in trace.turns[4].tool_calls] == ["Glob", "Bash"]
    assert [t.tool_call_id for t in trace.turns[5:]] == ["toolu_03", "toolu_02"]


def test_the_tau2_user_s_own_tools_are_left_out():
    reboot = {"id": "u", "name": "reboot", "arguments": {}, "requestor": "user"}
    talk = [says("user", "Hi", turn_idx=0), says("user", None, tool_calls=[reboot])]
    talk += [says("tool", "Error: phone is off", id="u", error=True, requestor="user"), says("assistant", "I see.")]
    trace = read_record({"messages": talk})
    assert [(t.role, t.source_index) for t in trace.turns] == [("user", 0), ("assistant", 3)] and find_error_sites(trace) == []


def test_claude_code_compacted_session_is_two_traces():
    before, after = read_traces(CLAUDE / "compacted.jsonl", strict=True)
    assert [len(before.turns), len(after.turns)] == [2, 4]
    assert after.trace_id == before.trace_id + "#2" and "continued" in after.turns[0].content


def test_claude_code_side_chain_alone_is_a_trace():
    [trace] = read_traces(CLAUDE / "sidechain.jsonl", strict=True)
    assert "/" in trace.trace_id and {"user", "assistant"} <= {t.role for t in trace.turns}


HEAD_AND_TAIL = (
    "<returncode>{}</returncode>\n<warning>\nThe output was too long.\n</warning><output_head>\n"
    "ERROR collecting tests/a.py\n</output_head>\n<elided_chars>\n9000 characters elided\n</elided_chars>\n"
    "<output_tail>\n1 error in 2s\n</output_tail>"
)


@pytest.mark.parametrize("code", [1, 2])
def test_a_long_failing_output_of_mini_swe_is_read(code):
    turns = came_back(HEAD_AND_TAIL.format(code), "bash", {"command": "pytest"})
    found = returned(Trace("t", turns, format="mini-swe-agent"), 1)
    assert found and "no output" not in found.message and ("ERROR collecting" in found.message or "1 error" in found.message)


def test_the_command_of_a_mini_swe_agent_that_writes_text_counts():
    turns = (
        Turn("assistant", "Compare.\n\n```bash\ndiff a b\n```"),
        Turn("user", "<returncode>1</returncode>\n<output>\n1c1\n< a\n</output>", observation=True),
    )
    assert command_of(Trace("t", turns), 1) == "diff a b" and returned(Trace("t", turns), 1).kind is None


def test_own_lines_that_other_tools_rewrote_are_read(tmp_path):
    turns = (Turn("user", "Go."), Turn("assistant", "a", token_ids=(1, 2), logprobs=(-0.5, -math.inf)))
    bare = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    row = json.loads(Trace("t", turns, tools=(bare,), reward=1.0).to_json())
    written(tmp_path / "own.jsonl", [row | {"reward": reward} for reward in (1, True, math.nan)])
    read = list(read_traces(tmp_path / "own.jsonl", strict=True))
    assert [t.reward for t in read] == [1.0, 1.0, None] and all(type(t.reward) is not int for t in read)
    assert read[0].turns == turns and read[0].tool_names == ("f",) and Trace.from_json(read[0].to_json()) == read[0]


def test_a_chat_whose_task_is_text_and_whose_tools_are_built_in_is_read():
    messages = [says("user", "U"), says("assistant", "A"), says("tool", error="Timeout")]
    tools = [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}]
    record = {"messages": messages, "info": {"task": "fix it"}, "tools": tools}
    trace = read_record(record)
    assert trace.tool_names == ("f",) and trace.turns[2].failed and trace.turns[2].fail_reason == "Timeout"


def test_parents_in_a_circle_end():
    rows = [json.loads(line) for line in (CLAUDE / "compacted.jsonl").read_text().splitlines()[:2]]
    rows[0]["parentUuid"] = rows[1]["uuid"]
    from composer_replication.traces.formats.claude_code import traces_of_session

    assert len(list(traces_of_session(list(enumerate(rows)), "x"))) >= 1


def test_a_format_of_one_s_own_may_be_spread_over_lines_or_packed(tmp_path):
    @register_format("spread", lambda record: "event" in record, lines=True)
    def read_spread(lines, trace_id):
        turns = tuple(Turn("user", record.get("event", "?"), source_index=at) for at, record in lines)
        yield Trace(trace_id, turns, format="spread")

    @register_format("packed", lambda record: "said" in record, unpack=lambda value: value.get("all"))
    def read_packed(record, trace_id):
        return Trace(trace_id, (Turn("user", record["said"]),), format="packed")

    try:
        (tmp_path / "s.jsonl").write_text('{"event": "x"}\n{"other": 1}\n{"event": "y"}\n')
        [trace] = read_traces(tmp_path / "s.jsonl", strict=True)
        assert [(t.content, t.source_index) for t in trace.turns] == [("x", 0), ("?", 1), ("y", 2)]
        (tmp_path / "p.json").write_text('{"all": [{"said": "one"}, {"said": "two"}]}')
        assert [t.turns[0].content for t in read_traces(tmp_path / "p.json", strict=True)] == ["one", "two"]
        with pytest.raises(TraceProblem, match="no known trace format"):
            read_record({"event": "a line alone is no trace"})
    finally:
        FORMATS[:] = [known for known in FORMATS if known.name not in ("spread", "packed")]


def test_every_module_of_the_folder_is_one_format_and_no_record_is_of_two():
    from pathlib import Path

    from composer_replication.traces import formats

    modules = {path.stem for path in Path(formats.__path__[0]).glob("*.py")} - {"__init__", "base"}
    contributed = plugin_names("format")
    known = known_formats()
    assert {f.name.replace("-", "_") for f in known} == modules | {*contributed} and known[-1].name == "openai"
    assert max(n for n, f in enumerate(known) if not f.last and f.name not in contributed) < min(
        n for n, f in enumerate(known) if f.name in contributed), "one's own are asked before those of contributions"
    for name, record in RECORDS.items():
        mine = []
        for f in known[:-1]:
            try:
                mine += [f.name] * bool(f.matches(record))
            except Exception:  # a format may trip over another's record
                continue
        assert len(mine) <= 1, (name, mine)


def test_with_tools_makes_an_unknown_name_tool_not_found():
    trace = read_record(RECORDS["openai"] | {"tools": []})
    assert find_error_sites(trace)[0].kind == "runtime_error"
    site = find_error_sites(with_tools(trace, [{"name": "search", "parameters": {}}]))[0]
    assert (site.kind, site.context.available_tools, site.context.tool_schema) == ("tool_not_found", ("search",), None)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ARGUMENTS = st.dictionaries(
    TEXT,
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    max_size=3,
)
CALLS = st.builds(ToolCall, TEXT, ARGUMENTS | TEXT, st.none() | TEXT)
TURNS = st.one_of(
    st.builds(Turn, st.sampled_from(["system", "user"]), TEXT),
    st.builds(
        Turn,
        st.just("assistant"),
        TEXT,
        st.none() | TEXT,
        st.lists(CALLS, max_size=2).map(tuple),
        token_ids=st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    st.builds(
        Turn, st.just("tool"), TEXT, tool_call_id=st.none() | TEXT, observation=st.booleans(), failed=st.none() | st.booleans()
    ),
)
TRACES = st.builds(
    Trace,
    TEXT.filter(bool),
    st.lists(TURNS, min_size=1, max_size=5).map(tuple),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    gold=st.none() | TEXT,
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(TRACES, max_size=4), st.sampled_from(["a.jsonl", "a.jsonl.gz"]))
def test_our_own_format_is_lossless(tmp_path_factory, traces, name):
    path = tmp_path_factory.mktemp("own") / name
    assert write_traces(traces, path) == len(traces)
    assert list(read_traces(path, on_problem=lambda p: None)) == traces


HUGE = 10**400  # no float holds it


@pytest.mark.parametrize("name", RECORDS)
def test_a_number_that_no_float_holds_is_a_problem_of_its_record(tmp_path, name):
    def with_huge_number(value):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
            number = isinstance(inner, int | float) and not isinstance(inner, bool)
            for changed in [HUGE] if number else with_huge_number(inner):
                yield {**value, key: changed} if isinstance(value, dict) else [*value[:key], changed, *value[key + 1:]]

    for record in with_huge_number(RECORDS[name]):
        problems = []
        traces = list(read_traces(written(tmp_path / "t.jsonl", [record]), on_problem=problems.append))
        assert problems if record.get("reward") == HUGE else traces or problems


@pytest.mark.parametrize("nothing", [{}, {"task_id": None, "reward": None}])
def test_a_column_that_holds_nothing_is_as_one_that_is_absent(tmp_path, nothing):
    "Rows of a table have every column."
    row = {"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Done."}],
           "instance_id": "repo-1", "resolved": True} | nothing
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    trace, = read_traces(str(tmp_path / "rows.jsonl"))
    assert (trace.task_id, trace.reward) == ("repo-1", 1.0)
