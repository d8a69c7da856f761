"""A client that plays an environment behind an OpenEnv server as a local one."""
import contextlib
import re
from typing import Any

from composer_replication.contrib.openenv.server import ServerProblem, need_openenv
from composer_replication.core.tools import ToolResult, unreadable
from composer_replication.core.trace import ToolCall


class RemoteDeletionEnv:
    "An environment on a server, in a session of its own that lasts until `close`. Methods raise `ServerProblem`."

    def __init__(
        self,
        url: str,  # http://host:port
        timeout: float = 400.0,  # seconds that one answer may take; a judge may take long
    ):
        need_openenv()
        self.url, self.timeout, self._client = url, timeout, None
        self.call_s = self.reward_s = timeout + 10.0  # the client gives up before a rollout does
        self.tools: tuple[dict, ...] = ()  # after `reset`
        self.prompt: list[dict] = []  # after `reset`
        self._reward: float | None = None

    def _ask(self, what, *args, **kwargs):
        "One exchange."
        from openenv.core.generic_client import GenericEnvClient
        try:
            if self._client is None:
                self._client = GenericEnvClient(base_url=self.url, message_timeout_s=self.timeout).sync()
            return getattr(self._client, what)(*args, **kwargs)
        except Exception as problem:  # the client's own, the socket's, or what the server answered
            self.close()
            text = " ".join(str(problem).split()) or type(problem).__name__
        answered = re.fullmatch(r"Server error: (.*) \(code: (\w+)\)", text)
        if answered is None:
            raise ServerProblem(f"{self.url} gave no answer ({text}); check that the server runs.")
        words, code = answered.groups()
        if code == "CAPACITY_REACHED":
            raise ServerProblem(f"{self.url} has no room for another session: {words} (start the server with more --sessions)")
        raise ServerProblem(f"{self.url} refused: {words}")

    def reset(
        self,
        task_id: str,  # of one of the server's tasks
        **row: Any,  # the row's other columns, not needed
    ) -> None:
        "Begin a task."
        observation = self._ask("reset", task_id=task_id).observation
        self.tools, self.prompt, self._reward = tuple(observation["tools"]), observation["prompt"], None

    def call(self, call: ToolCall) -> ToolResult:
        "Answer one call."
        if not call.parsed:  # the server would read the text anew, without what stood around it
            return ToolResult(unreadable(call), "json_decode")
        observation = self._ask("step", {"tool": call.name, "arguments": call.arguments}).observation
        return ToolResult(observation["text"], observation["error_kind"])

    def reward(self, answer: str = "") -> float:
        "The reward; ends the episode."
        if self._reward is None:
            self._reward = self._ask("step", {"answer": answer}).reward
        return self._reward

    def close(self) -> None:
        "End the session; without one, nothing."
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # the server may be gone
                client.close()
