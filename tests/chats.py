"""Chats and files of them, in few words."""

import json

from composer_replication.traces.formats.base import read_record


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


def written(path, rows):
    "The path, with a line for each row."
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
