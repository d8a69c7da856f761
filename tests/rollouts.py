"A small environment of TRL's kind, short budgets, and a policy that reads out a script."
import time

import jsonschema  # noqa: F401, the first call would take it in within its time limit

from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.rollout.policies import CallablePolicy
from composer_replication.rollout.types import RolloutConfig


def config(**options):
    return RolloutConfig(**{"max_turns": 6, "max_tokens": 400, "tool_timeout": 5.0} | options)


def scripted(say, tokenizer=None, stop=True):
    "A policy of tokens whose turns `say` gives from the text before them."
    tokenizer = tokenizer or embedded_tokenizer()

    def generate(rows, sampling, limits, seeds):
        said = [tokenizer.encode(say(tokenizer.decode(row)), add_special_tokens=False) for row in rows]
        made = [[*ids, *[min(policy.stops)] * stop][:limit] for ids, limit in zip(said, limits)]
        return made, [[-0.5] * len(ids) for ids in made]

    policy = CallablePolicy(generate, tokenizer, "script")
    return policy


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
