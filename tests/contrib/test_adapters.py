"Rows of three sources against each other, and damaged rows."
import json

import pytest

from composer_replication.contrib.swe_rows.adapters import SweBenchAdapter, SweSmithAdapter, changed_symbols
from composer_replication.envs.deletion.task import TaskProblem, apply_patch, make_patch

OLD = {"pkg/a.py": "class A:\n    def f(self):\n        return 1\n\n\ndef g():\n    return 2\n"}
NEW = {"pkg/a.py": "class A:\n    def f(self):\n        return 0\n\n\ndef g():\n    return 2\n"}
ROW = {"instance_id": "o__p-1", "repo": "o/p", "base_commit": "abc", "patch": make_patch(NEW, OLD), "test_patch": "x",
       "problem_statement": "Broken.", "FAIL_TO_PASS": '["t.py::a"]', "PASS_TO_PASS": '["t.py::b"]', "version": "1"}


def test_the_three_sources_agree_on_one_task():
    bench = SweBenchAdapter().task(ROW)
    gym = SweBenchAdapter().task({**ROW, "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::b"]})
    smith = SweSmithAdapter().task({**ROW, "repo": "swesmith/o__p.abc", "patch": make_patch(OLD, NEW),
                                    "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::b"]})
    assert bench == gym
    for name in ("repo", "base_commit", "fail_to_pass", "pass_to_pass"):
        assert getattr(smith, name) == getattr(bench, name)
    assert apply_patch(NEW, smith.golden_diff) == apply_patch(NEW, bench.golden_diff) == OLD
    assert smith.deleted_symbols == bench.deleted_symbols == ("pkg.a:A.f",)


@pytest.mark.parametrize("change, sentence", [
    ({"FAIL_TO_PASS": "[]"}, "o__p-1: .*fail_to_pass is empty"), ({"FAIL_TO_PASS": "t.py::a"}, "o__p-1: the field FAIL_TO_PASS"),
    ({"FAIL_TO_PASS": 3}, "o__p-1: the field FAIL_TO_PASS"), ({"PASS_TO_PASS": ["t.py::a"]}, "o__p-1: .*keep it in one"),
    ({"patch": ""}, "o__p-1: the diff names no file"), ({"patch": None}, "o__p-1"), ({"patch": "hello"}, "o__p-1: the diff"),
    ({"instance_id": ""}, "no instance_id"), ({"problem_statement": ""}, "problem_statement is empty"),
])
def test_a_row_that_cannot_be_used_is_named_and_the_rest_goes_on(change, sentence):
    with pytest.raises(TaskProblem, match=sentence):
        SweBenchAdapter().task({**ROW, **change})
    problems = []
    assert SweBenchAdapter().tasks([{**ROW, **change}, ROW], problems) == [SweBenchAdapter().task(ROW)] and len(problems) == 1


def test_symbols_of_a_class_body_and_a_new_function():
    after = {"pkg/a.py": OLD["pkg/a.py"].replace("return 2", "return 3") + "\n\ndef h():\n    return 4\n"}
    assert set(changed_symbols(make_patch(OLD, after))) == {"pkg.a:g", "pkg.a:h"}


def test_rows_of_swe_bench_lite(shared_data):
    import gzip
    rows = [json.loads(line) for line in gzip.open(shared_data / "tasks" / "swebench_lite_dev.jsonl.gz")]
    tasks = SweBenchAdapter().tasks(rows)
    assert len(tasks) == 23 and all(row["patch"] not in repr(task) for row, task in zip(rows, tasks, strict=True))
