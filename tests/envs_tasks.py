"Deletions made by hand in the shipped repository, for tests that need a task at once."
import ast
import os
from pathlib import Path
from textwrap import dedent, indent

import pytest
from waiting import text_of

import composer_replication.data
from composer_replication.core.trace import ToolCall, Turn
from composer_replication.envs.deletion.judge import evidence, runner
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import FeatureDeletionTask, make_patch
from composer_replication.sandbox.base import sandbox_problem
from composer_replication.sandbox.boxes import state_folder
from composer_replication.sandbox.limits import Limits

LARDER = Path(composer_replication.data.__path__[0]) / "repos/larder"
needs_sandbox = pytest.mark.skipif(sandbox_problem("bubblewrap") is not None, reason=f"{sandbox_problem('bubblewrap')}")
WHERE = {"schedule": "plans", "initials": "labels"}


def larder():
    return prepare_subject(LARDER)


def with_body(text, name, code, kept=1):
    "A module with other code in one function or method, behind the statements that are kept: its docstring."
    holder = ast.parse(text)
    for part in name.split("."):
        holder = next(n for n in holder.body if getattr(n, "name", None) == part)
    lines, body = text.split("\n"), indent(dedent(code).strip("\n"), " " * (holder.col_offset + 4))
    return "\n".join([*lines[:holder.body[kept].lineno - 1], body, *lines[holder.end_lineno:]])


def delete(subject, name):
    "A task: the body of one function is gone."
    module = WHERE[name]
    path, nodes = f"src/larder/{module}.py", (f"tests/test_{module}.py::test_{name}",)
    text = (subject.tree / path).read_text()
    seen = with_body(text, name, "raise NotImplementedError")
    return with_evidence(FeatureDeletionTask(
        f"larder-{name}", subject.source, subject.base_commit, nodes, (),
        ("python", "-m", "pytest", "-q", f"tests/test_{module}.py"), (f"larder.{module}:{name}",), "function", "stub",
        f"The body of `{name}` in {path} is gone. Write it again.", make_patch({path: text}, {path: seen}),
        make_patch({path: seen}, {path: text})), subject)


def measured_task(subject, symbol, path, text, seen):
    "A task whose tests are those that turn red where a module's text is replaced by what an agent sees."
    before, after = runner.run_phases(subject, [runner.Phase("green", {}), runner.Phase("red", {path: seen})], Limits(wall_s=60))
    green = [node for node, outcome in before.outcomes.items() if outcome == "passed"]
    red = tuple(node for node in green if after.outcomes.get(node) != "passed")
    task = FeatureDeletionTask(
        symbol.replace(":", "."), subject.source, subject.base_commit, red, tuple(n for n in green if n not in red)[:5],
        ("python", "-m", "pytest", "-q", *sorted({n.split("::")[0] for n in red})), (symbol,), "function", "stub", "Write it.",
        make_patch({path: text}, {path: seen}), make_patch({path: seen}, {path: text}))
    return with_evidence(task, subject)


def with_evidence(task, subject):
    "With evidence, and no more mutants than these few lines need."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "MOST_MUTANTS", 16)
        return evidence.add_evidence(task, subject)


def solution(subject, task):
    "Path and text of the original."
    (path, (text, _)), = task.changed_files(subject.tree).items()
    return path, text


def write(folder: Path, files: dict) -> Path:
    "Files of a repository, made in a folder: path: text or bytes."
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def open_boxes():
    "Boxes of this process, without those of judges that wait."
    waiting = {judge.job.parent.name for judge in runner.POOL.waiting()}
    owners = {path.parent.name: text_of(path) for path in (state_folder() / "boxes").glob("[0-9]*/owner")}
    return sorted(name for name, owner in owners.items() if owner.split()[:1] == [str(os.getpid())] and name not in waiting)


class Says:
    "A policy of messages that says one turn after the other."
    name, patience = "scripted", 60.0

    def __init__(self, *turns):
        self.turns = turns

    def reply(self, trace, sampling, limit, seed):
        made = self.turns[sum(turn.role == "assistant" for turn in trace.turns)]
        return Turn("assistant", made if isinstance(made, str) else "",
                    tool_calls=() if isinstance(made, str) else (ToolCall.parse(*made),)), False, 0
