"The SQL environment: answers worked out in plain Python, schemas apart, queries that end, hints that tell no more than they may."
import hashlib
import json
import random
import re
import sqlite3
import subprocess
import sys
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from sql_queries import near_misses, paraphrases

from composer_replication.core.errors import InputProblem
from composer_replication.core.tools import ToolProblem
from composer_replication.core.trace import HintContext, ToolCall, Turn
from composer_replication.envs.sql.agents import demonstration, demonstrations, expert, misread
from composer_replication.envs.sql.database import BYTES, ROWS, Result, draw_rows, open_database, result_text, same_result, select
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.hints import SqlHints, empty_result, filler_hints, wrong_result
from composer_replication.envs.sql.questions import LEVELS, question_text, reference_sql
from composer_replication.envs.sql.schema import SPLITS, draw_schema, words
from composer_replication.envs.sql.tasks import answers, is_sql_task, sql_rows, task_of
from composer_replication.hints.leak_check import refusal
from composer_replication.traces.error_sites import find_error_sites

sys.path.append(str(Path(__file__).parents[2] / "spikes" / "004-real"))
from sql_controls import exact_hints, other_site_hints, wrong_hints


def tasks(n, split="train", levels=tuple(LEVELS), seed="test"):
    return [task_of(row["task_id"]) for row in sql_rows(n, seed, split, levels)]


# --- the oracle: no SQL

def holds(condition, row, table):
    value = row[table.column(condition.meaning).name]
    return {"=": value == condition.value, ">": value > condition.value, "<": value < condition.value}[condition.sign] if type(
        value) is type(condition.value) or condition.sign != "=" else False


def figure(name, values):
    return {"average": lambda: sum(values) / len(values), "highest": lambda: max(values), "lowest": lambda: min(values),
            "total": lambda: sum(values)}[name]()


def one_table(question, table, held):
    kept = [row for row in held if question.condition is None or holds(question.condition, row, table)]
    column = question.meaning and table.column(question.meaning).name
    if question.kind == "which":
        return [(row[table.label],) for row in kept]
    if question.kind == "count":
        return [(len(kept),)]
    if question.kind == "top":
        ranked = sorted(kept, key=lambda row: row[column], reverse=question.figure == "highest")
        return [(row[table.label],) for row in ranked[:3]]
    if question.kind == "group":
        return list(Counter(row[column] for row in kept).items())
    return [(figure(question.figure, [row[column] for row in kept]),)]


def both_tables(question, schema, rows):
    parents = {row["id"]: row for row in rows.parent}
    pairs = [(parents[row[schema.link]], row) for row in rows.child]
    if question.condition:
        pairs = [pair for pair in pairs if holds(question.condition, pair[0], schema.parent)]
    if question.kind == "linked_which":
        return [(child[schema.child.label],) for _, child in pairs]
    column, groups = schema.child.column(question.meaning).name, defaultdict(list)
    for parent, child in pairs:
        groups[parent[schema.parent.label] if question.kind == "linked_group" else ""].append(child[column])
    figures = {name: figure(question.figure, values) for name, values in groups.items()}
    return [(name, value) if name else (value,) for name, value in figures.items()]


def worked_out(task, rows):
    question, schema = task.question, task.schema
    if question.kind.startswith("linked"):
        return both_tables(question, schema, rows)
    return one_table(question, schema.child if question.child else schema.parent, rows.child if question.child else rows.parent)


def plain(row):
    return tuple(round(v, 6) if isinstance(v, float) else v for v in row)


@pytest.mark.parametrize("split", SPLITS)
def test_the_reference_gives_what_plain_python_gives(split):
    kinds = Counter()
    for task in tasks(90, split):
        for rows in (task.rows, task.hidden):
            want = [plain(row) for row in worked_out(task, rows)]
            have = [plain(row) for row in select(task.schema, rows, task.reference).rows]
            assert have == want if task.question.ordered else Counter(have) == Counter(want), (task.task_id, task.prompt)
            assert want and want not in ([(0,)], [(None,)])
        kinds[task.question.kind] += 1
    assert set(kinds) == {kind for of_level in LEVELS.values() for kind in of_level}


@pytest.mark.parametrize("instance", ["rows", "hidden"])
def test_a_constant_of_one_instance_earns_nothing(instance):
    for task in tasks(60):
        rows = select(task.schema, getattr(task, instance), task.reference).rows[:12]  # a question's answer has no more
        values = " UNION ALL ".join("SELECT " + ", ".join(map(repr, row)) for row in rows)
        assert answers(task, task.reference) and not answers(task, values), task.task_id


def test_another_question_is_mostly_another_answer():
    rng, earned = random.Random("misread"), 0
    for task in tasks(80):
        other = misread(rng, task.question, task.schema)
        assert other != task.question
        earned += answers(task, reference_sql(other, task.schema))
    assert earned <= 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
def test_no_near_miss_is_paid_and_every_paraphrase_is(split, level):
    paid, refused, n = Counter(), Counter(), 0
    for task in tasks(15, split, (level,), "near"):
        for kind, sql in near_misses(task):
            n += 1
            if answers(task, sql):
                paid[task.question.kind, kind, task.task_id, sql] += 1
        for kind, sql in paraphrases(task):
            if not answers(task, sql):
                refused[task.question.kind, kind, task.task_id, sql] += 1
    assert n > 200 and not paid and not refused, (list(paid)[:5], list(refused)[:5])


def test_what_was_seen_of_recorded_tasks_stays():
    "Recorded episodes and results name their tasks by id."
    series = [f"spike-004-real{end}" for end in ("", "-2", "-alone", "-first")]
    drawn = [task for name in series for task in tasks(16, "test", ("easy", "medium"), name)]
    text = "".join(f"{task.prompt}{task.reference}{task.rows}" for task in drawn)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0d559e898fdf875b"


def test_order_counts_only_where_it_is_asked_for():
    ordered = [t for t in tasks(60, levels=("medium",)) if t.question.ordered][0]
    table = ordered.schema.child if ordered.question.child else ordered.schema.parent
    inner = ordered.reference.replace("SELECT ", f"SELECT {table.column(ordered.question.meaning).name} AS ranked, ")
    turned = f"SELECT {table.label} FROM ({inner}) ORDER BY ranked{'' if ' DESC' in ordered.reference else ' DESC'}"
    assert answers(ordered, ordered.reference) and not answers(ordered, turned)
    listed = [t for t in tasks(60, levels=("easy",)) if t.question.kind == "which"][0]
    assert all(answers(listed, f"SELECT * FROM ({listed.reference}) ORDER BY 1{way}") for way in ("", " DESC"))


@pytest.mark.parametrize("one, other, equal", [
    (((1,),), ((1.0,),), True), (((1,),), (("1",),), False), (((None,),), ((0,),), False),
    (((b"a",),), (("a",),), False),
    (((1,), (1,)), ((1,),), False), (((0.1 + 0.2,),), ((0.3,),), True), (((1e9 + 1,),), ((1e9,),), False),
    (((1,), (2,)), ((2,), (1,)), True),
    (((float("inf"),),), ((float("inf"),),), True), ((("a", 1),), ((1, "a"),), False)])
def test_values_are_compared_strictly(one, other, equal):
    names = tuple("ab"[:len(one[0])])
    assert same_result(Result(names, one), Result(names, other), False) is equal
    assert not same_result(Result(names, one, True), Result(names, one, True), False)  # a cut result equals none


# --- schemas

def test_no_schema_is_in_two_splits_and_there_are_hundreds():
    fingerprints = {split: {draw_schema(f"test-{i}", split).fingerprint for i in range(400)} for split in SPLITS}
    assert min(map(len, fingerprints.values())) > 350
    assert not fingerprints["train"] & fingerprints["test"] and not fingerprints["train"] & fingerprints["development"]
    assert not fingerprints["development"] & fingerprints["test"]
    assert not {task.prompt for task in tasks(40)} & {task.prompt for task in tasks(40, "test")}


def stems(text):
    return {word.lower()[:4] for word in re.findall(r"[A-Za-z0-9]+", text.replace("_", " ")) if len(word) > 2}


def test_no_question_holds_a_name_of_its_database():
    for task in tasks(200):
        value = str(task.question.condition and task.question.condition.value)
        asked = stems(question_text(task.question, task.schema).replace(value, ""))
        for table in task.schema.tables:
            for name in (table.name, table.label, *(c.name for c in table.columns)):
                assert not stems(name) & asked, (name, task.prompt)


def test_every_name_of_the_word_lists_needs_no_quotes():
    sides = [side for domain in words("domains") for side in domain.values()]
    names = {n for side in sides for n in [*side["tables"], *(n for ns, _ in side["columns"].values() for n in ns)]}
    connection = sqlite3.connect(":memory:")
    for name in names | set(words("labels")["columns"]):
        connection.execute(f"CREATE TABLE {name}_t ({name} TEXT)")
        connection.execute(f"CREATE TABLE {name} (id TEXT)")
        column = f"{name}_t.{name}"
        connection.execute(f"SELECT {column}, {name}.id FROM {name}_t JOIN {name} WHERE {column} = 1 GROUP BY {column}")


# --- SQL as input

SCHEMA = draw_schema("attack", "train")
HELD = draw_rows(SCHEMA, "attack")
CHILD = SCHEMA.child.name
HOSTILE = [
    f"DELETE FROM {CHILD}", f"DROP TABLE {CHILD}", f"UPDATE {CHILD} SET id = 1", f"INSERT INTO {CHILD} (id) VALUES (1)",
    "CREATE TABLE x (y)",
    "CREATE TEMP TABLE x (y)", "ATTACH '/tmp/x.db' AS x", "VACUUM INTO '/tmp/x.db'", "PRAGMA query_only = OFF",
    "PRAGMA writable_schema = ON",
    "PRAGMA table_info(x)", "SELECT * FROM pragma_database_list", "BEGIN", "SAVEPOINT a", "SELECT load_extension('x')",
    "SELECT printf('%.*c', 99999999, 'x')", "SELECT printf('%1000000000d', 1)",
    "EXPLAIN DELETE FROM x",
    "SELECT readfile('/etc/passwd')", "SELECT writefile('/tmp/x', 'y')", "REINDEX", "ANALYZE", "SELECT 1; DROP TABLE x", "",
    ";", "-- nothing",
    "SELECT zeroblob(1000000000)", "SELECT replace(hex(zeroblob(1900)), '0', 'abc')", "SELECT " + "(" * 5000,
    "SELECT " + "1+" * 3000 + "1", "SELECT " + ",".join("1" * 3000), "SELECT '" + "x" * (2 * BYTES) + "'", "SELECT \0",
    "SELEC", "\\", "SELECT ?", "SELECT :a",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(hex(randomblob(900)) || i) FROM n",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT group_concat(i) FROM n",
    f"SELECT count(*) FROM {', '.join(f'{CHILD} AS t{i}' for i in range(9))}",
    f"SELECT 1 FROM {CHILD} WHERE '{'a' * 50}' LIKE '{'%a' * 40}'",
    "WITH RECURSIVE n AS (SELECT 1 FROM n) SELECT * FROM n", f"WITH a AS (SELECT 1) DELETE FROM {CHILD}",
    f"WITH n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) DELETE FROM {CHILD}"]


@pytest.mark.parametrize("sql", HOSTILE)
def test_no_statement_writes_hangs_or_raises_anything_else(sql):
    with pytest.raises(ToolProblem) as problem:
        select(SCHEMA, HELD, sql)
    said = str(problem.value)
    assert said.startswith("Error: ") and "\n" not in said and len(said) < 2 * BYTES + 100


@pytest.mark.parametrize("sql", [
    "SELECT x'ff', CAST(x'ff' AS TEXT), 9e999, -9223372036854775808, NULL", "SELECT 0.0 / 0",
    "SELECT name FROM sqlite_master", "VALUES (1), (2)", "/* a */ SELECT 1 -- b", "SELECT 1;",
    f"SELECT * FROM {CHILD} a, {CHILD} b"])
def test_what_may_be_read_is_answered_and_bounded(sql):
    result = select(SCHEMA, HELD, sql)
    assert len(result.rows) <= ROWS and len(result_text(result)) < 16_000 and same_result(result, result, True) is not result.cut


@pytest.mark.parametrize("sql", [
    "WITH a AS (SELECT 1) SELECT * FROM a", "/*'*/wItH a(x) AS (SELECT 1) SELECT a.x FROM a, a b --'",
    "WITH a AS MATERIALIZED (SELECT 1) SELECT * FROM a", "SELECT 1 AS with_it", 'SELECT 1 AS "with" /* WITH',
    "SELECT 1 WHERE 1 = (SELECT 1) AND 'select values' <> 'SELECT'", "SELECT 1 WHERE 'WITH' <> 'it''s with' -- WITH",
    "SELECT [with] FROM (SELECT 1 AS [with], 2 AS `with it`)"])
def test_one_subquery_is_allowed_and_words_in_strings_names_and_comments_are_none(sql):
    assert select(SCHEMA, HELD, sql).rows == ((1,),)


@pytest.mark.parametrize("sql", [
    "WITH a AS (SELECT 1), b AS (SELECT 2) SELECT * FROM a, b", "SELECT ''/**/ FROM (with a AS (SELECT 1) SELECT * FROM a)",
    'SELECT 1 "--"\n,(WITH\na AS (SELECT 1) SELECT * FROM a)',
    "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i FROM n) SELECT i FROM n"])
def test_more_than_one_subquery_is_refused(sql):
    with pytest.raises(ToolProblem, match="Error: more than one subquery is not allowed here"):
        select(SCHEMA, HELD, sql)


def test_a_parameter_does_not_hide_a_word():
    hidden = "SELECT $x('), (WITH a AS (SELECT 1) SELECT * FROM a), $y(')"
    assert sqlite3.connect(":memory:").execute(hidden, ("", "")).fetchone()[1] == 1
    with pytest.raises(ToolProblem, match="Error: parameters are not allowed here"):
        select(SCHEMA, HELD, hidden)


def wide(name, n):
    "A sum of n times a name that is not deep."
    return "+".join("(" + "+".join([name] * min(40, n - i)) + ")" for i in range(0, n, 40))


def full(template, most):
    "A template with the largest n that keeps a statement within a number of characters."
    return template(bisect_right(range(1, most), most, key=lambda n: len(template(n))))  # lengths only grow


def nested(levels, times):
    "Subqueries in FROM, each using the inner column several times: the product is what SQLite copies."
    sql = f"SELECT id a FROM {CHILD}"
    for _ in range(levels):
        sql = f"SELECT {'+'.join('a' * times)} a FROM ({sql})"
    return sql


UNION = f"(SELECT 1 FROM {CHILD} UNION ALL SELECT 1 FROM {CHILD})"
FROM = [lambda n, end=end: f"SELECT {wide('a', n)} b FROM (SELECT {wide('id', n)} a FROM {CHILD}) " + end(n) for end in (
    lambda n: f"WHERE b IN ({','.join('b' * n)})", lambda n: f"GROUP BY {','.join('b' * n)}",
    lambda n: f"ORDER BY {','.join('b' * n)}",
    lambda n: f"GROUP BY a HAVING b IN ({','.join('b' * n)})", lambda n: f"WHERE {' OR '.join('b' * min(n, 50))}")]
CTE = [  # one table read often, one column read often, both
    lambda n: f"WITH a AS (SELECT {wide('id', 60)} x FROM {CHILD}) SELECT 1 FROM {','.join('a' * n)}",
    lambda n: f"WITH a AS (SELECT {wide('id', n)} x FROM {CHILD}) SELECT {wide('x', n)} b FROM a "
    f"WHERE b IN ({','.join('b' * n)})",
    lambda n: f"WITH a(x) AS (SELECT {wide('id', n)} FROM {CHILD}) SELECT {'+'.join(f't{i}.x' for i in range(n))} FROM "
    + ",".join(f"a t{i}" for i in range(n)),
    lambda n: f"WITH a(x) AS (SELECT {wide('id', n)} FROM {CHILD}) SELECT 1 FROM a t0"
    + "".join(f" JOIN a t{i} USING(x)" for i in range(1, n))]
LONG = {  # filled up to what a statement may have, or a text
    "correlated": (600,
     lambda n: f"SELECT {wide('id', n)} b FROM {CHILD} WHERE (SELECT {wide('b', n)} c WHERE c IN ({','.join('c' * n)}))"),
    "one alias": (BYTES, lambda n: f"SELECT {wide('id', n)} b FROM {CHILD} WHERE b IN ({','.join('b' * n)})"),
    "brackets": (600, lambda n: f"SELECT {'(' * n}1{')' * n}"),
    "case": (600, lambda n: f"SELECT {'CASE ' * n}1{' WHEN 1 THEN 2 END' * n}"),
    "between": (600, lambda n: f"SELECT 1 FROM {CHILD} WHERE {'(' * n}id{' BETWEEN id AND id)' * n}"),
    "terms": (BYTES, lambda n: " UNION ".join(["SELECT 1"] * n)),
    "union join": (BYTES, lambda n: f"SELECT 1 FROM {','.join([UNION] * n)}"),
    "joins": (600, lambda n: f"SELECT 1 FROM {','.join([CHILD] * n)}"),
    "using": (600, lambda n: f"SELECT 1 FROM {CHILD}" + f" JOIN {CHILD} USING(id)" * n),
    "full": (600, lambda n: f"SELECT id FROM {CHILD}" + f" FULL JOIN {CHILD} USING(id)" * n),
    "on": (600,
     lambda n: f"SELECT 1 FROM {CHILD} t0" + "".join(f" LEFT JOIN {CHILD} t{i} ON t{i}.id=t{i - 1}.id" for i in range(1, n))),
    "or": (600,
     lambda n: f"SELECT 1 FROM {CHILD} a,{CHILD} b,{CHILD} c WHERE " + " AND ".join(["(a.id=1 OR b.id=a.id OR c.id=2)"] * n)),
    "in": (600, lambda n: f"SELECT 1 FROM {CHILD} WHERE id IN ({','.join('1' * n)})"),
    "exists": (BYTES, lambda n: f"SELECT 1 WHERE {'EXISTS(SELECT 1 WHERE ' * n}1{')' * n}"),
    "like": (600,
     lambda n: f"SELECT 1 FROM {CHILD} a,{CHILD} b WHERE replace(hex(zeroblob(900)),'0','ab') LIKE '{'%a' * min(n, 29)}'"),
    **{f"a CTE, {i}": (600, template) for i, template in enumerate(CTE)},
    **{f"alias {i}, {most}": (most, template) for i, template in enumerate(FROM) for most in (600, BYTES)}}
TO_PREPARE = {
    "tables": "WITH a0 AS (SELECT 1 x)" + "".join(f",a{i} AS (SELECT p.x FROM a{i - 1} p,a{i - 1} q)" for i in range(1, 31))
    + "SELECT * FROM a30",
    "flattened": nested(10, 8), "flattened, short": nested(13, 20),
    "one union": f"SELECT 1 FROM {UNION[:-1]}),{','.join([CHILD] * 40)}",
    **{name: full(template, most) for name, (most, template) in LONG.items()}}
PREPARING = """
import json, os, resource, sys
from composer_replication.core.tools import ToolProblem
from composer_replication.envs.sql.database import draw_rows, select
from composer_replication.envs.sql.schema import draw_schema
schema = draw_schema("attack", "train")
rows, used = draw_rows(schema, "attack"), lambda: resource.getrusage(resource.RUSAGE_SELF)
for line in sys.stdin:
    if os.fork() == 0:
        before, size = used(), int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CPU, (int(before.ru_utime + before.ru_stime) + 10,) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20),) * 2)
        try:
            select(schema, rows, json.loads(line))
        except ToolProblem as problem:
            assert "MemoryError" not in str(problem), "out of memory"
        after = used()
        print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, (after.ru_maxrss - before.ru_maxrss) / 1024)
        sys.exit()
    if os.wait()[1]:
        print("ended")
    sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def prepared():
    "Of each statement, which a process of its own with limits prepares: seconds and megabytes, or that it came to no end."
    asked = "".join(json.dumps(sql) + "\n" for sql in TO_PREPARE.values())
    done = subprocess.run([sys.executable, "-c", PREPARING], input=asked, capture_output=True, text=True, timeout=600)
    return dict(zip(TO_PREPARE, done.stdout.splitlines(), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are Linux's here")
@pytest.mark.parametrize("name", TO_PREPARE)
def test_what_sqlite_prepares_is_bounded(name, prepared):
    assert len(TO_PREPARE[name]) <= BYTES and prepared[name] != "ended"
    seconds, megabytes = map(float, prepared[name].split())
    assert seconds < 2 and megabytes < 200, (seconds, megabytes)


def test_a_connection_cannot_be_made_to_write_again():
    connection = open_database(SCHEMA, HELD)
    for sql in ("PRAGMA query_only = OFF", f"DELETE FROM {CHILD}"):
        with pytest.raises(sqlite3.Error):
            connection.execute(sql)
    assert connection.execute(f"SELECT count(*) FROM {CHILD}").fetchone() == (len(HELD.child),)
    connection.close()


def test_calls_may_come_from_any_thread():
    env, (row,), got = SqlEnv(), sql_rows(1, "threads"), []
    env.reset(**row)
    def work():
        got.append(env.call(ToolCall("query", {"sql": env.task.reference})).text)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 8 and len(set(got)) == 1 and env.reward() == 1.0


def test_the_last_query_that_ran_is_the_answer():
    env, (row,) = SqlEnv(), sql_rows(1, "last")
    env.reset(**row)
    assert env.reward() == 0.0
    for sql, earned in ((env.task.reference, 1.0), ("SELECT nothing", 1.0), ("SELECT 1", 0.0), (env.task.reference, 1.0)):
        env.call(ToolCall("query", {"sql": sql}))
        assert env.reward() == earned
    env.reset(**row)
    assert env.reward() == 0.0


# --- demonstrations and hints

SHOWN = demonstrations(60, "test")


def test_demonstrations_are_no_tasks_of_a_run():
    assert not {t.task_id for t in SHOWN} & {row["task_id"] for row in sql_rows(60, "test") + sql_rows(60, 0)}


def sites():
    return [(trace, site) for trace in SHOWN for site in find_error_sites(trace)]


def quoted(text):
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))


def test_a_hint_tells_no_name_that_the_agent_has_not_seen():
    assert len(sites()) > 20
    for trace, site in sites():
        hint = SqlHints().generate(site.kind, HintContext.at(trace, site))
        seen = " ".join(turn.content for turn in trace.turns[:site.turn])
        assert hint and refusal(hint, trace, site.turn) is None
        assert {name for name in quoted(hint) if name.islower()} <= set(re.findall(r"\w+", seen)) | {"tables", "describe"}, hint


def test_the_exact_hint_tells_names_of_this_database_and_the_controls_do_not():
    layers, told = (exact_hints(), wrong_hints(), other_site_hints(), filler_hints()), Counter()
    for trace, site in sites():
        schema = task_of(trace.task_id).schema
        names = {n for table in schema.tables for n in (table.name, *(c.name for c in table.columns))}
        for layer in layers:
            told[layer.name] += bool(quoted(layer.generate(site.kind, HintContext.at(trace, site))) & names)
    n = len(sites())
    assert told["exact"] > 0.9 * n and told["filler"] == 0 and told["wrong"] < n / 2 and told["other_site"] < n / 2


def test_results_that_are_no_errors_are_detected_by_name():
    task = tasks(1, seed="detect")[0]
    right = demonstration(task, expert, "test")
    assert not any(wrong_result(right, i) or empty_result(right, i) for i in range(len(right.turns)))
    for trace in SHOWN:
        wrong = [i for i in range(len(trace.turns)) if wrong_result(trace, i)]
        worked = any(t.role == "tool" and t.name == "query" and not t.failed for t in trace.turns)
        assert len(wrong) == int(trace.reward == 0.0 and worked)


def turn_of(task, *calls, ids=False, swapped=False):
    "A trace of one turn with these queries: (sql, result, whether it failed)."
    made = tuple(ToolCall("query", {"sql": sql}, f"c{i}" if ids else None) for i, (sql, _, _) in enumerate(calls))
    results = [Turn("tool", text, tool_call_id=call.id, name="query", observation=True, failed=failed)
               for call, (_, text, failed) in zip(made, calls)]
    turns = (Turn("user", task.prompt), Turn("assistant", tool_calls=made), *(reversed(results) if swapped else results))
    return replace(demonstration(task, expert, "test"), turns=turns)


def test_detectors_judge_the_last_query_of_a_turn_that_worked():
    task = tasks(1, seed="detect")[0]
    right, wrong, bad = (task.reference, "1", False), ("SELECT 1 WHERE 0", "0 rows", False), ("SELEC", "Error: syntax", True)
    for calls, found in (((right, wrong), True), ((wrong, right), False), ((right, bad), False), ((wrong, bad), True),
                         ((bad, right), False), ((bad, wrong), True), ((bad, bad), False)):
        for ids, swapped in ((False, False), (True, False), (True, True)):
            trace = turn_of(task, *calls, ids=ids, swapped=swapped)
            assert (bool(wrong_result(trace, 1)), bool(empty_result(trace, 1))) == (found, found), calls


@pytest.mark.parametrize("task_id", ["sql-train-foo-1", "sql-train-easy+foo-1", "sql-train-+-1"])
def test_a_foreign_id_of_the_same_form_is_no_task(task_id):
    assert not is_sql_task(task_id) and is_sql_task("sql-train-easy+hard-1-2")
    with pytest.raises(InputProblem):
        task_of(task_id)
