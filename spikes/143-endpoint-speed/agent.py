"""An agent of a few lines, in a process of its own as agents are: it plays episodes side by side through an endpoint."""
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from composer_replication.core.environment import load
from composer_replication.core.trace import ToolCall


def play(url: str, task: str, rows: list[dict], turns: int) -> float:
    "Play row i at `/e/i`, all at once. Gives this process's CPU seconds."
    address, began = urlsplit(url), time.process_time()

    def one(number, row):
        world, messages = load(task), list(row["prompt"])
        world.reset(**row)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
        for _ in range(turns):
            body = json.dumps({"model": "policy", "messages": messages, "tools": list(world.tools)})
            connection.request("POST", f"/e/{number}/v1/chat/completions", body, {"Content-Type": "application/json"})
            message = json.load(connection.getresponse())["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or []:
                made = world.call(ToolCall.parse(call["function"]["name"], call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": made.text})
            if messages[-1] is message:
                break
        world.reward(message.get("content") or "")
        connection.close()

    with ThreadPoolExecutor(len(rows)) as pool:
        list(pool.map(one, range(len(rows)), rows))
    return time.process_time() - began


def stream(url: str, body: dict) -> dict[str, float]:
    "Seconds from sending a request to the first event of its stream that carries text or a call, and to the last."
    address, seconds = urlsplit(url), {}
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
    began = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/e/stream/v1/chat/completions", json.dumps(body | {"stream": True}), headers)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            delta = (json.loads(line[6:])["choices"] or [{"delta": {}}])[0]["delta"]
            if delta.get("content") or delta.get("tool_calls"):
                seconds.setdefault("first", time.perf_counter() - began)
    return seconds | {"last": time.perf_counter() - began}
