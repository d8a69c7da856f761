"""Error turns beyond a limit of length: the commands count them and name the option that lifts it; what the toy model says."""
import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.tree.build import build_tree
from composer_replication.tree.template import probe_template

COMMANDS = {"explore": (["explore", "--model", "embedded"], "page.html"),
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


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "explore"])
def test_where_every_error_turn_is_beyond_the_limit_the_option_is_named_and_nothing_is_written(run, name):
    done, output = run(name, "--max-tokens", "20")
    assert done.exit_code == 1 and not output.exists()
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: all \d+ error turns .*end beyond --max-tokens 20, the earliest at (\d+) tokens; "
                        r"raise --max-tokens to \1 or more; --max-tokens \d+ takes them all\.", said)
    lifted, _ = run(name, "--max-tokens", re.search(r"to (\d+) or more", said)[1])
    assert lifted.exit_code == 0
    assert re.search(r"\d+ of \d+ error turns .*end beyond --max-tokens \d+ and are left out", lifted.stderr)


def data_of(page):
    return json.loads(re.search(r"<script type=application/json>(.*?)</script>", page.read_text(), re.DOTALL)[1])


@pytest.mark.parametrize("share", (0, .5))
def test_an_error_turn_beyond_the_limit_stands_on_the_page_with_its_hint_and_without_bars(run, traces, share):
    ends = first_ends(traces)
    most = ends[int(share * len(ends))] if share else 20
    beyond = sum(end > most for end in ends)
    done, output = run("explore", "--max-tokens", str(most))
    assert done.exit_code == 0, done.output
    sites = [site for trace in data_of(output)["traces"] for site in trace["sites"]]
    assert len(sites) == len(ends) and sum("unread" in site for site in sites) == beyond
    assert all(site["hints"] and f"--max-tokens {most}" in site["unread"] or f"limit of {most}" in site["unread"]
               for site in sites if "unread" in site)
    sentence = (rf"Of {len(ends)} error turns {len(ends) - beyond} have token bars; {beyond} end beyond --max-tokens {most} "
                rf"\(--max-tokens {ends[-1]} takes them all\)\.")
    assert re.search(sentence, done.stderr) and re.search(sentence, output.read_text())
    assert f"{len(ends)} error turns, {len(ends) - beyond} of them within {most} tokens\n" in done.stderr


def test_no_longer_limit_is_advised_than_the_model_has_context(run, traces, monkeypatch):
    ends = first_ends(traces)
    context = ends[len(ends) // 2]
    monkeypatch.setattr("composer_replication.tree.positions.positions", lambda config: context)
    within = sum(end <= context for end in ends)
    done, _ = run("explore", "--max-tokens", str(ends[0]))
    fit = within - sum(end <= ends[0] for end in ends)
    assert f"--max-tokens {context}, the model's context, takes {fit} of them" in done.stderr
    done, _ = run("score", "--max-tokens", "20")
    assert re.search(rf"--max-tokens {context}, the model's context, takes \d+ of them\.", done.stderr)
    monkeypatch.setattr("composer_replication.tree.positions.positions", lambda config: 20)
    done, _ = run("score", "--max-tokens", "20")
    assert "name a model with a longer context" in done.stderr and "raise --max-tokens" not in done.stderr


NO_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from composer_replication.cli.app import main
main()
"""


def test_without_a_model_ones_own_traces_are_shown_with_hints_alone_and_no_pytorch(traces, tmp_path):
    write_traces(traces, tmp_path / "mine.jsonl")
    words = [sys.executable, "-c", NO_TORCH, "explore", "mine.jsonl", "--out", "page.html", "--chat-template", "chatml"]
    done = subprocess.run(words, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count = len(first_ends(traces))
    assert "--chat-template is not used: without --model" in done.stderr
    sentence = f"{count} error turns with their hints; give --model for how the hint moves the tokens."
    assert sentence in done.stderr and sentence in (tmp_path / "page.html").read_text()
    sites = [site for trace in data_of(tmp_path / "page.html")["traces"] for site in trace["sites"]]
    assert len(sites) == count and all(site["unread"] and site["hints"] and "tokens" not in site for site in sites)


def test_counts_on_the_page_are_of_all_error_turns(run, traces, monkeypatch):
    count = len(first_ends(traces))
    _, output = run("explore", "--max-tokens", "20")
    assert f"{len(traces)} recorded traces with errors (" in output.read_text()
    monkeypatch.setattr("composer_replication.report.explorer.LARGEST", 6000)
    done, output = run("explore", "--max-tokens", "20")
    data = data_of(output)
    shown = sum(len(trace["sites"]) for trace in data["traces"])
    assert shown < count and [trace["errors"] for trace in data["traces"]] == [
        len({site.turn for site in find_error_sites(trace)}) for trace in traces][:len(data["traces"])]
    page = output.read_text()
    assert f"{len(data['traces'])} of {len(traces)} recorded traces with errors, {shown} of {count} error turns shown (" in page
    kinds = re.search(r"error turns shown \((.*?)\)", page)[1]
    assert sum(map(int, re.findall(r"\d+", kinds))) == count
    assert f"{count - shown} are left out for the page's size" in done.stderr and f"{shown} of {count} error turns" in done.stdout


def test_score_draws_after_it_leaves_out(run, traces):
    earliest = re.search(r"to (\d+) or more", run("score", "--max-tokens", "20")[0].stderr)[1]
    for seed in range(4):
        few = json.loads(run("score", "--json", "--sites", "1", "--seed", str(seed), "--max-tokens", earliest)[0].stdout)
        assert few["sites"] == 1


def test_the_toy_model_says_what_it_is_on_a_users_traces_only(run, tmp_path):
    toy = "embedded toy model: its probabilities mean nothing for these traces; pass --model"
    done, output = run("explore")
    assert done.exit_code == 0 and toy in done.stderr and toy in output.read_text()
    shipped = CliRunner().invoke(app, ["explore", "--out", str(tmp_path / "shipped"), "--traces", "1"])
    assert shipped.exit_code == 0 and "toy model:" not in shipped.stderr + (tmp_path / "shipped").read_text()


@pytest.mark.parametrize("line", [
    "traces errors", "traces find", "hints list --first 2", "hints rules", "recipes list", "recipes show toy",
    "recipes new my.yaml --traces x", "launch toy --on slurm --hours 1 --dry-run", "models list"])
def test_a_command_that_prints_text_loads_no_pytorch(line, tmp_path):
    words = [sys.executable, "-c", NO_TORCH, *line.split()]
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, timeout=120, capture_output=True, text=True, env=home)
    assert "torch" not in done.stderr and "Traceback" not in done.stderr, done.stderr
