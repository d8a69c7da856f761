"Wrong queries that are nearly right, and right ones as other people write them, from what a question asks."
# ruff: noqa: E501
from composer_replication.envs.sql.questions import FIGURES

SIGNS = {">": (">=", "<", "<=", "=", "<>"), "<": ("<=", ">", ">=", "=", "<>"), "=": ("<>", ">", "<", ">=", "<=")}


class Parts:
    "What a query is put together of, read from the question alone; its tables and columns are named by the schema."

    def __init__(self, task):
        q, schema = task.question, task.schema
        self.task, self.q, self.kind, self.linked = task, q, q.kind, q.kind.startswith("linked")
        self.things, self.other = (schema.child, schema.parent) if q.child else (schema.parent, schema.child)
        self.under, prefix = (schema.parent, "p.") if self.linked else (self.things, "")
        self.label = {"linked_group": "p." + schema.parent.label, "linked_which": "c." + schema.child.label}.get(q.kind, self.things.label)
        self.on = f"c.{schema.link} = p.id"
        self.column = q.meaning and ("c." * self.linked) + self.things.column(q.meaning).name
        self.conditioned = q.condition and prefix + self.under.column(q.condition.meaning).name
        self.value = q.condition and (f"'{q.condition.value}'" if isinstance(q.condition.value, str) else q.condition.value)
        self.kin = [("c." * self.linked) + c.name for c in self.things.of_type(q.kind == "group") if c.meaning != q.meaning] if q.meaning else []

    def query(self, wanted=None, source=None, on=None, where=None, end=None, sign=None, value=None, column=None, figure=None):
        "The right query but for what is given."
        q, schema, column = self.q, self.task.schema, column or self.column
        figure = figure or (f"{FIGURES[q.figure]}({column})" if q.figure else "COUNT(*)")
        wanted = wanted or {"which": self.label, "linked_which": self.label, "top": self.label, "group": f"{column}, {figure}",
                            "linked_group": f"{self.label}, {figure}"}.get(self.kind, figure)
        source = source or (f"{schema.child.name} c JOIN {schema.parent.name} p ON {on or self.on}" if self.linked else self.things.name)
        if where is None:
            where = f" WHERE {self.conditioned} {sign or q.condition.sign} {self.value if value is None else value}" if q.condition else ""
        ends = {"top": f" ORDER BY {column}{' DESC' * (q.figure == 'highest')} LIMIT 3", "group": f" GROUP BY {column}",
                "linked_group": " GROUP BY p.id"}
        return f"SELECT {wanted} FROM {source}{where}{ends.get(self.kind, '') if end is None else end}"


def near_misses(task):
    """(kind, wrong query). Left out are those that no database of this world tells from the right one: >= v + 1 for > v of whole numbers,
    MAX and MIN of DISTINCT values, COUNT of `id` or of what is known of every row that is counted (the column of the condition or of the
    groups), grouping by the label of the other table, which names one thing in the questions that ask for each, and LEFT JOIN: every child
    has a parent and every parent a child."""
    parts, q, schema = Parts(task), task.question, task.schema
    query, condition, figured = parts.query, task.question.condition, q.figure and q.kind != "top"
    if condition:
        yield "no condition", query(where="")
        for sign in SIGNS[condition.sign]:
            yield f"{sign} for {condition.sign}", query(sign=sign)
        yield "NOT", query(where=f" WHERE NOT {parts.conditioned} {condition.sign} {parts.value}")
        yield "or NULL", query(where=f" WHERE {parts.conditioned} {condition.sign} {parts.value} OR 1")
        for c in parts.under.columns:
            if c.type == "TEXT" and isinstance(condition.value, str):
                yield from (("other value", query(value=f"'{value}'")) for value in c.values if value != condition.value)
            if c.meaning != condition.meaning and (c.type == "TEXT") == isinstance(condition.value, str):
                yield "other column compared", query(where=f" WHERE {'p.' * parts.linked}{c.name} {condition.sign} {parts.value}")
    if condition and isinstance(condition.value, str):
        yield "contains", query(where=f" WHERE {parts.conditioned} LIKE '%{condition.value}%'")
        yield "begins", query(where=f" WHERE {parts.conditioned} LIKE '{condition.value}%'")
        yield "ends", query(where=f" WHERE {parts.conditioned} LIKE '%{condition.value}'")
    elif condition:
        for by in (-10, -2, -1, 1, 2, 10, -0.01, 0.01):
            if isinstance(condition.value, float) or by == int(by):
                yield f"threshold {by:+}", query(value=round(condition.value + by, 2))
        yield "between", query(where=f" WHERE {parts.conditioned} BETWEEN {sorted([condition.value, condition.value * 10 if condition.sign == '>' else 0])[0]}"
                                     f" AND {sorted([condition.value, condition.value * 10 if condition.sign == '>' else 0])[1]}")
    if figured:
        for name in (*FIGURES.values(), "COUNT"):
            if name != FIGURES[q.figure]:
                yield f"{name} for {q.figure}", query(figure=f"{name}({parts.column})")
        bare = f"{parts.label}, {parts.column}" if q.kind == "linked_group" else parts.column
        yield "bare column", query(wanted=bare)
        for order in ("", " ORDER BY c.id" if parts.linked else " ORDER BY id", " ORDER BY 1", " ORDER BY 1 DESC"):
            if q.kind != "linked_group" and (q.figure, order) not in (("lowest", " ORDER BY 1"), ("highest", " ORDER BY 1 DESC")):
                yield f"bare row{order}", query(wanted=bare, end=order + " LIMIT 1")
        yield "bare DISTINCT", query(wanted=f"DISTINCT {bare}")
        yield from (("other column measured", query(column=column)) for column in parts.kin)
        for inner in (f"2 * {parts.column}", f"{parts.column} + 1"):
            yield "computed", query(figure=f"{FIGURES[q.figure]}({inner})")
        yield "each its own", query(end=f" GROUP BY {parts.column}")
    if q.figure in ("average", "total") and figured:
        yield "DISTINCT figure", query(figure=f"{FIGURES[q.figure]}(DISTINCT {parts.column})")
        inner = query(wanted=f"DISTINCT {parts.label + ', ' if q.kind == 'linked_group' else ''}{parts.column} AS x", end="")
        if q.kind != "linked_group":
            yield "figure of DISTINCT", f"SELECT {FIGURES[q.figure]}(x) FROM ({inner})"
    if q.figure == "average" and figured:
        yield "whole average", query(figure=f"CAST(AVG({parts.column}) AS INTEGER)")
        yield "rounded", query(figure=f"ROUND(AVG({parts.column}))")
        yield "middle", query(figure=f"(MAX({parts.column}) + MIN({parts.column})) / 2.0")
        yield "first and last", query(figure=f"SUM({parts.column}) / (COUNT(*) + 1.0)")
        yield "one less", query(figure=f"SUM({parts.column}) / (COUNT(*) - 1.0)")
    if q.kind == "count":
        for column in (parts.things.label, *(c.name for c in parts.things.columns if c.meaning != condition.meaning)):
            yield "COUNT of a column", query(wanted=f"COUNT({column})")
            yield "COUNT DISTINCT", query(wanted=f"COUNT(DISTINCT {column})")
        yield "COUNT DISTINCT", query(wanted=f"COUNT(DISTINCT {parts.conditioned})") if condition.sign != "=" else query(wanted="COUNT(*) + 1")
        yield from (("off by one", query(wanted=f"COUNT(*) {by} 1")) for by in "+-")
        yield "the rows", query(wanted=parts.label)
        yield "a row of each", query(wanted="1")
        yield "SUM for COUNT", query(wanted="SUM(id)")
    if q.kind in ("which", "linked_which"):
        yield "DISTINCT", query(wanted=f"DISTINCT {parts.label}")
        yield "grouped", query(end=f" GROUP BY {parts.label}")
        yield "one row", query(end=" LIMIT 1")
        yield "all but one", query(end=" LIMIT -1 OFFSET 1")
        yield "the first of them", query(wanted=f"MIN({parts.label})")
        yield "how many", query(wanted="COUNT(*)")
        yield "another column", query(wanted=("c." * parts.linked) + parts.things.columns[0].name)
        yield "keys", query(wanted=("c." * parts.linked) + "id")
    if q.kind == "top":
        down, up = (" DESC", "") if q.figure == "highest" else ("", " DESC")
        for limit in (1, 2, 4, 5, 10):
            yield f"LIMIT {limit}", query(end=f" ORDER BY {parts.column}{down} LIMIT {limit}")
        yield "other way", query(end=f" ORDER BY {parts.column}{up} LIMIT 3")
        yield "OFFSET", query(end=f" ORDER BY {parts.column}{down} LIMIT 3 OFFSET 1")
        yield "no order", query(end=" LIMIT 3")
        yield "no limit", query(end=f" ORDER BY {parts.column}{down}")
        yield "by label", query(end=f" ORDER BY {parts.label}{down} LIMIT 3")
        yield "by key", query(end=f" ORDER BY id{down} LIMIT 3")
        yield "as text", query(end=f" ORDER BY CAST({parts.column} AS TEXT){up} LIMIT 3")
        yield "DISTINCT", query(wanted=f"DISTINCT {parts.label}")
        yield "grouped by label", query(end=f" GROUP BY {parts.label} ORDER BY {parts.column}{down} LIMIT 3")
        yield "grouped by value", query(end=f" GROUP BY {parts.column} ORDER BY {parts.column}{down} LIMIT 3")
        yield "with the value", query(wanted=f"{parts.label}, {parts.column}")
        yield "turned round", f"SELECT label FROM (SELECT {parts.label} AS label, {parts.column} AS x FROM {parts.things.name} ORDER BY x{down} LIMIT 3) ORDER BY x{up}"
        yield "three values", f"SELECT {parts.label} FROM {parts.things.name} WHERE {parts.column} IN (SELECT DISTINCT {parts.column} FROM {parts.things.name} ORDER BY 1{down} LIMIT 3) ORDER BY {parts.column}{down}"
        yield "the first", query(where=f" WHERE {parts.column} = (SELECT {'MAX' if down else 'MIN'}({parts.column}) FROM {parts.things.name})", end="")
        yield from (("other column ordered", query(column=column)) for column in parts.kin)
    if q.kind == "group":
        for inner in (f"DISTINCT {parts.column}", parts.label, f"DISTINCT {parts.label}", *(f"DISTINCT {c.name}" for c in parts.things.columns)):
            yield "COUNT of another", query(figure=f"COUNT({inner})")
        yield from (("COUNT of a column", query(figure=f"COUNT({c.name})")) for c in parts.things.columns if c.meaning != q.meaning)
        yield "no group", query(end="")
        yield "by label", query(end=f" GROUP BY {parts.label}")
        yield "by key", query(end=" GROUP BY id")
        yield "more than one", query(end=f" GROUP BY {parts.column} HAVING COUNT(*) > 1")
        yield "one group less", query(end=f" GROUP BY {parts.column} LIMIT 2")
        yield "biggest", query(end=f" GROUP BY {parts.column} ORDER BY 2 DESC LIMIT 1")
        yield "off by one", query(figure="COUNT(*) - 1")
        yield "only how many", query(wanted="COUNT(*)")
        yield "only the groups", query(wanted=parts.column)
        yield "SUM for COUNT", query(figure="SUM(id)")
        yield from (("other column grouped", query(column=column)) for column in parts.kin)
        yield from (("other table", f"SELECT {c.name}, COUNT(*) FROM {parts.other.name} GROUP BY 1") for c in parts.other.of_type(True))
    if parts.linked:
        child, parent = schema.child.name, schema.parent.name
        yield "no join condition", query(source=f"{child} c JOIN {parent} p")
        yield "comma without condition", query(source=f"{child} c, {parent} p")
        yield "joined by keys", query(on="c.id = p.id")
        yield "joined the wrong way", query(on=f"p.id <> c.{schema.link}")
        yield "joined to itself", query(on=f"c.{schema.link} = c.{schema.link}")
        yield "joined by more", query(on=f"{parts.on} OR p.id = (SELECT MIN(id) FROM {parent})")
        yield "LEFT JOIN with the condition in ON", query(source=f"{child} c LEFT JOIN {parent} p ON {parts.on} AND {parts.conditioned} {condition.sign} {parts.value}", where="") if condition else query(source=f"{child} c LEFT JOIN {parent} p ON 0")
        yield "twice", query(source=f"{child} c JOIN {parent} p ON {parts.on} JOIN {parent} o") if q.figure in (None, "total") else query(wanted="NULL")
    if q.kind == "linked_figure" and q.figure in ("average", "total"):
        yield "figure of figures", f"SELECT AVG(x) FROM ({query(wanted=f'AVG({parts.column}) AS x', end=' GROUP BY p.id')})"
        yield "figure of each", query(end=" GROUP BY p.id")
    if q.kind == "linked_group":
        yield "no group", query(end="")
        yield "by the child", query(end=" GROUP BY c.id")
        yield "by the child's label", query(end=f" GROUP BY c.{schema.child.label}")
        yield "more than one", query(end=" GROUP BY p.id HAVING COUNT(*) > 1")
        yield "keys", query(wanted=f"p.id, {FIGURES[q.figure]}({parts.column})")
        yield "only the figure", query(wanted=f"{FIGURES[q.figure]}({parts.column})")
        yield "one group", query(end=" GROUP BY p.id LIMIT 1")
        yield from (("by another column", query(end=f" GROUP BY p.{c.name}")) for c in schema.parent.columns)


def paraphrases(task):
    "(kind, right query) as other people write it."
    parts, q, schema = Parts(task), task.question, task.schema
    query, condition, figured = parts.query, q.condition, q.figure and q.kind != "top"
    yield "as it is", query()
    yield "reference", task.reference
    yield "spaced, in small letters", query().lower().replace(" from ", "\n  from ").replace(str(parts.value).lower(), str(parts.value)) + " ;"
    yield "in a CTE", f"WITH found AS ({query()}) SELECT * FROM found"
    yield "in a subquery", f"SELECT * FROM ({query()})"
    width = 2 if q.kind in ("group", "linked_group") else 1
    yield "renamed", f"WITH found({', '.join('ab'[:width])}) AS ({query()}) SELECT {', '.join(f'{n} AS {n}_1' for n in 'ab'[:width])} FROM found"
    if width == 2:
        yield "other order of columns", f"WITH found(a, b) AS ({query()}) SELECT b, a FROM found"
    if not q.ordered:
        yield "sorted", query(end=query().partition(" GROUP BY ")[2] and " GROUP BY " + query().partition(" GROUP BY ")[2] + " ORDER BY 1 DESC" or " ORDER BY 1")
    if not parts.linked:
        yield "with an alias", f"SELECT t.* FROM ({query()}) AS t"
        yield "a CTE of the table", f"WITH t AS (SELECT * FROM {parts.things.name}) {query(source='t')}"
    if condition:
        turned = {">": "<", "<": ">", "=": "="}[condition.sign]
        yield "value first", query(where=f" WHERE {parts.value} {turned} {parts.conditioned}")
        yield "NOT of the opposite", query(where=f" WHERE NOT ({parts.conditioned} {({'>': '<=', '<': '>=', '=': '<>'}[condition.sign])} {parts.value})")
        if condition.sign == "=":
            yield "IN", query(where=f" WHERE {parts.conditioned} IN ({parts.value})")
            yield "lower", query(where=f" WHERE LOWER({parts.conditioned}) = LOWER({parts.value})")
            yield "LIKE", query(where=f" WHERE {parts.conditioned} LIKE {parts.value}")
        else:
            yield "a float", query(value=float(condition.value))
        if isinstance(condition.value, int):
            yield "next whole number", query(sign=condition.sign + "=", value=condition.value + (1 if condition.sign == ">" else -1))
    if figured:
        figure = FIGURES[q.figure]
        if q.figure in ("highest", "lowest") and q.kind != "linked_group":
            yield "first in order", query(wanted=parts.column, end=f" ORDER BY {parts.column}{' DESC' * (q.figure == 'highest')} LIMIT 1")
            yield "DISTINCT", query(figure=f"{figure}(DISTINCT {parts.column})")
        if q.figure == "average":
            yield "by hand", query(figure=f"SUM({parts.column}) * 1.0 / COUNT(*)")
            yield "by hand", query(figure=f"TOTAL({parts.column}) / COUNT({parts.column})")
        if q.figure == "total":
            yield "TOTAL", query(figure=f"TOTAL({parts.column})")
            yield "by hand", query(figure=f"AVG({parts.column}) * COUNT(*)")
    if q.kind == "count":
        yield from (("count", query(wanted=wanted)) for wanted in ("COUNT(1)", "COUNT(id)", "SUM(1)", f"COUNT({parts.conditioned})", "COUNT(DISTINCT id)"))
        yield "SUM of the condition", query(wanted=f"SUM({parts.conditioned} {condition.sign} {parts.value})", where="")
        yield "CASE", query(wanted=f"COUNT(CASE WHEN {parts.conditioned} {condition.sign} {parts.value} THEN 1 END)", where="")
    if q.kind == "group":
        yield from (("count", query(figure=figure)) for figure in ("COUNT(1)", "COUNT(id)", f"COUNT({parts.column})", "SUM(1)"))
        yield "window", f"SELECT DISTINCT {parts.column}, COUNT(*) OVER (PARTITION BY {parts.column}) FROM {parts.things.name}"
    if q.kind == "top":
        down = " DESC" * (q.figure == "highest")
        yield "ties by key", query(end=f" ORDER BY {parts.column}{down}, id LIMIT 3")
        yield "ties by key", query(end=f" ORDER BY {parts.column}{down}, id DESC LIMIT 3")
        yield "negative", query(end=f" ORDER BY -{parts.column}{' DESC' * (not down)} LIMIT 3")
        yield "third value", query(where=f" WHERE {parts.column} {'>=' if down else '<='} (SELECT {parts.column} FROM {parts.things.name} ORDER BY 1{down} LIMIT 1 OFFSET 2)", end=f" ORDER BY {parts.column}{down}")
        for rank in ("ROW_NUMBER", "RANK"):
            yield "window", f"SELECT a FROM (SELECT {parts.label} AS a, {rank}() OVER (ORDER BY {parts.column}{down}) AS r FROM {parts.things.name}) WHERE r <= 3 ORDER BY r"
    if parts.linked:
        child, parent = schema.child.name, schema.parent.name
        where = query().partition(" WHERE ")[2]
        yield "other order", query(source=f"{parent} p JOIN {child} c ON p.id = c.{schema.link}")
        yield "comma", query(source=f"{child} c, {parent} p", where=f" WHERE {parts.on}" + (f" AND {where}" if condition else ""))
        yield "LEFT JOIN", query(source=f"{child} c LEFT JOIN {parent} p ON {parts.on}")
        yield "INNER JOIN of parents", query(source=f"{parent} p LEFT JOIN {child} c ON {parts.on}")
        if condition:
            yield "condition in ON", query(on=f"{parts.on} AND {where}", where="")
            yield "IN", query(source=f"{child} c", where=f" WHERE c.{schema.link} IN (SELECT p.id FROM {parent} p WHERE {where})")
            yield "EXISTS", query(source=f"{child} c", where=f" WHERE EXISTS (SELECT 1 FROM {parent} p WHERE {parts.on} AND {where})")
    if q.kind == "linked_group":
        yield from (("grouped", query(end=f" GROUP BY {by}")) for by in (f"c.{schema.link}", parts.label, "1", f"p.id, {parts.label}"))
        yield "figure in a subquery", f"SELECT {parts.label}, (SELECT {FIGURES[q.figure]}({parts.column}) FROM {schema.child.name} c WHERE {parts.on}) FROM {schema.parent.name} p"
