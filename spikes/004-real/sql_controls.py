"Hints on SQL that know what the agent cannot: of this task, of another one, with names that the database does not have."
import random
from dataclasses import replace
from functools import lru_cache

from composer_replication.envs.sql.hints import SqlHints
from composer_replication.envs.sql.schema import renamed
from composer_replication.envs.sql.tasks import task_of


class exact_hints(SqlHints):
    "What the query lacks, whether or not the agent could know it."
    name, look = "exact", False


class other_site_hints(exact_hints):
    "The exact hint of another task."
    name = "other_site"

    def task(self, task_id):
        return task_of(task_id + "-other")


def _names(schema):
    return {table.name for table in schema.tables} | {column.name for table in schema.tables for column in table.columns}


@lru_cache(maxsize=512)
def _misnamed(task_id):
    "The task with other names for all tables and columns, as far as a hundred draws go."
    task = task_of(task_id)
    rng, mine = random.Random(f"sql/wrong/{task_id}"), _names(task.schema)
    return replace(task, schema=min((renamed(task.schema, rng) for _ in range(100)), key=lambda other: len(_names(other) & mine)))


class wrong_hints(exact_hints):
    "The exact hint with names that the database does not have."
    name = "wrong"

    def task(self, task_id):
        return _misnamed(task_id)
