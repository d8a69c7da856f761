"Figures of README and report: every interval from the raw runs by hand, and every figure of an older judge marked."
import gzip
import json
import re
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "spikes"))
from fingerprint import KEPT, SAYS, judge_of, reward_fingerprint  # noqa: E402

T = {5: 2.776445, 10: 2.262157, 20: 2.093024}  # Student's t, 97.5 %, by seeds


def raw(name):
    "A spike's stored file."
    content = (ROOT / "spikes" / name).read_bytes()
    content = gzip.decompress(content) if name.endswith(".gz") else content
    return [json.loads(line) for line in content.splitlines()] if ".jsonl" in name else json.loads(content)


def over_seeds(gaps):
    "Mean and 95 % t interval of one number a seed."
    mean, n = fmean(gaps), len(gaps)
    half = T[n] * (sum((gap - mean) ** 2 for gap in gaps) / (n - 1) / n) ** 0.5
    return mean, mean - half, mean + half


def over_tasks(gaps):
    "Mean and 95 % bootstrap interval of gaps of seeds x tasks; drawn apart from the pages'."
    gaps, random = np.asarray(gaps, float), np.random.default_rng(20261129)
    seeds, tasks = gaps.shape
    means = [gaps[random.integers(seeds, size=seeds)][:, random.integers(tasks, size=tasks)].mean() for _ in range(20_000)]
    return gaps.mean(), *np.quantile(means, (0.025, 0.975))


def by_task(better, worse):
    "Points of each task, its episodes averaged."
    return [100 * (fmean(a) - fmean(b)) for a, b in zip(better, worse, strict=True)]


def recipe():
    runs = raw("016-sql-recipe/kept.json")
    return over_tasks([by_task(runs["final-0"]["rewards"], runs["final filler-0"]["rewards"])])


def alone():
    runs = {(run["arm"], run["seed"]): run["rewards"] for run in raw("004-real/alone.json")["runs"] if "rewards" in run}
    return over_tasks([by_task(runs["own", seed], runs["filler", seed]) for seed in range(3)])


def both_at_once():
    runs = raw("004-real/pilot.json")["rewards"]
    return over_tasks([by_task(runs[f"A2-{seed}-3"], runs[f"A1-{seed}-3"]) for seed in range(2)])


def qwen(kinds=("finds", "looks"), other="filler", seeds=10):
    firsts = {(run["arm"], run["seed"]): [episode["turns"][0] for episode in run["episodes"]]
              for run in raw("013-qwen-own-errors/runs.jsonl.gz") if "episodes" in run}
    share = {key: 100 * fmean(turn in kinds for turn in turns) for key, turns in firsts.items()}
    return over_seeds([share["own", seed] - share[other, seed] for seed in range(seeds)])


def ladder(spike, better="A2", worse="A2 filler"):
    runs = raw(f"{spike}/runs.json.gz")["runs"]
    ends = {(run["arm"], run["seed"]): 100 * fmean(run["curve"][-1]["passed"]) for run in runs}
    return over_seeds([ends[better, seed] - ends[worse, seed] for seed in range(10)])


def lab(better="recorded exact", worse="recorded filler"):
    runs = [run for run in raw("018-order-lab/runs.jsonl") if run["split"] == "test"]
    passed = {(run["arm"], run["seed"]): 100 * fmean(run["passed"]) for run in runs}
    return over_seeds([passed[better, seed] - passed[worse, seed] for seed in range(10)])


def order(better="recorded exact", worse="policy", world="strong", seeds=10):
    runs = [run for run in raw("021-order-and-sign/runs.jsonl") if run["world"] == world]
    passed = {(run["arm"], run["seed"]): 100 * fmean(run["passed"]) for run in runs}
    return over_seeds([passed[better, seed] - passed[worse, seed] for seed in range(40, 40 + seeds)])


ROWS = {("016", "recorded SDPO - filler"): recipe, ("004", "SDPO - filler"): alone, ("004", "both at once"): both_at_once,
        ("013", "Qwen2.5-Coder-0.5B"): qwen, ("106", "exact hints - filler"): lambda: ladder("106-wide-hint-ladder"),
        ("105", "the same"): lambda: ladder("105-hint-ladder"), ("018", "recorded: the same"): lab,
        ("018", "does not learn"): lambda: lab(worse="policy"), ("021", "which learns"): order}
README = (ROOT / "README.md").read_text()
FIGURE = r"([+-]\d+\.\d+) \(([+-]\d+\.\d+) to ([+-]\d+\.\d+)\)"


def table_rows(page):
    "The lines of a page's tables that name a spike and hold an interval."
    return [line for line in page.splitlines() if re.match(r"\|.*\[\d{3}", line) and re.search(r"[+-]\d", line)]


@pytest.mark.parametrize(("row", "by_hand"), ROWS.items(), ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_an_interval_of_readme_is_that_of_the_raw_runs_by_hand(row, by_hand):
    spike, words = row
    [line] = [line for line in table_rows(README) if f"[{spike}]" in line and words in line]
    shown = [float(number) for number in re.search(FIGURE, line).groups()]
    right = by_hand()
    drawn = by_hand in (recipe, alone, both_at_once)  # two bootstraps agree up to their draws
    assert shown[0] == pytest.approx(right[0], abs=0.0501)
    assert shown == pytest.approx(list(right), abs=0.8 if drawn else 0.0501)


def test_every_row_of_readme_is_recomputed():
    assert len(table_rows(README)) == len(ROWS)
    figure = re.search(r"Channel 3 \(ours\).*?" + FIGURE, README)
    assert [float(number) for number in figure.groups()] == pytest.approx(list(ladder("111-wide-panel", "A3", "A1")), abs=0.0501)


def test_intervals_of_the_report_are_those_of_the_raw_runs_by_hand():
    report = (ROOT / "docs/report.md").read_text().replace(" points (", " (")
    dictated, wide = ("finds", "looks", "fails"), "106-wide-hint-ladder"
    for right in (qwen(), qwen(dictated), qwen(dictated, "other site", 5), ladder(wide), ladder(wide, "A2", "A1"),
                  ladder("111-wide-panel", "A2", "filler"), lab(), lab(worse="recorded other"),
                  lab(worse="policy"), lab(worse="live exact"), order(), order("order", seeds=20), order("joint, gated"),
                  order("size only"), order("joint, gated", world="teams"), order("contrastive", "recorded exact", "teams", 20)):
        mean, low, high = right
        assert f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" in report


# Older judges

def unmarked(page, kept=None):
    "Rows whose spike an older judge paid, and that do not say so; and rows that say so of today's."
    spikes = {spike[:3]: spike for spike in kept or json.loads(KEPT.read_text())}
    rows = [(line, *re.findall(r"\[(\d{3})", line)) for line in table_rows(page)]
    return [line for line, *named in rows if any(bool(judge_of(spikes[n], kept)) != ("older judge" in line) for n in named)]


@pytest.mark.parametrize("page", ["README.md", "docs/report.md"])
def test_every_figure_of_an_older_judge_is_marked_and_no_other(page):
    text = (ROOT / page).read_text()
    assert len(table_rows(text)) >= 8 and unmarked(text) == []


@pytest.mark.parametrize("page", ["README.md", "docs/report.md"])
def test_one_stale_figure_is_found(page):
    text, kept = (ROOT / page).read_text(), json.loads(KEPT.read_text())
    kept["016-sql-recipe"]["fingerprint"] = "0" * 20  # as if its judge had changed since
    stale = [line for line in table_rows(text) if "[016" in line]
    assert stale and unmarked(text, kept) == stale


def test_every_spike_whose_figure_is_shown_keeps_its_fingerprint():
    shown = {number for page in ("README.md", "docs/report.md") for line in table_rows((ROOT / page).read_text())
             for number in re.findall(r"\[(\d{3})", line)}
    kept = {spike[:3] for spike in json.loads(KEPT.read_text())}
    assert shown <= kept and all((ROOT / "spikes" / spike).is_dir() for spike in json.loads(KEPT.read_text()))


def _pays_all(monkeypatch):
    from composer_replication.envs.sql.env import SqlEnv
    monkeypatch.setattr(SqlEnv, "reward", lambda self, answer="": float(self.answer is not None))


def _shows_less(monkeypatch):
    from composer_replication.envs.sql import tasks
    monkeypatch.setattr(tasks.SqlTask, "prompt", property(lambda self: tasks.question_text(self.question, self.schema)))


def _rejects_no_team(monkeypatch):
    from composer_replication.envs.toy.teams import TeamEnv
    without = lambda arguments: {name: value for name, value in arguments.items() if name != "team"}
    monkeypatch.setattr(TeamEnv, "act", lambda self, role, arguments: super(TeamEnv, self).act(role, without(arguments)))


@pytest.mark.parametrize(("world", "change"), [("sql", _pays_all), ("sql", _shows_less), ("teams", _rejects_no_team)])
def test_a_change_of_judge_or_prompt_changes_the_fingerprint(world, change, monkeypatch):
    n = 6
    before = reward_fingerprint.__wrapped__(world, n)
    assert before == reward_fingerprint.__wrapped__(world, n)
    change(monkeypatch)
    assert reward_fingerprint.__wrapped__(world, n) != before


def test_worlds_differ():
    assert len({reward_fingerprint(world, 2) for world in SAYS}) == 3
