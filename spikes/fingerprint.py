"""What the world behind a figure shows and pays, in one number; and which figures an older judge made."""
import json
import random
from functools import cache
from hashlib import sha256
from pathlib import Path

KEPT = Path(__file__).resolve().parent / "judges.json"  # spike -> its world, the commit of its runs, the fingerprint there


def sql_says(n: int) -> list:
    "Return prompts and answers of SQL tasks, and what right, mistaken and equal statements earn there."
    from composer_replication.core.trace import ToolCall
    from composer_replication.envs.sql.agents import misread
    from composer_replication.envs.sql.env import SqlEnv
    from composer_replication.envs.sql.questions import reference_sql
    from composer_replication.envs.sql.tasks import sql_rows, task_of

    says, rng, env = [], random.Random("fingerprint"), SqlEnv()
    for row in sql_rows(n, "fingerprint", "test"):
        task = task_of(row["task_id"])
        right = task.reference
        columns, _, rest = right.removeprefix("SELECT ").partition(" FROM ")
        turned = ", ".join(columns.split(", ")[::-1])
        statements = [right, f"WITH t AS ({right}) SELECT * FROM t", f"SELECT {turned} FROM {rest}",
                      right.partition(" WHERE ")[0], right.replace(" > ", " < "), right.replace(" > ", " >= "),
                      right.replace("MAX", "MIN"), right.replace("AVG", "SUM"), "SELECT nothing", "SELECT sql FROM sqlite_master",
                      *(reference_sql(misread(rng, task.question, task.schema), task.schema) for _ in range(4))]
        says.append(row["prompt"])
        for statement in statements:
            env.reset(**row)
            result = env.call(ToolCall("query", {"sql": statement}))
            says.append([statement, result.text, result.error_kind, env.reward()])
    return says


def toy_says(n: int, teams: bool) -> list:
    "Return prompts, tools and answers of toy tasks, and what the right file earns there, a mistaken one, another team's."
    from composer_replication.core.trace import ToolCall
    from composer_replication.envs.toy.env import WorldEnv, world_rows
    if teams:
        from composer_replication.envs.toy.teams import TEAMS, TeamEnv, team_of

    says, env = [], TeamEnv() if teams else WorldEnv()
    for row in world_rows(n, "fingerprint", "test"):
        env.reset(**row)
        own, code = team_of(env.task.path) if teams else None, env.task.function.code
        attempts = [(own, code), (own, code.replace("return", "return not"))] + ([(own % len(TEAMS) + 1, code)] if teams else [])
        says += [row["prompt"], list(env.tools)]
        for team, text in attempts:
            env.reset(**row)
            for tool in env.task.tools:
                known = {"path": env.task.path, "text": text, "lines": 4}
                named = {"team": team} if teams and tool.role == "write" else {}
                given = {name: known[role] for role, name in tool.arguments.items()} | named
                result = env.call(ToolCall(tool.name, given))
                says.append([tool.name, result.text, result.error_kind])
            says.append(env.reward())
    return says


SAYS = {"sql": sql_says, "toy": lambda n: toy_says(n, False), "teams": lambda n: toy_says(n, True)}


@cache
def reward_fingerprint(
    world: str,  # one of `SAYS`
    n: int = 48,  # tasks
) -> str:  # 20 hexadecimal digits
    "Hash what a world shows and pays on fixed tasks for fixed calls. Another number: another reward, not to be compared."
    return sha256(json.dumps(SAYS[world](n), sort_keys=True).encode()).hexdigest()[:20]


def judge_of(
    spike: str,  # a key of `judges.json`
    kept: dict | None = None,  # None: the file's
) -> str:  # "older judge", or "" for today's
    "Say whether an older judge made a spike's rewards: the fingerprint kept with its runs is compared with today's."
    run = (kept or json.loads(KEPT.read_text()))[spike]
    return "" if run["fingerprint"] == reward_fingerprint(run["world"]) else "older judge"


if __name__ == "__main__":  # python spikes/fingerprint.py WORLD, with the package of any commit on the path
    import sys
    print(reward_fingerprint(sys.argv[1]))
