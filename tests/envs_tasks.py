"Deletions made by hand in the shipped repository, for tests that need a task at once."
import ast
from pathlib import Path

import composer_replication.data
from composer_replication.envs.deletion.judge.evidence import add_evidence
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import FeatureDeletionTask, make_patch

LARDER = Path(composer_replication.data.__path__[0]) / "repos/larder"
WHERE = {"schedule": ("plans", ("test_schedule",)), "initials": ("labels", ("test_initials",))}


def larder():
    return prepare_subject(LARDER)


def delete(subject, name, hidden=False):
    "A task: the body of one function is gone."
    module, tests = WHERE[name]
    path, nodes = f"src/larder/{module}.py", tuple(f"tests/test_{module}.py::{test}" for test in tests)
    text = (subject.tree / path).read_text()
    node = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    lines = text.splitlines(keepends=True)
    seen = "".join([*lines[:node.body[1].lineno - 1], "    raise NotImplementedError\n", *lines[node.end_lineno:]])
    task = FeatureDeletionTask(
        f"larder-{name}{'-hidden' if hidden else ''}", subject.source, subject.base_commit, nodes, (),
        ("python", "-m", "pytest", "-q", f"tests/test_{module}.py"), (f"larder.{module}:{name}",), "function", "stub",
        f"The body of `{name}` in {path} is gone. Write it again.", make_patch({path: text}, {path: seen}),
        make_patch({path: seen}, {path: text}), hidden_tests=nodes if hidden else ())
    return add_evidence(task, subject)


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
