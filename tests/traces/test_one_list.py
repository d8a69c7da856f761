"""A list of traces is read one by one: as the same traces in lines, in memory that does not grow, up to a break."""
import gzip
import json
import tracemalloc

import pytest

from composer_replication.core.trace import TraceProblem
from composer_replication.traces.read import read_traces, read_values

CHATS = [{"messages": [{"role": "user", "content": f'{i} "[{{\\ é\u2028' + "x" * (i % 7)},
                       {"role": "assistant", "content": "]}, ["}]} for i in range(40)]


def contents(path, **options):
    problems = []
    traces = read_traces(path, on_problem=problems.append, **options)
    return [[(turn.role, turn.content) for turn in trace.turns] for trace in traces], problems


@pytest.mark.parametrize("indent", [None, 0, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf", b"\n \n"])
def test_a_list_gives_what_its_lines_give(tmp_path, indent, packed, mark):
    text = mark + json.dumps(CHATS, indent=indent, ensure_ascii=bool(indent)).encode()
    (tmp_path / "list.json").write_bytes(gzip.compress(text) if packed else text)
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    whole, problems = contents(tmp_path / "list.json")
    assert whole == contents(tmp_path / "lines.jsonl")[0] and len(whole) == 40 and not problems
    ids = [trace.trace_id for trace in read_traces(tmp_path / "list.json")]
    assert ids[:3] == ["list", "list-1-1", "list-1-2"] and len(set(ids)) == 40


@pytest.mark.parametrize("damage, kept, said", [
    (lambda text: text[:len(text) // 2], 19, "cut off"),
    (lambda text: text.replace('{"messages"', '{messages', 9).replace("{messages", '{"messages"', 8), 8,
     "value 9 of the list is broken"),
    (lambda text: text[:-1], 40, "cut off"),
    (lambda text: text + " and more", 40, "something else stands behind"),
    (lambda text: text[:-1] + ', {"messages": nope}]', 40, "cut off or broken behind value 40 (the next: "),
])
def test_what_came_before_a_break_is_read_and_the_break_is_said(tmp_path, damage, kept, said):
    path = tmp_path / "list.json"
    path.write_text(damage(json.dumps(CHATS)))
    whole, problems = contents(path)
    assert abs(len(whole) - kept) <= 1 and [said in str(problem) for problem in problems] == [True]
    with pytest.raises(TraceProblem):
        contents(path, strict=True)


@pytest.mark.parametrize("other", ["null", "7", "1234567", "-1.5e3", "[]", "\"text\"", "true", "{\"foo\": 1}"])
@pytest.mark.parametrize("before", [None, 1, 2, 3])  # characters of the value that the first block still holds
def test_other_values_of_a_list_are_said_and_the_rest_is_read(tmp_path, other, before):
    path = tmp_path / "list.json"
    text = json.dumps(CHATS)
    spaces = 0 if before is None else (1 << 18) - before - len(text)
    path.write_text(f"{text[:-1]},{' ' * spaces}{other}, {text[1:]}")
    whole, problems = contents(path)
    assert len(whole) == 80 and len(problems) == 1


def test_bytes_that_are_no_text_are_said(tmp_path):
    path = tmp_path / "list.json"
    path.write_bytes(json.dumps(CHATS).encode()[:-1] + b', "\xff"]' + b" " * 300)
    whole, [problem] = contents(path)
    assert "UTF-8" in str(problem)


@pytest.mark.parametrize("value", [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],  # one chat
                                   [[{"role": "user", "content": "Hi"}]], [1, 2], []])
def test_a_list_of_anything_else_is_read_whole(tmp_path, value):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(value))
    assert list(read_values(path)) == [(1, value)]


def test_a_long_list_needs_the_memory_of_one_trace(tmp_path):
    def most(count):
        path = tmp_path / f"{count}.json"
        with path.open("w") as file:
            file.write("[")
            for i in range(count):
                file.write(("," if i else "") + json.dumps({"messages": [{"role": "user", "content": f"{i} " + "x" * 20_000}]}))
            file.write("]")
        tracemalloc.start()
        assert sum(1 for _ in read_traces(path)) == count
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    assert most(1_600) < 1.5 * most(200)
