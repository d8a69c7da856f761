"""What spike 013 adds: `sql` with queries alone; as hints the right statement, and one of ours from another site."""
from collections.abc import Iterable
from dataclasses import replace

from composer_replication.core.environment import TaskSet, TasksWanted
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.hints import SqlHints
from composer_replication.envs.sql.tasks import SYSTEM, SqlTask, task_of


class QueryOnly(SqlEnv):
    "Names are looked up in sqlite_master: of one fence for each tool Qwen2.5-Coder-0.5B takes that of SQL, whatever a hint says."

    first = SYSTEM  # the first message

    @classmethod
    def behind(cls, rows: Iterable[dict]) -> list[dict]:
        "Rows of `sql_rows` behind the first message."
        return [row | {"prompt": [{"role": "system", "content": cls.first}, *row["prompt"][1:]]} for row in rows]

    @classmethod
    def task_set(cls, wanted: TasksWanted) -> TaskSet:
        "As `SqlEnv`."
        brought = super().task_set(wanted)
        return replace(brought, rows=cls.behind(brought.rows), held_out=cls.behind(brought.held_out))


class LookFirst(QueryOnly):
    "The same behind a first message that names sqlite_master."

    first = ("You answer a question about an SQLite database that you have not seen. Look first: SELECT sql FROM sqlite_master. "
             "The last statement counts as the answer.")


for made in (QueryOnly, LookFirst):
    made.tools = tuple(tool for tool in SqlEnv.tools if tool["function"]["name"] == "query")


class exact:
    "The statement that lists the tables, written out."

    name = "exact"

    def generate(self, error_kind, error_meta=None) -> str:
        "The sentence."
        return "The right statement at this point is: SELECT name FROM sqlite_master WHERE type = 'table';"


class other_site(SqlHints):
    "What our layer says to an agent that has seen all names, in an episode of another task: true there, of no use here."

    name, look = "other_site", False

    def task(self, task_id: str) -> SqlTask:
        "The next task of the series."
        series, number = task_id.rsplit("-", 1)
        return task_of(f"{series}-{int(number) + 1}")
