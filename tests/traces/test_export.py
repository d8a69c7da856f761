"""Writing: all or nothing, the same bytes twice, and arguments that Arrow does not mix."""

import signal
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.traces.export import to_dataset, write_traces
from composer_replication.traces.read import read_traces

TRACES = [
    Trace(f"t{i}", (Turn("user", "Hi"), Turn("assistant", "", "think", (ToolCall("f", {f"k{i}": i}, "c"),)))) for i in range(3)
]


def test_a_kill_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    write_traces(TRACES, path)
    code = (
        "import itertools, sys\nfrom composer_replication.traces.export import write_traces\n"
        "from composer_replication.core.trace import Trace, Turn\n"
        "def forever():\n  for i in itertools.count():\n    if i == 9: print('writing', flush=True)\n"
        "    yield Trace(str(i), (Turn('user', 'x' * 999),))\n"
        "write_traces(forever(), sys.argv[1])"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"writing\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait(100)
    child.stdout.close()
    assert list(read_traces(path)) == TRACES


def test_arguments_stay_apart_through_disk(tmp_path):
    from datasets import load_from_disk

    to_dataset(TRACES).save_to_disk(tmp_path / "d")
    rows = load_from_disk(tmp_path / "d")
    for i, row in enumerate(rows):
        call = row["messages"][1]["tool_calls"][0]["function"]
        assert call == {"name": "f", "arguments": {f"k{i}": i}}  # not {"k0": None, "k1": 1, "k2": None}
        assert row["messages"][1]["reasoning_content"] == "think"


def test_gold_stays_out():
    assert "secret" not in repr(to_dataset([Trace("t", (Turn("user", "Hi"),), gold="secret")])[:])


@pytest.mark.data
def test_trl_renders_the_columns(shared_data):
    "What TRL makes of a row is what the tokenizer makes of the trace, on real airline traces with their tools."
    import orjson
    from transformers import AutoTokenizer
    from trl import apply_chat_template

    from composer_replication.traces.chat.fields import with_tools

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "qwen2.5")
    tools = orjson.loads((shared_data / "traces" / "tool_schemas.json").read_bytes())["taubench_airline"]
    traces = [
        with_tools(t, tools)
        for _, t in zip(range(3), read_traces(shared_data / "traces" / "taubench_airline_gpt4o.jsonl.gz"), strict=False)
    ]
    for trace, row in zip(traces, to_dataset(traces), strict=True):
        text = apply_chat_template({"messages": row["messages"]}, tokenizer, tools=row["tools"])["text"]
        assert text == tokenizer.apply_chat_template(trace.to_messages(), tools=list(trace.tools), tokenize=False)
        assert "book_reservation" in text  # the tools
        calls = [c for t in trace.turns for c in t.tool_calls]
        assert text.count('"arguments": {') == len(calls)  # objects, not strings


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), min_size=1, max_size=3))
def test_any_arguments_survive(arguments):
    traces = [Trace("t", (Turn("assistant", tool_calls=(ToolCall("f", a),)),)) for a in arguments]
    back = [row["messages"][0]["tool_calls"][0]["function"]["arguments"] for row in to_dataset(traces)]
    assert len(back) == len(arguments)
    for a, b in zip(arguments, back, strict=True):
        assert same(a, b), (a, b)


def same(a, b) -> bool:
    "Equal, floats up to the last digit (the decoder of `datasets` is one unit off at times)."
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, int | float):
        return a == pytest.approx(b, rel=1e-12, abs=1e-300)
    return type(a) is type(b) and a == b
