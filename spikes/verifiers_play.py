"""Play a scripted agent through `vf-eval`, which asks it over HTTP and runs the tools in their own process.

PRIME-RL plays from outside: verifiers starts an agent that speaks to a model over HTTP, and the tools in their own process. The
scripts stand behind such an endpoint, told apart by what the user asks.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from composer_replication.contrib.verifiers import tasksets
from composer_replication.contrib.verifiers.tasks import Source, row_parts
from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import Trace
from composer_replication.traces.read import read_traces


@dataclass(frozen=True)
class Script:
    "What a scripted agent does, whatever comes back."

    calls: tuple[tuple[str, dict[str, Any]], ...]  # one a turn: a tool's name, its arguments
    answer: str  # the last turn


def _completion(script: Script, said: int, model: str) -> tuple[dict, str]:
    "The message that comes after so many of the assistant's, and why it ends."
    if said >= len(script.calls):
        return {"role": "assistant", "content": script.answer}, "stop"
    name, arguments = script.calls[said]
    call = {"index": 0, "id": f"call_{said}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"


class _Completions(BaseHTTPRequestHandler):
    "Chat completions, in one piece or as a stream of one piece."

    protocol_version, timeout = "HTTP/1.1", 60

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        user = next(m["content"] for m in asked["messages"] if m["role"] == "user")
        said = sum(m["role"] == "assistant" for m in asked["messages"])
        message, reason = _completion(self.server.scripts[user], said, asked["model"])
        head = {"id": "0", "created": 0, "model": asked["model"]}
        if asked.get("stream"):
            pieces = [{"index": 0, "delta": message, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": reason}]
            chunks = [json.dumps(head | {"object": "chat.completion.chunk", "choices": [piece]}) for piece in pieces]
            body, kind = "".join(f"data: {chunk}\n\n" for chunk in (*chunks, "[DONE]")), "text/event-stream"
        else:
            choice = {"index": 0, "message": message, "finish_reason": reason}
            body, kind = json.dumps(head | {"object": "chat.completion", "choices": [choice]}), "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        "Nothing is printed."


@contextmanager
def serving_scripts(
    scripts: Mapping[str, Script],  # by the text of the user's message
) -> Iterator[str]:
    "An OpenAI-compatible endpoint that does what scripts say; its address."
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        server.scripts = scripts
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


def play_verifiers(
    vf_eval: str | Path,  # the command, of an environment with verifiers
    source: Source,
    scripts: Mapping[str, Script],  # by the id of the task; every task of the source
    folder: str | Path,  # empty; gets what vf-eval writes
    seconds: float = 600.0,  # then it is ended
) -> list[Trace]:  # in the order in which they were done
    "Every task through verifiers. Raises `InputProblem` where vf-eval fails, and `subprocess.TimeoutExpired`."
    options = {"environment": source.environment, "tasks": source.tasks, "rows": source.rows, "seed": source.seed}
    told = [word for name, value in options.items() if value is not None for word in (f"--env.taskset.{name}", str(value))]
    by_user = {row_parts(row)[1][0]["content"]: scripts[row["task_id"]] for row in source.task_set().rows}
    program = Path(vf_eval)
    with serving_scripts(by_user) as url:
        argv = [
            program,
            "composer-tasks",
            *told,
            "-m",
            "script",
            "--client.base-url",
            url,
            "--client.api-key-var",
            "COMPOSER_NO_KEY",
            "--no-push",
            "--no-rich",
            "--env.agent.harness.id",
            "null",
            "--env.agent.runtime.type",
            "subprocess",
            "-c",
            "2",
            "--output-dir",
            folder,
        ]
        search = ":".join([*tasksets.__path__, os.environ.get("PYTHONPATH", "")])
        settings = {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "COMPOSER_NO_KEY": "none",
            "PYTHONPATH": search,
        }  # its harness looks for uv
        done = subprocess.run(argv, env=os.environ | settings, capture_output=True, text=True, timeout=seconds)
    files = list(Path(folder).glob("*/traces.jsonl"))
    if done.returncode or not files:
        raise InputProblem(
            f"vf-eval ended with {done.returncode} ({done.stderr.strip()[-500:]})", "look into its logs", str(folder)
        )
    return list(read_traces(files[0], strict=True))
