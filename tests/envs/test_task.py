"""Diffs against git, task files against damage."""
import random
import shutil
import subprocess

import pytest

from composer_replication.envs.deletion.env import find_tasks
from composer_replication.envs.deletion.task import TaskProblem, apply_patch, make_patch, read_tasks, reverse_patch, write_tasks

LINES = ("a", "b", "c", "", "\x0c", "d\r", "-x", "+y", "\\ z", "--- q", "+++ q", "@@ -1 +1 @@", "é\u2028k", "diff --git a/x b/x")


def draw(rng, names="pqr"):
    "A few small files; a file without text is no file, since a plain diff cannot say that it exists."
    def text():
        lines = "\n".join(rng.choice(LINES) for _ in range(rng.randrange(12)))
        return lines + "\n" * (rng.random() < 0.6 and lines != "")
    return {name: found for name in names if rng.random() < 0.8 and (found := text())}


def patched(files, patch):
    return {path: text for path, text in {**files, **apply_patch(files, patch)}.items() if text is not None}


def test_diffs_go_there_and_back():
    rng = random.Random(0)
    for _ in range(600):
        before, after = draw(rng), draw(rng)
        if patch := make_patch(before, after):
            assert patched(before, patch) == after
            assert patched(after, reverse_patch(patch)) == before


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not here: apt-get install -y git")
@pytest.mark.parametrize("turn", [False, True])
def test_git_applies_our_diffs(tmp_path, turn):
    rng = random.Random(1)
    for number in range(60):
        before, after = draw(rng), draw(rng)
        patch = make_patch(before, after)
        if not patch:
            continue
        if turn:
            before, after, patch = after, before, reverse_patch(patch)
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in before.items():
            (folder / name).write_bytes(text.encode())
        subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=folder, check=True, timeout=200)
        assert {path.name: path.read_bytes().decode() for path in folder.iterdir()} == after


@pytest.mark.parametrize("patch, sentence", [
    ("", "names no file"), ("hello\n", "names no file"),
    ("--- a/p\n+++ b/p\n@@ -1,9 +1,2 @@\n-a\n", "cannot be read"),
    ("--- a/p\n+++ b/p\n@@ -1 +1 @@\n-b\n+c\n", "does not fit p at line 1"),
    ("--- a/p\n+++ b/p\n@@ -2 +2 @@\n-a\n+c\n", "does not fit p at line 2"),
    ("--- a/z\n+++ b/z\n@@ -1 +1 @@\n-a\n+c\n", "z, which is not there"),
    ("--- a/../p\n+++ b/../p\n@@ -1 +1 @@\n-a\n+c\n", "outside of the tree"),
    ("--- a/q\n+++ b/q\n@@ -2 +2 @@\n-b\n+c\n@@ -1 +1 @@\n-a\n+d\n", "does not fit q at line 1"),
    ("--- /etc/p\n+++ /etc/p\n@@ -1 +1 @@\n-a\n+c\n", "outside of the tree"),
])
def test_a_diff_that_cannot_be_used(patch, sentence):
    with pytest.raises(TaskProblem, match=sentence):
        apply_patch({"p": "a\n", "../p": "a\n", "q": "a\nb\n"}, patch)


@pytest.mark.parametrize("content, sentence", [
    (b"[]\n", "line 1: a task must be a JSON object"), (b"{}\n", "line 1: task .*the field instance_id is missing"),
    (b"\xff\n", "line 1: this is no JSON"), (b'\n{"instance_id": 3}\n', "line 2: the field instance_id must be a str"),
])
def test_a_damaged_file(tmp_path, content, sentence):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskProblem, match=sentence):
        read_tasks(path)
    problems = []
    assert read_tasks(path, problems) == [] and len(problems) == 1


def test_a_path_as_text(tmp_path):
    (tmp_path / "tasks.jsonl").write_text("\n")
    assert read_tasks(str(tmp_path / "tasks.jsonl")) == []
    with pytest.raises(TaskProblem, match="nofile.jsonl cannot be read"):
        read_tasks("nofile.jsonl")


@pytest.mark.parametrize("cut, sentence", [(None, None), (20, "tasks.jsonl.gz cannot be read"), (0, None)])
def test_a_file_of_tasks_may_be_gzipped(tmp_path, cut, sentence):
    path, [first, *more] = tmp_path / "tasks.jsonl.gz", read_tasks(find_tasks("larder"))
    assert write_tasks([first, *more], path) == 1 + len(more) and path.read_bytes()[:2] == b"\x1f\x8b"
    path.write_bytes(path.read_bytes()[:cut])
    if sentence is None:
        assert read_tasks(path) == ([first, *more] if cut is None else [])
    else:
        with pytest.raises(TaskProblem, match=sentence):
            read_tasks(path)
