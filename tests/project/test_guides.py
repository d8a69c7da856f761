"""The guides are true: their Python runs in order, and every command in them exists with the options that it is given."""
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from typer.main import get_command
from waiting import free_port

from composer_replication.cli.app import app
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import LAYERS
from composer_replication.hints.templates import HINT_TEMPLATES
from composer_replication.losses.divergences import DIVERGENCES, SUPPORTS
from composer_replication.recipes.memory_estimate import estimate
from composer_replication.recipes.recipe import load_recipe
from composer_replication.report.train import size
from composer_replication.sandbox.base import sandbox_problem
from composer_replication.traces.error_detectors import DETECTORS
from composer_replication.traces.export import write_traces
from composer_replication.traces.formats.base import known_formats

sys.path.append(str(Path(__file__).resolve().parents[2] / "spikes"))
from published_shapes import published_shape

UsageError = typer.BadParameter.__base__  # typer carries a click of its own
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [*sorted((DOCS / "guides").glob("*.md")), DOCS / "guide.md"]
FENCE = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


def blocks(text: str, language: str) -> list[SimpleNamespace]:
    "Fenced blocks: their text, the line that it starts at, and why it is not run, if it is not."
    return [SimpleNamespace(text=m["text"], line=text.count("\n", 0, m.start("text")) + 1, reason=m["reason"])
            for m in FENCE.finditer(text) if m["language"] == language]


def play(text: str, page: str, where: Path) -> dict:
    "Run a page's Python in order, in one namespace; what is marked is compiled only. Returns the namespace."
    names: dict = {"__name__": "__main__"}
    before = os.getcwd()
    os.chdir(where)
    try:
        for block in blocks(text, "python"):
            # line numbers of the page, so that a traceback leads there
            code = compile("\n" * (block.line - 1) + block.text, page, "exec")
            if block.reason is None:
                exec(code, names)
    finally:
        os.chdir(before)
    return names


def lines(text: str) -> list[list[str]]:
    "The words of every line of the page's bash blocks, comments left out."
    found = (line for block in blocks(text, "bash") for line in block.text.replace("\\\n", " ").splitlines())
    return [words for line in found if (words := shlex.split(line, comments=True))]


def commands(text: str) -> list[list[str]]:
    "Those of `composer-rl`, without its name."
    return [words[1:] for words in lines(text) if words[0] == "composer-rl"]


def parse(words: list[str]) -> None:
    "Raise `UsageError` where click would not take these words; nothing is run."
    command, context, rest = get_command(app), None, list(words)
    while hasattr(command, "commands"):
        context = command.make_context("composer-rl", rest, parent=context)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)


@pytest.fixture
def unchanged():
    "What pages register is forgotten again: other tests share the process."
    known_formats()  # those of contributions, and their detectors, are not forgotten
    before = [(registry, dict(registry)) for registry in (HINT_TEMPLATES, LAYERS, DIVERGENCES, SUPPORTS)]
    before.append((DETECTORS, {name: list(registered) for name, registered in DETECTORS.items()}))
    yield
    for registry, values in before:
        registry.clear()
        registry.update(values)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # TRL's and transformers' own use of the old name
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, tmp_path):
    if page.stem == "my-repository" and (problem := sandbox_problem("bubblewrap")):
        pytest.skip(problem)
    play(page.read_text(encoding="utf-8"), str(page), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_exist(page):
    for words in commands(page.read_text(encoding="utf-8")):
        try:
            parse(words)
        except typer.Exit:  # of an option that ends the command, as --version
            pass
        except UsageError as problem:
            pytest.fail(f"{page.name}: composer-rl {' '.join(words)}: {problem.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_recipes_of_a_page_load(page, tmp_path):
    for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
        (tmp_path / "recipe.yaml").write_text(block.text)
        assert load_recipe(tmp_path / "recipe.yaml", estimating=True).config.max_steps


def test_the_guides_hold_something_to_test():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert len(PAGES) >= 8 and sum(len(blocks(t, "python")) for t in texts) >= 20 and sum(len(commands(t)) for t in texts) >= 20
    assert all(text.count("```") % 2 == 0 for text in texts)


def test_a_broken_snippet_is_found_at_its_line(tmp_path):
    page = "# A page\n\n```python\nvalue = 1\n```\n\n```python\nassert value == 2\n```\n"
    with pytest.raises(AssertionError) as found:
        play(page, "page.md", tmp_path)
    assert found.traceback[-1].lineno + 1 == 8 and str(found.traceback[-1].path).endswith("page.md")


def test_a_marked_snippet_is_compiled_and_not_run(tmp_path):
    page = "<!-- not run: needs a GPU -->\n```python\n{}\n```\n"
    assert "ran" not in play(page.format("ran = True"), "page.md", tmp_path)
    with pytest.raises(SyntaxError):
        play(page.format("ran ="), "page.md", tmp_path)


@pytest.mark.parametrize(("line", "said"), [
    ("composer-rl leader", "No such command"), ("composer-rl ladder --sedes 3", "No such option"),
    ("composer-rl tasks mend x.jsonl", "No such command"), ("composer-rl ladder --seeds many", "Invalid value"),
    ("composer-rl replay x.jsonl", "Missing option"),
])
def test_a_wrong_command_is_found(line, said):
    [words] = commands(f"```bash\n{line}  # why\n```\n")
    with pytest.raises(UsageError) as found:
        parse(words)
    assert said in found.value.format_message()


# The one road: every command of its page, in order, in one folder

ROAD = DOCS / "guides" / "one-road.md"
SEVEN = "Qwen/Qwen2.5-Coder-7B-Instruct"
LARDER = Path(sys.modules["composer_replication"].__file__).parent / "data" / "repos" / "larder"
SMALL = dict(model="embedded", dtype="float32", use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=1,
             guard_steps=1, held_out_rows=1, per_device_train_batch_size=2, gradient_accumulation_steps=1, num_generations=2,
             save_steps=1, max_completion_length=1024, max_turns=2, max_turn_tokens=32)
LESS = {"tasks make": ["--per-package", "4"], "hints score": ["--sites", "4"],
        "eval": ["--samples", "1", "--max-turns", "2", "--max-tokens", "1024"]}


def smaller(words: list[str], cwd: Path) -> list[str]:
    "A command of the page with the embedded model and small limits, its patterns expanded as a shell does."
    given = [expanded for word in words
             for expanded in (sorted(str(p.relative_to(cwd)) for p in cwd.glob(word)) if "*" in word else [word])]
    given = ["embedded" if word == SEVEN else word for word in given]
    more = next((more for name, more in LESS.items() if words[:len(name.split())] == name.split()), [])
    if words[0] == "train" and "--dry-run" not in words:
        more = ["--set", f"max_steps={2 if 'resume=true' in words else 1}"]
    return given + more


def environment() -> dict:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200"}


def answered(server: list[str], request: list[str], cwd: Path) -> dict:
    "What the page's server answers to the page's curl, on a free port."
    port = str(free_port())
    process = subprocess.Popen([port if word == "8020" else word for word in server], cwd=cwd, env=environment())
    try:
        limit = time.monotonic() + 300
        while time.monotonic() < limit and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", int(port)), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        headers = dict([request[request.index("-H") + 1].split(": ")])
        asked = urllib.request.Request(request[1].replace("8020", port), request[request.index("-d") + 1].encode(), headers)
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return json.load(answer)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.slow
def test_every_command_of_the_road_runs_in_order(tmp_path):
    text, composer = ROAD.read_text(encoding="utf-8"), str(Path(sys.executable).with_name("composer-rl"))
    shutil.copytree(LARDER, tmp_path / "my-package")
    (tmp_path / "runs").mkdir()
    write_traces(toy_traces(), tmp_path / "runs" / "agent.jsonl.gz")
    [recipe] = blocks(text, "yaml")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(yaml.safe_load(recipe.text) | SMALL))
    ran, pending = [], lines(text)
    while pending:
        words = pending.pop(0)
        if words[1:3] == ["serve", "model"]:
            answer = answered([composer, *words[1:]], pending.pop(0), tmp_path)
            assert answer["model"] == "mine" and answer["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
            continue
        assert words[0] == "composer-rl", words
        given = smaller(words[1:], tmp_path)
        done = subprocess.run([composer, *given], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"composer-rl {shlex.join(given)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        ran.append((words[1], done.stdout + done.stderr))
    assert len(ran) >= 15 and "Step 2 of 2" in [out for name, out in ran if name == "train"][-1]
    assert "pass@1" in dict(ran)["eval"] and "were trained on" not in dict(ran)["eval"]
    for name in ("run.json", "split.json", "index.html", "README.md", "rollouts"):
        assert (tmp_path / "out" / "mine" / name).exists(), name
    assert any((tmp_path / "out" / "preferences").rglob("*.parquet"))


def test_the_roads_figures_are_those_of_its_recipe(tmp_path):
    text = ROAD.read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(blocks(text, "yaml")[0].text)
    plan = load_recipe(tmp_path / "mine.yaml", estimating=True)
    shape = published_shape(plan.arguments.model)
    one, eight = (estimate(plan, devices, shape=shape) for devices in (1, 8))
    rows = {"peak memory of a device": lambda e: size(e.peak), "rollouts a step": lambda e: f"{e.rollouts_per_step:g}"}
    for name, figure in rows.items():
        row = rf"^\| \[?{name}(\]\(\S+\))? \| {re.escape(figure(one))} \| {re.escape(figure(eight))} \|$"
        assert re.search(row, text, re.M), name
