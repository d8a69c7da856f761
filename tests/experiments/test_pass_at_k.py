"pass@k against Chen et al.'s own product, and intervals against the clustered standard error."
import math
from types import SimpleNamespace

import numpy as np
import pytest

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import Trace, Turn
from composer_replication.experiments.pass_at_k import Evaluation, eval_tasks, figures, pass_at_k, play_samples
from composer_replication.rollout.types import Ending, Rollout


def test_the_estimator_is_the_papers_product():
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                paper = 1.0 if n - c < k else 1 - np.prod(1 - k / np.arange(n - c + 1, n + 1))  # arXiv:2107.03374, figure 3
                assert pass_at_k(n, c, k) == pytest.approx(paper, abs=1e-12)
    assert math.isnan(pass_at_k(2, 1, 3))


def rollout(task, sample, reward, failed=0):
    turns = [Turn("user", "go")]
    for i in range(failed):
        turns += [Turn("assistant", f"try {i}"), Turn("tool", "Error: no", observation=True, failed=True)]
    turns.append(Turn("assistant", "done"))
    return Rollout(Trace(f"{task}-{sample}", tuple(turns), task_id=task), (), (), (), (), Ending.DONE, reward)


def made(rewards):
    return [[rollout(f"t{i}", j, r) for j, r in enumerate(row)] for i, row in enumerate(rewards)]


def test_samples_of_a_task_are_one_cluster():
    "Eight samples that agree within their task are no more evidence than one: Miller's clustered error, arXiv:2411.00640."
    solved = np.random.default_rng(1).random(60) < 0.5
    played = made([[float(s)] * 8 for s in solved])
    interval = Evaluation.of("m", played).figures["pass@1"]
    clustered = 1.96 * solved.std(ddof=1) / math.sqrt(60)
    assert (interval.high - interval.low) / 2 == pytest.approx(clustered, rel=0.12)
    assert interval.problems == 60 and interval.estimate == pytest.approx(solved.mean())


def test_the_difference_is_paired_by_task():
    "Hard and easy tasks: both models move together, so the difference is surer than either level."
    base = [[float(i % 2)] * 2 for i in range(40)]
    mine = [[max(row[0], float(i == 0)), row[1]] for i, row in enumerate(base)]
    result = Evaluation.of("mine", made(mine), base=("base", made(base)))
    level, gap = result.figures["pass@1"], result.differences["pass@1"]
    assert gap.estimate == pytest.approx(0.5 / 40) and gap.high - gap.low < 0.3 * (level.high - level.low)
    assert gap.estimate == pytest.approx(level.estimate - result.base_figures["pass@1"].estimate)


def test_what_could_not_be_scored_counts_neither_way():
    result = Evaluation.of("m", made([[1.0, None], [0.0, 0.0], [None, None]]))
    assert result.unscored == 3 and result.figures["pass@1"].estimate == pytest.approx(0.5)
    assert figures(made([[1.0, None], [0.0, None]]), 2)["pass@2"].tolist() == [1.0, 0.0]  # no more than what pass@2 is
    assert np.isnan(figures(made([[None, None]]), 2)["pass@2"]).all()


def test_a_task_with_one_unscored_sample_stays_in_every_figure():
    played = made([[1.0, 1.0, 1.0, None]] * 5 + [[0.0] * 4] * 5)
    found = Evaluation.of("m", played).figures
    assert found["pass@1"].estimate == found["pass@4"].estimate == 0.5


def test_a_count_is_no_share():
    "All episodes had the same turns and errors: there is no bound of 1, and nothing bounds what was not seen."
    played = [[rollout(f"{n}", 0, 0.0, failed=1)] for n in range(5)]
    result = Evaluation.of("m", played, base=("base", played))
    for name in ("turns", "tool errors"):
        value, gap = result.figures[name], result.differences[name]
        assert value.low == value.estimate == value.high > 0 == gap.low == gap.high
    assert result.figures["pass@1"].low == 0 < result.figures["pass@1"].high < 1


def test_tool_errors_are_the_results_that_the_environment_flags():
    values = figures([[rollout("a", 0, 1.0, failed=2), rollout("a", 1, 1.0)]], 1)
    assert values["tool errors"][0] == 1.0 and values["turns"][0] == 2.0


def test_a_base_that_played_something_else_is_refused():
    with pytest.raises(InputProblem, match="other tasks or samples"):
        Evaluation.of("m", made([[1.0]]), base=("b", [[rollout("other", 0, 1.0)]]))


def test_what_was_played_is_handed_over_after_each_episode_in_the_order_of_the_tasks(monkeypatch):
    import composer_replication.experiments.pass_at_k as module

    def collect(policy, factory, rows, limits, trace_ids, each):
        played = [SimpleNamespace(name=name, trace=SimpleNamespace(trace_id=name)) for name in trace_ids]
        for rollout in played[::-1]:
            each(rollout)
        return played

    monkeypatch.setattr(module, "collect", collect)
    seen = []
    tasks = module.EvalTasks("x", lambda: None, [{"task_id": "a"}, {"task_id": "b"}])
    played = play_samples(None, tasks, 2, None, lambda done: seen.append([r.name for r in done]))
    assert [len(done) for done in seen] == [1, 2, 3, 4] and seen[1] == ["b-0", "b-1"] and seen[3] == ["a-0", "a-1", "b-0", "b-1"]
    assert [[r.name for r in row] for row in played] == [["a-0", "a-1"], ["b-0", "b-1"]]


def test_a_file_of_ones_own_and_what_is_wrong_with_one(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "task_id": 2}\n')
    own = "composer_replication.envs.toy.env:WorldEnv"
    assert [row["task_id"] for row in eval_tasks(own, file).rows] == ["mine-1", "2"]  # text, as in a recipe
    assert len(eval_tasks(own, file, most=1).rows) == 1 and eval_tasks(own, file, 1, 3).rows == eval_tasks(own, file, 1, 3).rows
    file.write_text("")
    for task, given, said in (("toy", file, "makes its own"), (own, file, "holds no task"), ("sql", file, "is no level of them"),
                              ("gsm8k", tmp_path / "no", "no such file"), ("deletion", None, "needs a file")):
        with pytest.raises(InputProblem, match=said):
            eval_tasks(task, given)


def test_questions_about_databases_are_of_test_schemas_and_of_the_levels_asked_for():
    rows = eval_tasks("sql", "medium,easy", 3, 1).rows
    assert [row["task_id"] for row in rows] == [f"sql-test-easy+medium-eval-1-{i}" for i in range(3)]
    assert len(eval_tasks("sql").rows) == 64


def test_a_shipped_repository_is_named_as_in_a_recipe():
    tasks = eval_tasks("deletion", "larder", most=2)
    assert len(tasks.rows) == 2 and tasks.environment().tools
    with pytest.raises(ValueError, match="tasks 'lardr' is no file; .* larder"):
        eval_tasks("deletion", "lardr")
