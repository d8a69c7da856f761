"""Error turns beyond a limit of length: the commands count them and name the option that lifts it; what the toy model says."""
import json
import re

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.tree.build import build_tree
from composer_replication.tree.template import probe_template

COMMANDS = {"explore": (["explore"], "page.html"), "compose": (["compose", "--steps", "2"], "out"),
            "score": (["hints", "score", "--sites", "2"], "out"),
            "write": (["hints", "write", "--sites", "2", "--n", "1"], "out")}


def first_ends(traces):
    "Of each error turn, the tokens up to its end."
    chat = probe_template(embedded_tokenizer())
    return sorted(build_tree(t, chat).span(turn).end for t in traces for turn in {s.turn for s in find_error_sites(t)})


@pytest.fixture(scope="module")
def traces():
    return [t for t in toy_traces() if find_error_sites(t)][:12]


@pytest.fixture
def run(tmp_path, traces):
    "Runs one of the commands on the traces, as a user's own."
    write_traces(traces, tmp_path / "mine.jsonl")

    def run(name, *more):
        words, output = COMMANDS[name]
        arguments = [*words, str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / output), *more]
        return CliRunner().invoke(app, arguments), tmp_path / output
    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_where_every_error_turn_is_beyond_the_limit_the_option_is_named_and_nothing_is_written(run, name):
    done, output = run(name, "--max-tokens", "20")
    assert done.exit_code == 1 and not output.exists()
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: all \d+ error turns .*end beyond --max-tokens 20, the earliest at (\d+) tokens; "
                        r"raise --max-tokens to \1 or more\.", said)
    lifted, _ = run(name, "--max-tokens", re.search(r"to (\d+) or more", said)[1])
    assert lifted.exit_code == 0
    assert re.search(r"\d+ of \d+ error turns .*end beyond --max-tokens \d+ and are left out", lifted.stderr)


@pytest.mark.parametrize("name", ("explore", "compose"))
def test_the_count_is_that_of_the_trees(run, traces, name):
    ends = first_ends(traces)
    middle = ends[len(ends) // 2]
    more = ["--steps", "12"] if name == "compose" else []
    done, _ = run(name, "--max-tokens", str(middle), *more)
    beyond = sum(end > middle for end in ends)
    assert done.exit_code == 0 and f"{beyond} of {len(ends)} error turns" in done.stderr
    assert f"--max-tokens {ends[-1]} takes them all" in done.stderr


def test_score_draws_after_it_leaves_out(run, traces):
    done, _ = run("score", "--json")
    drawn = json.loads(done.stdout)
    assert drawn["sites"] == 2
    earliest = int(re.search(r"to (\d+) or more", run("score", "--max-tokens", "20")[0].stderr)[1])
    for seed in range(4):
        few = json.loads(run("score", "--json", "--sites", "1", "--seed", str(seed), "--max-tokens", str(earliest))[0].stdout)
        assert few["sites"] == 1


@pytest.mark.parametrize("name", ("explore", "compose"))
def test_the_toy_model_says_what_it_is_on_a_users_traces_only(run, tmp_path, name):
    toy = "embedded toy model: its probabilities mean nothing for these traces; pass --model"
    done, output = run(name)
    page = (output if output.is_file() else output / "report.html").read_text()
    assert done.exit_code == 0 and toy in done.stderr and toy in page
    few = ["--traces", "1"] if name == "explore" else []
    shipped = CliRunner().invoke(app, [*COMMANDS[name][0], "--out", str(tmp_path / "shipped"), *few])
    page = (tmp_path / "shipped" if name == "explore" else tmp_path / "shipped" / "report.html").read_text()
    assert shipped.exit_code == 0 and "toy model:" not in shipped.stderr + page


def test_the_page_of_explore_explains_its_signs(run):
    _, page = run("explore")
    assert "⚙ system, ☺ user, ▸ the agent, ◂ a tool's answer, ⚠ an error turn" in page.read_text().replace("&#39;", "'")
