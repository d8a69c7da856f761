"""Reading traces from files: every way in which a file can be bad, and memory that does not grow with it."""

import errno
import gzip
import json
import os
import shutil
import threading
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from chats import answered, asked, says

from composer_replication.core.trace import ToolCall, Trace, TraceProblem, Turn, UnknownRole
from composer_replication.traces.export import write_traces
from composer_replication.traces.formats.base import OF_CALL, OF_TRACE, OF_TURN, checked
from composer_replication.traces.read import read_traces
from composer_replication.traces.values import at_rest, open_bytes

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
GOOD = json.dumps(CHAT).encode() + b"\n"


def chat(*messages) -> bytes:
    return json.dumps({"messages": messages}).encode() + b"\n"


def read(path: Path) -> tuple[list[Trace], list[TraceProblem]]:
    "What a file gives, and what was told about it."
    problems: list = []
    return list(read_traces(path, on_problem=problems.append)), problems


@pytest.mark.parametrize("half", ["\\ud83d", "\\udc00", "\\ud83d\\ud83d"])
def test_half_an_emoji_costs_no_line(tmp_path, half):
    "Harnesses cut texts in the middle of a pair; the whole pair beside it stays."
    file = tmp_path / "t.jsonl"
    file.write_bytes(GOOD + GOOD.replace(b"Hi", f"{half} and \\ud83d\\ude00".encode()) + GOOD)
    traces, problems = read(file)
    assert len(traces) == 3 and not problems
    assert traces[1].turns[0].content == "\ufffd" * half.count("u") + " and \U0001f600"


def one_sentence(problem: TraceProblem, path: Path) -> bool:
    "Names the file, ends like a sentence, has a remedy, is one line."
    text = str(problem)
    return text.startswith(str(path)) and text.endswith(".") and "; " in text and "\n" not in text


@pytest.mark.parametrize(
    "name, content, traces, line, words",
    [
        ("empty.jsonl", b"", 0, None, "the file is empty"),
        ("list.json", b"[]", 0, None, "holds no trace"),
        ("lists.jsonl", b"[]\n[ ]\n", 0, None, "holds no trace"),
        ("blank.jsonl", b"\n \n", 0, 1, "no records"),
        ("half.jsonl", GOOD + GOOD[:40], 1, 2, "cut off"),
        ("half_first.jsonl", GOOD[:40] + b"\n" + GOOD + GOOD, 2, 1, "broken"),
        ("half_two.jsonl", GOOD[:40] + b"\n" + GOOD[:30] + b"\n" + GOOD, 1, 1, "broken"),
        ("utf8.jsonl", GOOD + GOOD.replace(b"Hi", b"H\xff") + GOOD, 2, 2, "not UTF-8"),
        ("unknown.jsonl", b'{"a": 1}\n' + GOOD, 1, 1, "no known trace format"),
        ("number.jsonl", b"7\n" + GOOD, 1, 1, "no known trace format (a int)"),
        ("damaged.jsonl", GOOD + chat(says("user", 3)) + GOOD, 2, 2, "content of a message is a int"),
        ("role.jsonl", chat(says("oracle", "x")) + GOOD, 1, 1, "'oracle'"),
        ("text.md", b"# A heading\n\nSome words.\n", 0, 1, "neither JSON nor JSONL"),
        ("binary.bin", bytes(range(256)) * 9, 0, 1, "neither JSON nor JSONL"),
        ("cut.json", b'{\n "messages": [\n  {"role": "user",\n', 0, 1, "cut off|broken"),
        ("loose_result.jsonl", chat({"role": "user", "content": "x"}, answered("7")), 1, 1, "answers no call"),
        ("loose_call.jsonl", chat(asked(("f", "c")), says("user", "well?"), says("assistant", "hm")), 1, 1, "has no result"),
    ],
)
def test_a_bad_file_costs_only_what_is_bad(tmp_path, name, content, traces, line, words):
    path = tmp_path / name
    path.write_bytes(content)
    found, problems = read(path)
    assert len(found) == traces
    assert any(word in str(problems[0]) for word in words.split("|")), problems
    assert problems[0].line == line
    assert all(one_sentence(p, path) for p in problems)
    with pytest.raises(TraceProblem):
        list(read_traces(path, strict=True))


def test_missing_file_and_folder(tmp_path):
    for path, words in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "this is a folder")):
        found, problems = read(path)
        assert not found and words in str(problems[0]) and one_sentence(problems[0], path)


def test_problems_warn_by_default(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(read_traces(tmp_path / "none.jsonl")) == []
    assert "no such file" in str(caught[0].message)


@pytest.mark.parametrize("cut", [1, 8, 30, 400])
def test_truncated_gzip_keeps_what_came_before(tmp_path, cut):
    lines = b"".join(
        json.dumps(CHAT | {"trace_id": f"t{i}", "pad": f"{i:x}" * 40}).encode() + b"\n" for i in range(500)
    )
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(lines)[:-cut])
    found, problems = read(path)
    assert [t.trace_id for t in found] == [f"t{i}" for i in range(len(found))]
    assert len(found) >= (500 if cut <= 8 else 200)
    assert len(problems) == 1 and "gzip stream ends early" in str(problems[0]) and problems[0].line == len(found) + 1


def test_corrupt_gzip(tmp_path):
    packed = bytearray(gzip.compress(GOOD * 400))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "bad.gz").write_bytes(packed)
    found, problems = read(tmp_path / "bad.gz")
    assert problems and all(isinstance(p, TraceProblem) for p in problems) and len(found) <= 400


def test_many_unknown_records_are_told_twice_not_a_thousand_times(tmp_path):
    (tmp_path / "labels.jsonl").write_bytes(b'{"label": 1}\n' * 1000)
    _, problems = read(tmp_path / "labels.jsonl")
    assert len(problems) == 2 and "999 more" in str(problems[1])


@pytest.mark.parametrize(
    "document",
    [
        CHAT,
        CHAT["messages"],
        [CHAT],
        {"history": CHAT["messages"]},
        {"info": {"exit_status": "x", "submission": ""}, "messages": CHAT["messages"]},
        [{"traj": CHAT["messages"], "task_id": 0, "reward": 0.0}],
        {"simulations": [{"id": "s", "messages": CHAT["messages"]}]},
        {"0": {"query": "q", "turn_history": {"actions": ["a"], "observations": ["b"]}}},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_whole_documents(tmp_path, document, indent, bom):
    path = tmp_path / "run.traj.json"
    path.write_bytes(bom + json.dumps(document, indent=indent).encode())
    found, problems = read(path)
    assert len(found) == 1 and not problems
    assert len(found[0].turns) >= 2


def test_gzip_is_known_by_its_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(GOOD))
    (tmp_path / "b.gz").write_bytes(GOOD)
    assert len(read(tmp_path / "a.jsonl")[0]) == len(read(tmp_path / "b.gz")[0]) == 1


def test_a_turn_of_200_000_tokens(tmp_path):
    text = "word " * 200_000
    write_traces([Trace("long", (Turn("user", text), Turn("assistant", "ok")))], tmp_path / "long.jsonl.gz")
    found, problems = read(tmp_path / "long.jsonl.gz")
    assert not problems and found[0].turns[0].content == text


def peak(path: Path) -> int:
    "Bytes that Python held at most while the file was read."
    tracemalloc.start()
    for _ in read_traces(path, strict=True):
        pass
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_memory_does_not_grow_with_the_file(tmp_path):
    row = (
        orjson.dumps(
            CHAT
            | {"messages": [{"role": "user", "content": "x" * 900}, {"role": "assistant", "content": "y" * 900}] * 5}
        )
        + b"\n"
    )
    for name, times in (("one", 200), ("ten", 2000)):
        (tmp_path / name).write_bytes(gzip.compress(row * times, 1))
    peak(tmp_path / "one")  # imports and caches
    one, ten = peak(tmp_path / "one"), peak(tmp_path / "ten")
    assert ten < 1.2 * one, (one, ten)


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_bytes(GOOD + b"{broken\n")
    assert next(read_traces(path, strict=True)).trace_id == "two"


def test_records_after_a_session_line_are_not_swallowed(tmp_path):
    session = {"type": "user", "sessionId": "s", "uuid": "u1", "parentUuid": None,
               "message": {"role": "user", "content": "Hello"}}
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(r) for r in (session, chat, chat)))
    assert len([t for t in read_traces(path, on_problem=lambda p: None) if len(t.turns) == 2]) == 2


def test_sampled_tokens_are_whole_numbers_as_many_as_logprobs(tmp_path):
    turn = {"role": "assistant", "content": "a", "token_ids": [1, 2], "logprobs": [-.1, -.2]}
    path = tmp_path / "own.jsonl"
    for wrong in ({}, {"token_ids": [1.5, 2]}, {"token_ids": [-5, 2]}, {"logprobs": [-.1]}):
        path.write_bytes(orjson.dumps({"schema": "composer-trace/1", "trace_id": "t", "format": "composer",
                                       "turns": [{"role": "user", "content": "q"}, turn | wrong]}))
        assert len(list(read_traces(path, on_problem=lambda p: None))) == (not wrong), wrong


@pytest.mark.parametrize("text, says", [
    ("[project]\nname = 1\n", "this is neither JSON nor JSONL"), ("{% x %}\n", "this is neither JSON nor JSONL"),
    ("[{]\n", "the JSON is broken"), ('{"a": 1,, }\n', "the JSON is broken"), ("[\n1,\n", "the JSON is")])
def test_what_cannot_begin_json_is_not_called_json(tmp_path, text, says):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert says in str(read(path)[1][0])


FORMS = {
    "lines": GOOD * 2000,
    "one list": json.dumps([CHAT] * 2000).encode(),
    "pretty": json.dumps([CHAT] * 2000, indent=1).encode(),
    "gzip": gzip.compress(GOOD * 2000),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_pipe_is_read_whole(form):
    out, into = os.pipe()
    writer = threading.Thread(target=lambda: Path(f"/dev/fd/{into}").write_bytes(FORMS[form]) and os.close(into), daemon=True)
    writer.start()
    traces, problems = read(Path(f"/dev/fd/{out}"))
    os.close(out)
    assert len(traces) == 2000 and not problems


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", [GOOD * 3, json.dumps([CHAT] * 3, indent=1).encode()])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_utf_16_with_its_mark_is_read(tmp_path, order, text, pack):
    file = tmp_path / "t.json"
    file.write_bytes(pack(("\ufeff" + text.decode().replace("Hi", "Hü")).encode(order)))
    traces, problems = read(file)
    assert [t.turns[0].content for t in traces] == ["Hü"] * 3 and not problems


def test_records_of_no_format_hide_no_damage(tmp_path):
    "Many records of no known format are counted; what else is wrong beside them, on the same line too, is told."
    damaged = {"messages": [{"role": "known trace format", "content": "Hi"}]}
    file = tmp_path / "t.jsonl"
    file.write_bytes(json.dumps([{"a": 1}, {"b": 2}, damaged, damaged, CHAT]).encode() + b"\n" + GOOD)
    traces, problems = read(file)
    roles = [problem for problem in problems if isinstance(problem, UnknownRole)]
    assert len(traces) == 2 and [problem.role for problem in roles] == ["known trace format"] * 2
    assert len(problems) == 4 and "1 more record is of no known trace format" in problems[-1].what
    assert all(str(problem).startswith(f"{file}, line 1: ") for problem in problems)


CALLED = Turn("assistant", "x", tool_calls=(ToolCall("f", {}, "c"),), token_ids=(1,), logprobs=(-0.5,))
WRONG = [(field, [], "the trace") for field in OF_TRACE] + [(field, [], "message -1") for field in OF_TURN]
WRONG += [(field, [], "a call of message -1") for field in OF_CALL]
SAMPLED = [("token_ids", (-1,)), ("forced", (0.5,)), ("logprobs", ("x",)), ("logprobs", ())]
WRONG += [(field, value, "message -1") for field, value in SAMPLED]


@pytest.mark.parametrize("field,value,where", WRONG)
def test_a_field_of_a_wrong_type_is_named(field, value, where):
    trace = Trace("t", (Turn("user", "Go."), CALLED))
    assert checked(trace) is trace
    if where == "the trace":
        trace = replace(trace, **{field: value})
    else:
        changed = {"tool_calls": (replace(CALLED.tool_calls[0], **{field: value}),)} if "call" in where else {field: value}
        trace = replace(trace, turns=(trace.turns[0], replace(CALLED, **changed)))
    with pytest.raises(TypeError, match=f"^`{field}` of {'' if field == 'source_index' else where}"):
        checked(trace)


@pytest.mark.parametrize("content", [GOOD, gzip.compress(GOOD), GOOD.decode().encode("utf-16")], ids=["plain", "gzip", "utf-16"])
def test_only_what_reading_raises_says_that_a_file_cannot_be_read(tmp_path, monkeypatch, content):
    path, full = tmp_path / "t.jsonl", OSError(errno.ENOSPC, "No space left on device")
    path.write_bytes(content)

    def fails(*_):
        raise full

    def copied(path):
        monkeypatch.setattr(shutil, "copyfileobj", fails)
        return at_rest(path)

    for opened in (open_bytes, at_rest, copied):
        with pytest.raises(OSError) as raised, opened(path):
            raise full
        assert raised.value is full


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc/self/mem, which opens and cannot be read")
def test_a_file_whose_reading_fails_is_named():
    traces, [problem] = read(Path("/proc/self/mem"))
    assert not traces and "the file cannot be read (Input/output error)" in str(problem)
