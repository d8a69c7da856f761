"Figures of README, report and results: intervals from the raw runs by hand, and every figure of an older judge marked."
import gzip
import json
import re
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / folder) for folder in ("spikes", "tools", "docs")]
from figures import figures, prose  # noqa: E402
from fingerprint import KEPT, SAYS, judge_of, reward_fingerprint  # noqa: E402

T = {5: 2.776445, 10: 2.262157, 20: 2.093024}  # Student's t, 97.5 %, by seeds
ROUNDED, DRAWN = 0.0501, 0.8  # points: one decimal; two bootstraps agree up to their draws


def raw(name):
    "A spike's stored file."
    content = (ROOT / "spikes" / name).read_bytes()
    content = gzip.decompress(content) if name.endswith(".gz") else content
    return [json.loads(line) for line in content.splitlines()] if ".jsonl" in name else json.loads(content)


def over_seeds(gaps):
    "Mean, 95 % t interval of one number a seed, and how near a page must come."
    mean, n = fmean(gaps), len(gaps)
    half = T[n] * (sum((gap - mean) ** 2 for gap in gaps) / (n - 1) / n) ** 0.5
    return mean, mean - half, mean + half, ROUNDED


def over_tasks(gaps):
    "Mean, 95 % bootstrap interval of gaps of seeds x tasks, drawn apart from the pages', and how near a page must come."
    gaps, random = np.asarray(gaps, float), np.random.default_rng(20261129)
    seeds, tasks = gaps.shape
    means = [gaps[random.integers(seeds, size=seeds)][:, random.integers(tasks, size=tasks)].mean() for _ in range(20_000)]
    return gaps.mean(), *np.quantile(means, (0.025, 0.975)), DRAWN


def by_task(better, worse):
    "Points of each task, its episodes averaged."
    return [100 * (fmean(a) - fmean(b)) for a, b in zip(better, worse, strict=True)]


def recipe(pairs=(("final-0", "final filler-0"),)):
    runs = raw("016-sql-recipe/kept.json")
    return over_tasks([by_task(runs[better]["rewards"], runs[worse]["rewards"]) for better, worse in pairs])


def from_start(arm, start):
    return recipe([(f"{arm}-{seed}", start) for seed in range(3)])


def alone(better="own", worse="filler", file="alone.json"):
    runs = {(run["arm"], run["seed"]): run["rewards"] for run in raw(f"004-real/{file}")["runs"] if "rewards" in run}
    return over_tasks([by_task(runs[better, seed], runs[worse, seed]) for seed in range(3)])


def both_at_once():
    runs = raw("004-real/pilot.json")["rewards"]
    return over_tasks([by_task(runs[f"A2-{seed}-3"], runs[f"A1-{seed}-3"]) for seed in range(2)])


def both_at_a_small_weight():
    runs = raw("004-real/third.json")["rewards"]
    return over_tasks([by_task(runs["A2-0"], runs["A1-0"])])


def gated():
    runs = {(run["arm"], run["seed"]): run["rewards"] for run in raw("012-order/runs.jsonl.gz") if "rewards" in run}
    return over_tasks([by_task(runs["joint, gated", seed], runs["policy", seed]) for seed in range(1000, 1003)])


def audited():
    "By hand itself: the runs of this audit are not kept."
    [row] = [row for row in raw("104-ladder/audit.json")["rows"] if row["arm"] == "A1, learning rate 1e-3"]
    return *row["template_minus"], ROUNDED


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


def equal_steps():
    runs = {(run["arm"], run["seed"]): run for run in raw("018-order-lab/runs.jsonl") if run["split"] == "test"}
    live = [runs["live exact", seed]["equal_steps"] for seed in range(10)]
    return over_seeds([100 * (fmean(runs["recorded exact", seed]["passed"]) - fmean(live[seed]["passed"])) for seed in range(10)])


def order(better="recorded exact", worse="policy", world="strong", seeds=10):
    runs = [run for run in raw("021-order-and-sign/runs.jsonl") if run["world"] == world]
    passed = {(run["arm"], run["seed"]): 100 * fmean(run["passed"]) for run in runs}
    return over_seeds([passed[better, seed] - passed[worse, seed] for seed in range(40, 40 + seeds)])


ROWS = {("016", "untuned filler"): recipe, ("004", "SDPO - filler"): alone, ("004", "both at once"): both_at_once,
        ("013", "Qwen2.5-Coder-0.5B"): qwen, ("106", "exact hints - filler"): lambda: ladder("106-wide-hint-ladder"),
        ("105", "the same"): lambda: ladder("105-hint-ladder"), ("018", "recorded: the same"): lab,
        ("018", "does not learn"): lambda: lab(worse="policy"), ("021", "which learns"): order}
DICTATED, WIDE, PANEL = ("finds", "looks", "fails"), "106-wide-hint-ladder", "111-wide-panel"
REPORT = {
    ("016", "untuned"): recipe,
    ("016", "| 20; 20 |", "- start"): lambda: from_start("final", "start-c"),
    ("016", "| 10; 12 |"): lambda: from_start("recorded", "start-b"),
    ("004", "SDPO, recorded - filler"): alone,
    ("004", "- policy, tuned"): lambda: alone("A5", "A1", "first.json"),
    ("004", "filler first"): lambda: alone("A5", "A5 filler", "first.json"),
    ("004", "weight 1,"): both_at_once,
    ("004", "weight 0.03"): both_at_a_small_weight,
    ("012", "failed episodes"): gated,
    ("013", "- filler", "that run"): qwen,
    ("013", "another site's", "that run"): lambda: qwen(other="other site", seeds=5),
    ("013", "- filler", "dictates"): lambda: qwen(DICTATED),
    ("013", "another site's", "dictates"): lambda: qwen(DICTATED, "other site", 5),
    ("018", "hints - filler"): lab,
    ("018", "another module's"): lambda: lab(worse="recorded other"),
    ("018", "policy objective"): lambda: lab(worse="policy"),
    ("018", "recorded - live", "CPU"): lambda: lab(worse="live exact"),
    ("018", "equal steps"): equal_steps,
    ("021", "strong", "not declared"): order,
    ("021", "SDPO, then policy"): lambda: order("order", seeds=20),
    ("021", "strong", "both at once"): lambda: order("joint, gated"),
    ("021", "size of"): lambda: order("size only"),
    ("021", "teams", "both at once"): lambda: order("joint, gated", world="teams"),
    ("021", "teams", "not declared"): lambda: order(world="teams"),
    ("021", "contrastive"): lambda: order("contrastive", "recorded exact", "teams", 20),
    ("104", "audit"): audited,
    ("105", "narrow"): lambda: ladder("105-hint-ladder"),
    ("106", "hints - filler"): lambda: ladder(WIDE),
    ("106", "below its start"): lambda: ladder(WIDE, "A2", "A1"),
    ("111", "repeated"): lambda: ladder(PANEL, "A2", "filler")}
EFFECTS = {
    "E1": [("A2", "A1")], "E2": [("A2", "start")], "E3": [("A2", "all turns")], "E4": [("A2", "live"), ("trust region", "live")],
    "E5": [("A2", "own")], "E6": [("A2", "raw")], "E7": [("off policy", "off policy, unclipped")],
    "E9": [("A3", "A1"), ("A3", "A3, ten times beta")], "E11": [("A2", "blind"), ("blind", "filler")]}
README = (ROOT / "README.md").read_text()
NUMBER = r"([+-]?\d+\.\d+)"
FIGURE = rf"{NUMBER}(?: points| nats)? \({NUMBER} to {NUMBER}\)"


def page(name):
    "The text of a page: of a notebook its prose and what its cells show."
    text = (ROOT / name).read_text()
    if not name.endswith(".ipynb"):
        return text
    parts = []
    for cell in json.loads(text)["cells"]:
        shown = [output.get("data", {}).get("text/markdown", []) for output in cell.get("outputs", [])]
        parts += shown if cell["cell_type"] == "code" else [cell["source"]]
    return "\n".join(map("".join, parts))


def table_rows(text):
    "The lines of tables that name a spike and hold an interval."
    return [line for line in text.splitlines() if re.match(r"\|.*\[\d{3}\]", line) and re.search(FIGURE, line)]


def lines_of(text, spike, *words):
    "The rows of a spike that hold all these words."
    return [line for line in table_rows(text) if f"[{spike}]" in line and all(word in line for word in words)]


def agrees(line, right):
    "Whether the interval of a row is that by hand."
    shown, (*found, near) = [float(number) for number in re.findall(FIGURE, line)[-1]], right
    return shown[0] == pytest.approx(found[0], abs=ROUNDED) and shown == pytest.approx(found, abs=near)


CHECKED = [(name, row) for name, rows in (("README.md", ROWS), ("docs/report.md", REPORT)) for row in rows]


@pytest.mark.parametrize(("name", "row"), CHECKED, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_an_interval_of_a_table_is_that_of_the_raw_runs_by_hand(name, row):
    [line] = lines_of(page(name), *row)
    assert agrees(line, (ROWS if name == "README.md" else REPORT)[row]())


def test_every_row_of_readme_and_report_is_recomputed():
    assert len(table_rows(README)) == len(ROWS)
    assert len(table_rows(page("docs/report.md"))) == len(REPORT)
    [channel_3] = [line for line in README.splitlines() if line.startswith("Channel 3 (ours)")]
    assert agrees(channel_3, ladder("111-wide-panel", "A3", "A1"))


def test_effects_of_the_panel_are_those_of_the_raw_runs_by_hand():
    results = page("nbs/06_results.ipynb")
    for effect, pairs in EFFECTS.items():
        [line] = [line for line in results.splitlines() if line.startswith(f"| {effect} ")]
        shown = [[float(number) for number in found] for found in re.findall(FIGURE, line)[:len(pairs)]]
        assert shown == [pytest.approx(ladder("111-wide-panel", *pair)[:3], abs=ROUNDED) for pair in pairs]


def test_a_wrong_interval_is_found():
    line = "| [016](x) | +13.3 (+5.5 to +21.1) |"
    assert agrees(line, recipe())
    assert not agrees(line.replace("13.3", "13.9"), recipe()) and not agrees(line.replace("5.5", "7.4"), recipe())


# Older judges

PAGES = ["README.md", "docs/report.md", "nbs/06_results.ipynb"]
SPIKE = r"spikes/([\w-]+)/"
JUDGED = json.loads(KEPT.read_text())


def unmarked(text, kept=JUDGED):
    "Rows whose spike an older judge paid, and that do not say so; and rows that say so of today's."
    named = [(line, set(re.findall(SPIKE, line)) & kept.keys()) for line in table_rows(text)]
    return [line for line, spikes in named if any(bool(judge_of(spike, kept)) != ("older judge" in line) for spike in spikes)]


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_of_an_older_judge_is_marked_and_no_other(name):
    assert len(table_rows(page(name))) >= 8 and unmarked(page(name)) == []


@pytest.mark.parametrize(("name", "spike"), zip(PAGES, ("016-sql-recipe", "016-sql-recipe", "106-wide-hint-ladder")))
def test_one_stale_figure_is_found(name, spike):
    kept = JUDGED | {spike: JUDGED[spike] | {"fingerprint": "0" * 20}}  # as if its judge had changed since
    stale = [line for line in table_rows(page(name)) if f"{spike}/" in line]
    assert stale and unmarked(page(name), kept) == stale


def test_every_spike_whose_figure_is_shown_keeps_its_fingerprint():
    shown = {spike for name in PAGES[:2] for line in table_rows(page(name)) for spike in re.findall(SPIKE, line)}
    assert shown | {"020-demo-power"} <= JUDGED.keys()  # README's picture is of 020
    assert all((ROOT / "spikes" / spike).is_dir() for spike in JUDGED)


def silent(blocks, kept=JUDGED):
    "Blocks of prose that show points or per cent of a spike that an older judge paid, and do not say so."
    paid = lambda text: any(re.search("%|point|per ?cent", figure) for figure, _ in figures(text))
    return [block for block in blocks if "older judge" not in block.text.lower() and paid(block.text)
            and any(judge_of(spike, kept) for spike in set(re.findall(SPIKE, block.text)) & kept.keys())]


def test_prose_with_a_figure_of_an_older_judge_says_so():
    blocks = [block for block in prose(ROOT) if block.file.startswith(("docs/", "nbs/"))]
    assert silent(blocks) == []
    kept = JUDGED | {"016-sql-recipe": JUDGED["016-sql-recipe"] | {"fingerprint": "0" * 20}}
    assert silent(blocks, kept)  # 016's figures stand in prose


@pytest.mark.parametrize("spike", JUDGED)
def test_a_spike_of_an_older_judge_says_so_at_its_head(spike):
    head = "".join(json.loads((ROOT / f"spikes/{spike}/{spike}.ipynb").read_text())["cells"][0]["source"])
    assert bool(judge_of(spike)) == ("Older judge" in head)


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
