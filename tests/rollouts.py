"A small environment of TRL's kind, and short budgets."
import time

import jsonschema  # noqa: F401, the first call would take it in within its time limit

from composer_replication.rollout.types import RolloutConfig


def config(**options):
    return RolloutConfig(**{"max_turns": 6, "max_tokens": 400, "tool_timeout": 5.0} | options)


class Folder:
    "Tools of several moods."

    def reset(self, **row):
        self.row, self.closed, self.log = row, False, []

    def ls(self, path: str = ".", depth: int = 1) -> str:
        """
        List a folder.

        Args:
            path: Where.
            depth: How deep.
        """
        self.log.append(path)
        if path == "missing":
            raise FileNotFoundError("No such folder: missing")
        return f"a.py b.py in {path}"

    def wait(self, seconds: float) -> str:
        """
        Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "done"

    async def later(self) -> str:
        """
        Answer from a coroutine.
        """
        return "later"

    def get_reward(self):
        return 1.0

    def close(self):
        self.closed = True
