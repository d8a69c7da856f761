"""This package's environments as a taskset of verifiers: `vf-eval composer-tasks` (docs/guides/integrations.md).

Its folder must be on the search path, since verifiers finds a taskset by the name of a module without dots."""
import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf
from mcp.types import CallToolResult, TextContent, Tool

from composer_replication.contrib.verifiers.tasks import Source, located, play_again, row_parts
from composer_replication.core.trace import ToolCall

__all__ = ["ComposerTaskset"]


class ComposerData(vf.TaskData):
    "A task as sent to the tool server: its source, and the arguments of its environment's `reset`."

    environment: str
    tasks: str | None
    rows: int | None
    seed: int
    row: dict

    def opened(self):
        "Open an environment that plays this task."
        return Source(self.environment, self.tasks, self.rows, self.seed).opened(self.row)


class ComposerTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    "The tools of one episode, in a separate process."

    TOOL_PREFIX = None  # tools have the names that our own loop gives them

    async def setup_task(self, task: ComposerData) -> None:
        self.environment = await asyncio.to_thread(task.opened)

    def register(self, mcp) -> None:
        mcp.list_tools, mcp.call_tool = self.list_tools, self.call_tool

    async def list_tools(self) -> list[Tool]:
        functions = [tool["function"] for tool in self.environment.tools]
        return [Tool(name=f["name"], description=f["description"], input_schema=f["parameters"]) for f in functions]

    async def call_tool(self, name, arguments, context=None) -> CallToolResult:
        result = await asyncio.to_thread(self.environment.call, ToolCall(name, arguments or {}))
        return CallToolResult(content=[TextContent(type="text", text=result.text)])


class ComposerTask(vf.Task[ComposerData, vf.State, vf.TaskConfig]):
    "One task, scored by repeating its calls."

    @property
    def key(self) -> str:
        return self.data.id

    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [ComposerTools(vf.ToolsetConfig())]

    @vf.reward
    async def environment_reward(self, trace) -> float:
        messages = [message.model_dump() for message in trace.branches[-1].messages]
        played = await asyncio.to_thread(lambda: play_again(self.data.opened(), messages))
        trace.record_metric("answered_otherwise", played.answered_otherwise)
        return played.reward


class ComposerConfig(vf.TasksetConfig):
    environment: str = "deletion"
    """deletion, sql, or package.module:factory."""
    tasks: str | None = None
    """A file that `composer-rl tasks make` wrote; for sql: levels, such as easy,medium."""
    rows: int | None = None
    """How many tasks are drawn, for sql."""
    seed: int = 0
    """Names the draw."""


class ComposerTaskset(vf.Taskset[ComposerTask, ComposerConfig]):
    "The tasks of one of our environments."

    def load(self) -> Iterator[ComposerTask]:
        config = self.config
        source = {"environment": config.environment, "tasks": located(config.tasks), "rows": config.rows, "seed": config.seed}
        for full in Source(**source).task_set().rows:
            system, prompt, row = row_parts(full)
            data = ComposerData(id=row["task_id"], name=row["task_id"], system_prompt=system, prompt=prompt, row=row, **source)
            yield ComposerTask(data, config.task)


if __name__ == "__main__":
    ComposerTools.run()
