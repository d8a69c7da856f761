"""The plans of spikes 012 and 013: which runs come next, what they choose, what counts as a look; their intervals by hand."""
import gzip
import importlib.util
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from first_screen import decide

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.recipes.tasks import recipe_tasks

SPIKES = Path(__file__).resolve().parents[1]
ORDER, OWN_ERRORS = SPIKES / "012-order", SPIKES / "013-qwen-own-errors"


def loaded(spike, folder):
    "A spike's plan that keeps its runs in a folder."
    spec = importlib.util.spec_from_file_location(f"plan_{spike.name[:3]}", spike / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RUNS, module.HERE = folder / "runs", folder
    module.RUNS.mkdir()
    return module


@pytest.fixture
def order(tmp_path):
    return loaded(ORDER, tmp_path)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    "Of spike 013."
    monkeypatch.syspath_prepend(OWN_ERRORS)
    return loaded(OWN_ERRORS, tmp_path)


def functions(page, begin, end, **space):
    "A page's own functions and thresholds, without what it reads and shows."
    cells = ("".join(cell["source"]) for cell in json.loads(page.read_bytes())["cells"])
    source = next(text for text in cells if "def contrast" in text)
    exec(compile(source[source.index(begin):source.index(end)], "cell", "exec"), space := {"np": np} | space)
    return space


def by_hand(differences):
    "Mean and 95 % half-width of Student's t, the table's points."
    n = len(differences)
    mean = sum(differences) / n
    deviation = (sum((d - mean) ** 2 for d in differences) / (n - 1)) ** 0.5
    return mean, {10: 2.262157, 5: 2.776445}[n] * deviation / n ** 0.5


# Spike 012


def end_order(order, run, reward, train=100.0):
    run.path.write_text(json.dumps(dict(
        arm=run.arm, start=run.start, seed=run.seed, rate=run.rate, switch=run.switch, then=run.then, alpha=run.alpha,
        log=[{"conflict/norm_ratio": 2.0}, {"conflict/norm_ratio": 8.0}, {"loss": 1.0}],
        rewards=[[reward]], cpu_seconds={"record": 10.0, "train": train, "measure": 5.0})))


def tune(order, arm, best, alpha=None):
    "End development runs of an arm, best at one rate, until its rate is chosen; the rates that were tried."
    tried = set()
    for _ in range(10):
        runs, rate = order.rates(arm, alpha)
        tried |= {order.RATES.index(run.rate) for run in runs}
        if rate is not None:
            return rate, tried
        for run in runs:
            end_order(order, run, 1 - abs(order.RATES.index(run.rate) - best) / 10)
    raise AssertionError("no rate was chosen")


@pytest.mark.parametrize("arm", ["policy", "sdpo"])
@pytest.mark.parametrize("best", range(5))
def test_the_chosen_rate_is_the_best_and_has_been_tried_on_both_sides(order, arm, best):
    rate, tried = tune(order, arm, best)
    assert rate == order.RATES[best]
    assert {n for n in (best - 1, best + 1) if 0 <= n < len(order.RATES)} <= tried
    assert len(tried) <= 5 and set(order.FIRST[arm]) <= tried


def test_of_equal_rates_the_lower_is_taken(order):
    for run in order.rates("policy")[0]:
        end_order(order, run, 0.5 if run.rate != order.RATES[3] else 0.4)
    runs, rate = order.rates("policy")
    assert rate is None and {run.rate for run in runs} == {order.RATES[n] for n in (0, 1, 2, 3)}  # the lowest was an edge


def test_the_policy_objective_goes_on_for_what_the_sequence_costs_more(order):
    for arm in ("sdpo", "policy"):
        tune(order, arm, 2)
    assert order.equal_steps() is None
    for at, reward in zip(order.SWITCH, (0.2, 0.6, 0.4)):
        for seed in order.TUNING:
            end_order(order, order.sequence(0, seed, at), reward, train=155.0)
    assert order.switch()[1] == order.SWITCH[1]
    assert order.equal_steps() == 18  # (10 + 155) / (10 + 100) * 12


def test_the_plan_ends_and_every_test_run_comes_once(order):
    for arm in ("sdpo", "policy", "filler", "rejection"):
        tune(order, arm, 2)
    for at in order.SWITCH:
        for seed in order.TUNING:
            end_order(order, order.sequence(0, seed, at), 0.5)
    assert None in list(order.plan())  # the weight is not measured
    for run in order.weight()[0]:
        end_order(order, run, 0.0)
    assert order.weight()[1] == 0.25  # of ratios 2 and 8
    assert order.joint()[1] is None
    tune(order, "joint, gated", 2, 0.25)
    assert order.joint()[1] == (order.RATES[2], 0.25)
    runs = list(order.plan())
    assert None not in runs and len({run.path for run in runs}) == len(runs)
    tested = [run for run in runs if run.split == "test"]
    assert len(tested) == len(order.STARTS) * len(order.SEEDS) * 7
    assert not {run.seed for run in tested} & set(order.TUNING)


def test_nothing_is_run_twice_and_what_another_checkout_kept_is_found(order):
    run, lock, left = order.resumable.claim(order.plan())
    assert (run.arm, left) == ("start", True)
    other, second, _ = order.resumable.claim(order.plan())
    assert other != run  # the first is locked
    end_order(order, run, 0.3)
    for held in (lock, second):
        held.release()
    order.resumable.collect(order.RUNS, order.HERE / "runs.jsonl.gz")
    run.path.unlink()
    order.resumable.unpack(order.HERE / "runs.jsonl.gz", order.path_of)
    assert json.loads(run.path.read_bytes())["rewards"] == [[0.3]]


@pytest.mark.parametrize("mean, half, verdict", [
    (3, 2, "VALIDATED"), (3, 4, "UNDECIDED"), (-1, 4, "UNDECIDED"), (-5, 4, "REFUTED"), (1, 2, "UNDECIDED")])
def test_intervals_and_verdicts_of_the_order_are_those_of_student_by_hand(mean, half, verdict):
    draw, of = np.random.default_rng(0), {}
    for arm in "ab":
        of[arm, 0] = dict(enumerate(draw.random(10).tolist()))
    page = functions(ORDER / "012-order.ipynb", "", "found = {", T=2.262, SEEDS=range(10), of=of, decide=decide)
    found = page["contrast"]("a", "b", 0)
    expected = by_hand([100 * (of["a", 0][n] - of["b", 0][n]) for n in range(10)])
    assert (found["mean"], found["half"]) == pytest.approx(expected, rel=1e-3)
    assert page["decided"]({"mean": mean, "half": half, "seeds": 10}) == verdict
    assert page["decided"]({"mean": mean, "half": half, "seeds": 9}) == "NOT RUN"


# Spike 013


def first(share, of=10):
    "Episodes of which this share looks at once."
    return [{"turns": ["fails" if n < share * of else "other"], "reward": 0.0} for n in range(of)]


def end(run, own=0.0, none=0.0, episodes=0.0):
    made = {"behind": {"own": first(own), "none": first(none)}} if run.arm == "teacher" else {"episodes": first(episodes)}
    fields = dict(arm=run.arm, seed=run.seed, message=run.message, steps=run.steps, rate=run.rate)
    run.path.write_text(json.dumps(fields | made))


def choose(plan, gains=((0.6, 0.5), (0.4, 0.0)), shares=(0.3, 0.5, 0.5)):
    assert plan.learning() == ([], None)
    for run, (own, none) in zip(plan.message()[0], gains):
        end(run, own, none)
    assert None in list(plan.plan())
    for run, share in zip(plan.learning()[0], shares):
        end(run, episodes=share)


def test_the_message_is_chosen_by_what_the_hint_adds_and_of_equal_runs_the_cheaper(plan):
    choose(plan)
    assert plan.message()[1] == "look"
    assert plan.learning()[1] == plan.LEARNING[1]
    assert {run.split for runs in (plan.message()[0], plan.learning()[0]) for run in runs} == {"development"}


@pytest.mark.parametrize("shares, best", [((0.5, 0.5, 0.5), 0), ((0.1, 0.2, 0.9), 2), ((0.4, 0.2, 0.4), 0)])
def test_steps_and_rate_are_those_of_the_highest_share(plan, shares, best):
    choose(plan, shares=shares)
    assert plan.learning()[1] == plan.LEARNING[best]


def test_test_runs_come_once_in_pairs_and_all_with_what_was_chosen(plan):
    choose(plan)
    runs = [run for run in plan.plan() if run.split == "test"]
    assert len({run.path for run in runs}) == len(runs) == 2 * 10 + 2 * 2 + 2 * 5
    assert [run.arm for run in runs[:4]] == ["own", "filler", "teacher", "start"]
    assert {(run.message, run.steps, run.rate) for run in runs if run.arm in plan.HINTS} == {("look", *plan.LEARNING[1])}
    for arm, seeds in {"own": 10, "filler": 10, "exact": 5, "other site": 5}.items():
        assert sorted(run.seed for run in runs if run.arm == arm) == list(range(seeds))


def asked(*pairs):
    "An episode of statements and their answers; an error is one that failed, None an action without a call."
    turns = [Turn("system", "-"), Turn("user", "How many?")]
    for sql, answer in pairs:
        calls = () if sql is None else (ToolCall("query", {"sql": sql}, "call0"),)
        turns.append(Turn("assistant", "prose" if sql is None else "", tool_calls=calls))
        if sql is not None:
            turns.append(Turn("tool", answer, tool_call_id="call0", failed=answer.startswith("Error")))
    return Trace("t", tuple(turns))


@pytest.mark.parametrize("sql, answer, kind", [
    ("SELECT name FROM sqlite_master", "name\nkid\nschool", "finds"),
    ("select sql from SQLITE_MASTER", "sql\nCREATE TABLE kid (id INTEGER)", "finds"),
    ("SELECT name FROM sqlite_schema WHERE name = 'kids'", "0 rows", "looks"),
    ("SELECT name FROM sqlite_master", "name\nkidney", "looks"),
    ("SELECT nam FROM sqlite_master", "Error: no such column: nam", "fails"),
    ("SELECT name FROM kid", "name\nkid", "other"),
    (None, None, "other"),
])
def test_a_look_is_told_from_a_guess(plan, sql, answer, kind):
    assert plan.looks(asked((sql, answer)), {"kid", "pupil"}) == [kind]


def test_every_turn_is_told(plan):
    trace = asked(("SELECT 1 FROM kids", "Error: no such table: kids"), ("SELECT name FROM sqlite_master", "name\nkid"))
    assert plan.looks(trace, {"kid"}) == ["other", "finds"]


def page():
    screen = runpy.run_path(str(OWN_ERRORS.parent / "first_screen.py"))
    return functions(OWN_ERRORS / "013-qwen-own-errors.ipynb", "T = {", "lines = ", decide=screen["decide"])


@pytest.mark.parametrize("seeds", [10, 5])
def test_intervals_of_the_page_are_those_of_student_by_hand(seeds):
    of = {arm: dict(enumerate(np.random.default_rng(n).random(seeds))) for n, arm in enumerate(("a", "b"))}
    found = page()["contrast"](of, "a", "b", seeds)
    assert (found["mean"], found["half"]) == pytest.approx(by_hand([of["a"][n] - of["b"][n] for n in range(seeds)]), rel=1e-3)
    del of["b"][seeds - 1]
    assert page()["contrast"](of, "a", "b", seeds) is None


@pytest.mark.parametrize("mean, half, verdict", [
    (3, 2, "VALIDATED"), (3, 4, "UNDECIDED"), (0, 1, "UNDECIDED"), (-3, 2, "REFUTED")])
def test_a_verdict_follows_the_thresholds(mean, half, verdict):
    assert page()["decided"]({"mean": mean, "half": half}) == verdict
    assert page()["decided"](None) == "NOT RUN"


def test_the_kept_results_are_recomputed_from_the_kept_runs():
    if not (OWN_ERRORS / "runs.jsonl.gz").exists():
        pytest.skip("no run of the spike is kept")
    runs = [json.loads(line) for line in gzip.decompress((OWN_ERRORS / "runs.jsonl.gz").read_bytes()).splitlines()]
    kept = json.loads((OWN_ERRORS / "results.json").read_bytes())
    assert kept["runs"] == len(runs)
    first = {(run["arm"], run["seed"]): [e["turns"][0] for e in run["episodes"]] for run in runs if "episodes" in run}
    right = {key: 100 * sum(kind != "other" for kind in kinds) / len(kinds) for key, kinds in first.items()}
    for name, better, worse, seeds in (("H1", "own", "filler", 10), ("H2", "exact", "own", 5), ("H3", "own", "other site", 5)):
        pairs = [(right.get((better, n)), right.get((worse, n))) for n in range(seeds)]
        if any(None in pair for pair in pairs):
            assert kept["contrasts"][name] is None and kept["hypotheses"][name] == "NOT RUN"
            continue
        mean, half = by_hand([a - b for a, b in pairs])
        assert (kept["contrasts"][name]["mean"], kept["contrasts"][name]["half"]) == pytest.approx((mean, half), rel=1e-3)
        assert kept["hypotheses"][name] == ("VALIDATED" if mean > half else "REFUTED" if mean <= -half else "UNDECIDED")


@pytest.mark.parametrize("message", ["plain", "look"])
def test_the_recipe_takes_the_settings_of_every_arm(plan, message):
    world = plan.MESSAGES[message]
    same = {"model": "embedded"}  # which is always there
    for hints in plan.HINTS.values():
        recipe = plan.load_recipe(OWN_ERRORS / "recipe.yaml", same | {"hints": hints})
        assert recipe.config.sdpo_beta == 0 and recipe.config.sdpo_support == "full" and recipe.model.use_peft
        assert plan.make_layers(recipe.arguments.hints)
    recipe = plan.load_recipe(OWN_ERRORS / "recipe.yaml", same | plan.POLICY | {"task": f"own_errors:{world.__name__}"})
    assert recipe.config.alpha_sdpo == 0 and recipe.config.max_steps * recipe.config.generation_batch_size // 4 == 48
    rows = recipe_tasks(recipe).train
    assert len(rows) == 48 and {row["prompt"][0]["content"] for row in rows} == {world.first}
    assert [tool["function"]["name"] for tool in world().tools] == ["query"]


def test_another_sites_hint_is_of_another_task_and_never_says_to_look(plan):
    task_id = plan.sql_rows(2, "hints", "train", plan.LEVELS)[0]["task_id"]
    call, world = ToolCall("query", {"sql": "SELECT 1 FROM a"}, "c"), plan.QueryOnly()
    world.reset(task_id)
    turns = (Turn("user", "How many?"), Turn("assistant", tool_calls=(call,)), world.call(call).turn(call))
    trace = Trace(task_id, turns, world.tools, task_id)
    site = plan.find_error_sites(trace)[0]
    said = {arm: plan.CompositeHintGenerator(plan.make_layers(names.strip("[]").split(", "))).hint(trace, site).text
            for arm, names in plan.HINTS.items()}
    assert "list the names in sqlite_master" in said["own"] and "FROM sqlite_master" in said["exact"]
    other = plan.task_of(task_id[:-1] + "1").schema
    assert any(f"`{table.name}`" in said["other site"] for table in other.tables) and "sqlite_master" not in said["other site"]
    assert "harbour" in said["filler"] and len(set(said.values())) == 4
