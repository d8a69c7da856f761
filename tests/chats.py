"""Chats and files of them, in few words."""

import json

from composer_replication.core.trace import ToolCall, Turn
from composer_replication.traces.formats.base import read_record
from composer_replication.traces.read import read_traces


def says(role, content="", **fields):
    "A chat message."
    return {"role": role, "content": content} | fields


def chat_of(*messages):
    "A trace of a chat that begins with a word of the user."
    return read_record({"messages": [says("user", "Go."), *messages]})


def asked(*calls):
    "A message that makes calls, each a name and an id or None."
    return says(
        "assistant",
        tool_calls=[{"function": {"name": name, "arguments": "{}"}} | ({"id": id} if id else {}) for name, id in calls],
    )


def answered(content, id="c1", **fields):
    "A message of role tool."
    return says("tool", content, tool_call_id=id) | fields


def came_back(answer, tool="bash", given=None, **fields):
    "The turns of a call and its result."
    call = Turn("assistant", tool_calls=(ToolCall(tool, {} if given is None else given, "c"),))
    return call, Turn("tool", answer, tool_call_id="c", observation=True, **fields)


def written(path, rows):
    "The path, with a line for each row."
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def saved(folder, value, name):
    "A file with bytes, with a line for each row where its name says so, or else with one document."
    path = folder / name
    if isinstance(value, list) and name.endswith("l"):
        return written(path, value)
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def read(folder, value, name="t.json"):
    "The traces of a file with this content, where nothing is wrong with it."
    return list(read_traces(saved(folder, value, name), strict=True))


def problems_of(folder, value, name="t.json", traces=0):
    "What is said of a file that gives so many traces."
    problems = []
    assert len(list(read_traces(saved(folder, value, name), on_problem=problems.append))) == traces
    return [str(problem) for problem in problems]
