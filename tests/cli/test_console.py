"""All commands: help with examples that parse, `--json`, exit codes, completion, and output that suits a pipe."""
import gzip
import inspect
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
import typing
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer
from forks import FORCED, composer, started
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.cli.console import EXIT_CODES, ExitCode, emit, load_tools, stream, threads_for
from composer_replication.experiments.ladder import ARMS

DOCS = str(Path(__file__).resolve().parents[2] / "docs")
sys.path.append(DOCS)
from commands import examples, walk  # noqa: E402
from commands import page as commands_page  # noqa: E402

COMMAND = Path(sys.executable).with_name("composer-rl")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in FORCED} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ALL = dict(walk(typer.main.get_command(app), "composer-rl"))
LEAVES = {name: command for name, command in ALL.items() if not hasattr(command, "commands")}
GROUPS = [name for name in ALL if name not in LEAVES]
MISSING = {  # a file that is not there, in each command that reads one
    "composer-rl tasks make": ["nowhere/package"], "composer-rl tasks validate": ["nowhere"],
    "composer-rl tasks from-rows": ["nowhere", "--mirrors", "."],
    "composer-rl tasks show": ["nowhere"], "composer-rl tasks attack": ["nowhere"], "composer-rl serve tasks": ["nowhere"],
    "composer-rl train": ["--config", "nowhere.yaml"], "composer-rl launch": ["nowhere.yaml", "--on", "local", "--hours", "1"],
    "composer-rl jobs status": ["nowhere"], "composer-rl jobs logs": ["nowhere"], "composer-rl jobs cancel": ["nowhere"],
    "composer-rl pairs": ["nowhere", "--out", "x"], "composer-rl explore": ["nowhere"],
    "composer-rl hints list": ["nowhere"], "composer-rl hints score": ["nowhere"],
    "composer-rl hints write": ["nowhere"], "composer-rl hints train": ["nowhere"],
    "composer-rl traces errors": ["nowhere"], "composer-rl traces show": ["nowhere"],
    "composer-rl eval": ["./nowhere", "--task", "toy"], "composer-rl export": ["./nowhere", "--out", "x"],
    "composer-rl dataset traces": ["nowhere", "--out", "x", "--licence", "other"],
    "composer-rl dataset pairs": ["nowhere", "--out", "x", "--licence", "other"],
    "composer-rl serve model": ["./nowhere"], "composer-rl recipes show": ["nowhere"],
    "composer-rl replay": ["nowhere", "--gate", "everyone", "--price", "m=1,1", "--teachers", "m@http://127.0.0.1:1/v1"]}
QUICK = {  # what really runs here, with what it needs
    "composer-rl traces errors": [], "composer-rl traces show": [], "composer-rl hints list": [],
    "composer-rl hints score": ["--sites", "4", "--out", "out"],
    "composer-rl hints write": ["--sites", "2", "--n", "2", "--out", "out"],
    "composer-rl explore": ["--traces", "1", "--out", "out.html", "--chat-template", "chatml-tools"],
    "composer-rl train": ["--config", "toy", "--set", "max_steps=1", "--set", "output_dir=out", "--set", "train_rows=8",
                          "--set", "max_turns=2", "--set", "gradient_accumulation_steps=1"],
    "composer-rl launch": ["toy", "--on", "slurm", "--hours", "1", "--dry-run"],
    "composer-rl tasks show": ["TASKS"], "composer-rl recipes list": [], "composer-rl recipes show": ["toy"],
    "composer-rl eval": ["embedded", "--task", "toy", "--limit", "2", "--max-turns", "2", "--out", "out"],
    "composer-rl export": ["embedded", "--out", "plain"],
    "composer-rl dataset traces": ["--out", "toy", "--licence", "other"],
    "composer-rl replay": ["--estimate", "--teachers", "openai/gpt-5.5", "--teachers", "openai/gpt-5.4"]}
SHIPPED_TASKS = Path(sys.modules["composer_replication"].__file__).parent / "data" / "repos" / "larder.tasks.jsonl"


def words_of(name, more):
    return [*name.split()[1:], *(str(SHIPPED_TASKS) if word == "TASKS" else word for word in more)]


def ran(name, *more, cwd, **environment):
    "The command as a process of its own, its output in files."
    return composer(*words_of(name, more), cwd=cwd, env=ENVIRONMENT | environment)


def option_names(command):
    return {word for option in command.params for word in option.opts}


# Help

def test_commands_stand_in_the_order_of_use():
    order = ["demo", "traces", "hints", "explore", "train", "generate", "launch", "jobs", "eval", "export", "ladder",
             "tasks", "replay", "pairs", "dataset", "serve", "recipes", "models", "doctor"]
    assert list(ALL["composer-rl"].commands) == order
    groups = ["traces", "hints", "jobs", "tasks", "dataset", "serve", "recipes", "models"]
    assert len(LEAVES) == 39 and GROUPS == ["composer-rl", *(f"composer-rl {name}" for name in groups)]


@pytest.mark.parametrize("name", ALL)
def test_help_ends_with_examples_that_parse(name):
    help = ALL[name].help
    before, heading, shown = help.partition("Examples:\n\n")
    lines = [line.strip() for line in shown.strip().split("\n\n")]
    assert before.strip() and heading and "Example" not in before
    assert lines == [f"`{example}`" for example in examples(help)]
    assert (EXIT_CODES in help) is (name in GROUPS)
    said = CliRunner().invoke(app, [*name.split()[1:], "--help"])
    assert said.exit_code == 0 and "Examples:" in said.stdout
    for example in examples(help):
        whole = max((known for known in LEAVES if example.startswith(known + " ") or example == known), key=len)
        assert whole == name or name in GROUPS and whole.startswith(name)
        with LEAVES[whole].make_context(whole, shlex.split(example)[len(whole.split()):]) as context:
            assert context.params
    if name in LEAVES:
        assert "--json" in option_names(ALL[name])
        assert all(option.help and option.help[-1] == "." for option in ALL[name].params)


HEAVY = {"torch", "transformers", "numpy", "openai", "orjson", "yaml", "psutil", "rich.progress",
         "composer_replication.core.trace"}


HELP = f"""
import sys; sys.path.append({DOCS!r})
import typer; from typer.testing import CliRunner; from composer_replication.cli.app import app
from commands import walk
for name, _ in walk(typer.main.get_command(app), 'composer-rl'):
    done = CliRunner().invoke(app, [*name.split()[1:], '--help'])
    assert done.exit_code == 0 and 'Examples' in done.stdout, name
print(*sys.modules)"""
COMPLETE = ("import atexit, sys; atexit.register(lambda: print(*sys.modules))\n"
            "from composer_replication.cli.app import main\nmain()")
ASKED = {"_COMPOSER_RL_COMPLETE": "complete_bash", "COMP_WORDS": "composer-rl train --config ", "COMP_CWORD": "3"}


@pytest.mark.parametrize("code, asked, shown", [(HELP, {}, "rich.table"), (COMPLETE, ASKED, "toy")], ids=["help", "completion"])
def test_help_of_every_command_and_completion_load_what_they_show_and_no_more(code, asked, shown, tmp_path):
    "In a process that has just begun: whoever asks waits for the import of each of these."
    done = subprocess.run([sys.executable, "-c", code], text=True, timeout=600, env=ENVIRONMENT | asked, cwd=tmp_path,
                          capture_output=True)
    loaded = set(done.stdout.split())
    assert {shown, "composer_replication.cli.train"} <= loaded and not HEAVY & loaded, done.stderr


def test_the_page_of_commands_tells_all():
    page = commands_page()
    for name, command in LEAVES.items():
        part = page.split(f"### {name}\n")[1].split("\n## ")[0].split("\n### ")[0]
        assert all(f"| `{word}` |" in part for word in option_names(command) if word.startswith("--")), name
        assert all(example in part for example in examples(command.help)), name
    assert all(f"| {ending.value} | {ending.meaning} |" in page for ending in ExitCode)
    assert "| `--seed` | `0` |" in page and "| `--json` |  |" in page and page.count("\n## ") == len(GROUPS)


# Exit codes

@pytest.mark.parametrize("name", ALL)
def test_a_wrong_option_is_wrong_usage(name):
    done = CliRunner().invoke(app, [*name.split()[1:], "--no-such-option"])
    assert done.exit_code == ExitCode.MISUSED and not done.stdout and "No such option" in done.stderr


def numbers(kind):
    "Every option of such a number: the command's name, and the option."
    for name, command in LEAVES.items():
        hints = typing.get_type_hints(inspect.unwrap(command.callback))
        yield from ((name, option.opts[0]) for option in command.params if option.param_type_name == "option"
                    and kind in (hints.get(option.name), *typing.get_args(hints.get(option.name))))


@pytest.mark.parametrize("name, option", numbers(float))
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_none_is_wrong_usage(name, option, value):
    if (name, option, value) == ("composer-rl tasks make", "--minutes", "inf"):
        pytest.skip("the default: no limit")
    done = CliRunner().invoke(app, [*shlex.split(examples(LEAVES[name].help)[0])[1:], option, value])
    assert done.exit_code == ExitCode.MISUSED and option in done.stderr and not done.stdout


@pytest.mark.parametrize("name, option", [(name, option) for name, option in numbers(int) if option == "--seed"])
@pytest.mark.parametrize("value", ["-1", str(2**32), str(10**30), "nan", ""])
def test_a_seed_that_no_generator_takes_is_wrong_usage(name, option, value):
    done = CliRunner().invoke(app, [*shlex.split(examples(LEAVES[name].help)[0])[1:], option, value])
    assert done.exit_code == ExitCode.MISUSED and option in done.stderr and not done.stdout


@pytest.mark.parametrize("words, served", [
    ("hints list --key-env KEY", "--judge"), ("hints list --price m=1,1", "--judge"),
    ("hints rules --model m", "--keep-if-better"), ("hints rules --budget-usd 0", "--keep-if-better"),
    ("hints rules --unsafe-local", "--keep-if-better"), ("hints try --budget-usd 1", "--model MODEL@URL"),
    ("hints try --root /testbed", "--workspace"), ("pairs file --out x --detectors repeated_call", "--make")])
def test_an_option_that_would_change_nothing_is_refused(words, served, call):
    done = call(*words.split())
    assert done.exit_code == ExitCode.FAILED and not done.stdout
    option = next(word for word in words.split()[2:] if word.startswith("--") and word != "--out")
    assert f"error: {option} changes nothing without {served}; give both, or leave it out." in done.stderr


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_file_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words_of(name, MISSING[name]))
    assert done.exit_code == ExitCode.FAILED and isinstance(done.exception, SystemExit), done.exception
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and (len(done.stderr.splitlines()) == 1 or name.endswith("make")), done.stderr
    assert not done.stdout


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_package_that_is_not_there_leaves_no_empty_table(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the index is not asked
    done = CliRunner().invoke(app, ["tasks", "make", "nonexistent", *words])
    assert done.exit_code == ExitCode.FAILED and "error: no task could be made" in done.stderr
    assert not done.stdout if not words else json.loads(done.stdout)["problem"]


BAD_FILES = {"folder": None, "empty": b"", "no JSON": b"\xff\xfe{", "nested": b"[" * 100_000 + b"]" * 100_000,
             "lines of a binary": b"\x00\xff\n" * 3000}


@pytest.mark.parametrize("name", sorted({*MISSING} - {"composer-rl tasks make"}))
@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_folder_an_empty_file_and_no_json_are_one_sentence(name, content, tmp_path, monkeypatch):
    if name == "composer-rl serve tasks":
        pytest.importorskip("openenv")  # without it the command says that first
    monkeypatch.chdir(tmp_path)
    [file] = [Path(word) for word in MISSING[name] if "nowhere" in word]
    file.mkdir() if content is None else file.write_bytes(content)
    done = CliRunner().invoke(app, words_of(name, MISSING[name]))
    assert done.exit_code == ExitCode.FAILED and isinstance(done.exception, SystemExit), done.exception
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr and not done.stdout
    assert str(file.name) in done.stderr and len(done.stderr.splitlines()) < 8


REPLAY = "replay --gate everyone --price m=1,1 --teachers m@http://127.0.0.1:1/v1"  # where nobody answers
OUTPUTS = {  # what writes a file, and what writes a folder: the words before the place; the option stands last
    "file": ["explore --out", "hints rules --out", "hints try --pairs", "hints try --to end --episodes", "pairs file --out",
             "tasks make x --out", "tasks from-rows file --mirrors . --out", "tasks validate TASKS --out",
             f"{REPLAY} --pairs", f"{REPLAY} --report"],
    "folder": ["hints score --out", "hints try --out", "hints rules --keep-if-better --model embedded --branches",
               "hints write --out", "hints train file --out", "eval embedded --task toy --out", "export embedded --out",
               "ladder --out", "demo --out", "dataset traces --licence other --out",
               "dataset pairs file --licence other --out", "serve model embedded --record"]}
PLACES = {"below a file": "file/below/it", "nothing can be made there": "/proc/nowhere/below",
          "a link to where nothing can be made": "dangling", "a device": "device", "a folder": "."}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind, words", [(kind, words) for kind in OUTPUTS for words in OUTPUTS[kind]])
def test_what_cannot_be_written_is_found_out_first(kind, words, place, tmp_path, monkeypatch):
    if kind == "folder" and place == ".":
        pytest.skip("a folder is what it writes")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("device").symlink_to(os.devnull)
    Path("dangling").symlink_to("/proc/nowhere/below")
    done = CliRunner().invoke(app, [*words_of("composer-rl", words.split()), place])
    assert done.exit_code == ExitCode.FAILED and done.stderr.count("error: ") == 1 and not done.stdout
    assert words.split()[-1] in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "device", "file"] and Path("device").is_symlink()


@pytest.mark.parametrize("words", [words for kind in OUTPUTS.values() for words in kind if " file " not in words])
def test_a_working_directory_that_is_gone_is_said(words, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = CliRunner().invoke(app, [*words_of("composer-rl", words.split()), "out"])
    assert done.exit_code == ExitCode.FAILED and not done.stdout
    assert done.stderr.splitlines()[-1] == "error: the working directory is no longer there; change into another one."


def test_links_in_a_circle_are_one_sentence(call, tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for words in (f"{REPLAY} --ledger a", "traces show a", "tasks show a", "explore --out a/page.html"):
        done = call(*words.split())
        assert done.exit_code == ExitCode.FAILED and isinstance(done.exception, SystemExit), done.exception
        assert done.stderr.count("error: ") == 1


@pytest.mark.parametrize("words", ["traces show", "hints list --first 1", "hints rules", "explore --out page.html",
                                   "dataset traces --licence other --out d", "pairs --make recovery --out p.jsonl",
                                   "hints list --json"])
def test_a_file_name_that_is_not_utf_8_is_a_name(words, call, tmp_path):
    from composer_replication.envs.toy.traces import toy_path
    name = os.fsdecode(b"n\xff\xc3\xa9[b].jsonl.gz")
    (tmp_path / name).write_bytes(toy_path().read_bytes())
    done = call(*words.split(), name)
    assert done.exit_code == 0 and "error" not in done.stderr.splitlines(), (done.stderr, done.exception)


@pytest.mark.parametrize("words", ["hints list --first 3", "traces errors --json"])
def test_an_output_that_is_not_utf_8_loses_letters_and_no_lines(words, tmp_path):
    from composer_replication.envs.toy.traces import toy_path
    (tmp_path / "é.jsonl").write_bytes(gzip.decompress(toy_path().read_bytes()).replace(b"Error: ", "Error — é: ".encode()))
    whole, done = (subprocess.run([COMMAND, *words.split(), "é.jsonl"], capture_output=True, cwd=tmp_path, timeout=600,
                                  env=ENVIRONMENT | {"PYTHONIOENCODING": encoding}) for encoding in ("utf-8", "ascii"))
    assert done.returncode == 0 and done.stdout.isascii() and b"Traceback" not in done.stderr
    whole, lines = whole.stdout.decode().splitlines(), done.stdout.decode().splitlines()
    if "--json" in words:
        assert [*map(json.loads, lines)] == [*map(json.loads, whole)]
    else:
        assert len(lines) == len(whole)


def test_problems_are_told_as_they_come_once_a_trace_was_read(tmp_path):
    (tmp_path / "bad").write_text('{"a": 1}\n')
    from composer_replication.envs.toy.traces import toy_path
    told = []
    assert len(list(stream([tmp_path / "bad", toy_path(), tmp_path / "bad"], on_problem=told.append))) == 60
    assert len(told) == 2


BIG = 2**70 + 1


@pytest.mark.parametrize("row", [{"n": BIG}, {"n": [-BIG, {"m": BIG}], "words": "é"}, {"n": BIG, "half a pair": "\ud800"}])
def test_a_json_line_holds_integers_of_any_size(row, capsys):
    emit(row | {"rate": math.nan})
    line = capsys.readouterr().out
    assert json.loads(line) == row | {"rate": None} and line.count("\n") == 1 and "NaN" not in line


def test_tools_of_a_file_keep_integers_of_any_size(tmp_path):
    schema = {"name": "f", "parameters": {"properties": {"n": {"maximum": BIG}}}}
    for content in ([schema], {"mine": [schema]}):
        (tmp_path / "tools.json").write_text(json.dumps(content))
        assert load_tools(tmp_path / "tools.json") == (schema,)


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("composer_replication.traces.error_sites.SiteFinder.__call__", lambda self, trace: 1 / 0)
    assert isinstance(CliRunner().invoke(app, ["traces", "errors"]).exception, ZeroDivisionError)


def test_ctrl_c_is_130(monkeypatch):
    def press(self, trace):
        raise KeyboardInterrupt
    monkeypatch.setattr("composer_replication.traces.error_sites.SiteFinder.__call__", press)
    done = CliRunner().invoke(app, ["traces", "errors"])
    assert done.exit_code == ExitCode.INTERRUPTED and done.stderr.endswith("interrupted\n")


# Pipes and terminals

@pytest.mark.parametrize("name", QUICK)
def test_json_is_all_there_is_on_standard_output(name, tmp_path):
    if name == "composer-rl export":  # tqdm looks at its environment as it is imported
        done = subprocess.run([COMMAND, *words_of(name, QUICK[name]), "--json"], capture_output=True, text=True, timeout=600,
                              cwd=tmp_path, env=ENVIRONMENT)
    else:
        done = ran(name, *QUICK[name], "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert all(isinstance(json.loads(line), dict) for line in done.stdout.splitlines())
    if name != "composer-rl train":  # its bars are those of the export
        assert "\x1b" not in done.stderr and "it/s" not in done.stderr


def test_a_pipe_gets_whole_lines_without_escape_codes(tmp_path):
    for name in ("composer-rl traces errors", "composer-rl traces errors --help", "composer-rl --nope"):
        done = ran(name, cwd=tmp_path)
        assert "\x1b" not in done.stdout + done.stderr and done.stdout + done.stderr
        assert "…" not in done.stdout


def test_a_table_in_a_pipe_is_as_wide_as_columns_and_loses_nothing(tmp_path):
    rows = [json.loads(row) for row in ran("composer-rl hints list", "--json", cwd=tmp_path).stdout.splitlines()]
    longest = max((row["hint"] or "" for row in rows), key=len)
    for columns, width in ((None, 100), ("72", 72), ("wide", 100), ("0", 100)):
        table = ran("composer-rl hints list", "--first", "1000", cwd=tmp_path, **({"COLUMNS": columns} if columns else {})).stdout
        table = table[table.index("┏"):table.index("┃ turns")]  # the summary by hint cuts them
        assert max(len(line) for line in table.splitlines()[:-2]) == width < len(longest)  # the last two are no table
        told = " ".join(line.split("│")[-2].strip() for line in table.splitlines() if line.count("│") == 3)
        row = next(row for row in rows if row["hint"] == longest)
        for name in ("action", "error", "hint"):
            assert " ".join(row[name].split()) in told.replace(f"{name}:", "") and "…" not in table


def test_a_list_shows_what_an_error_ends_with_and_what_may_be_the_machines_fault(call, tmp_path):
    trace = "Traceback (most recent call last):\n  File 'a.py', line 1\nModuleNotFoundError: No module named 'numpy'"
    texts = trace, "PASSED " * 100 + "the end"
    turns = [{"role": "user", "content": "go"}]
    for text in texts:
        called = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        turns += [{"role": "assistant", "content": "", "tool_calls": [called]},
                  {"role": "tool", "tool_call_id": "c", "content": text, "is_error": True}]
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": turns}))
    done = call("hints", "list", "mine.jsonl")
    shown = " ".join("".join(line.split("│")[2:3]).strip() for line in done.stdout.splitlines())
    assert "error: ModuleNotFoundError: No module named 'numpy'" in shown and "Traceback" not in shown
    assert f"error: …{texts[1][-199:]}".replace(" ", "") in shown.replace(" ", "")
    assert "1 of 2 say that something is not installed" in done.stderr


def test_a_list_is_summed_up_by_hint_counts_all_and_says_how_to_get_all(call, rows):
    found = rows("hints", "list")
    by_hint = Counter((row["layer"], row["hint"]) for row in found)
    every, few, some = (call("hints", "list", *more).stdout for more in (("--first", 1000), ("--first", 3), ()))
    counts = every.splitlines()[-1]
    assert len(rows("hints", "list", "--first", "3")) == 3
    assert sum(int(part.split(": ")[1]) for part in counts.split(", ")) == len(found)
    assert few.splitlines()[-1] == f"{counts}; {len(found) - 3} of them not listed"
    listed, summary = some.split("┃ turns")
    turns = [int(line.split("│")[1]) for line in summary.splitlines() if line.startswith("│") and line.split("│")[1].strip()]
    most = [count for _, count in by_hint.most_common()]
    assert turns == most[:20] + [sum(most[20:])] * (len(most) > 20)
    firsts = {(row["layer"], row["hint"]): f"turn {row['message_index']}" for row in reversed(found)}
    cells = [line.split("│")[1].strip() for line in listed.splitlines() if line.startswith("│")]
    shown = [cell for cell in cells if cell.startswith("turn ")]
    assert sorted(shown) == sorted(firsts[key] for key, _ in by_hint.most_common(20))
    more = f"; {len(found) - len(shown)} of them not listed: --first {len(found)} or --json lists all"
    assert some.splitlines()[-1].endswith(more)


def seen_in_a_terminal(*words, program=(COMMAND,), cwd=None, **environment):
    "What a terminal of 80 columns is sent."
    ours, theirs = pty.openpty()
    with subprocess.Popen([*program, *words], stdout=theirs, stderr=theirs, cwd=cwd,
                          env=ENVIRONMENT | {"TERM": "xterm"} | environment) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # how a terminal ends on Linux
                break
            if not more:
                break
            seen += more
        process.wait(60)
    os.close(ours)
    return seen.decode()


def test_a_terminal_gets_colours_unless_no_color_is_set():
    assert "\x1b[3" in seen_in_a_terminal("traces", "show", "nowhere") and "\x1b[1m" in seen_in_a_terminal("traces", "show")
    plain = seen_in_a_terminal("traces", "show", NO_COLOR="1")
    assert "\x1b" not in plain and "toy_traces.jsonl.gz" in plain


def test_a_terminal_is_told_what_a_silent_stage_does_and_a_pipe_is_not(tmp_path):
    assert "reading" in seen_in_a_terminal("hints", "list")
    assert "reading" not in ran("composer-rl hints list", cwd=tmp_path).stderr


def test_the_embedded_model_has_one_thread_and_others_keep_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for model, threads in (("embedded", 1), ("./mine", 2)):
            with pytest.raises(KeyError), threads_for(model):
                assert torch.get_num_threads() == threads
                raise KeyError
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


UNTIL_A_SLOW_IMPORT = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "datasets", "trl"):
            os.write(2, f"<{name}>".encode())
            os._exit(0)
sys.meta_path.insert(0, Watch())
from composer_replication.cli.app import main
main()
"""
SLOW = {  # commands that import what takes seconds
    "explore": [], "hints score": [], "hints write": [],
    "hints train": ["CANDIDATES"], "train": ["--config", "toy"], "train --dry-run": ["--config", "toy"],
    "train --islands": ["2", "--config", "toy"], "generate": ["--config", "toy", "--queue", "q"],
    "eval": ["embedded", "--task", "toy"], "eval RUN": ["--task", "toy"], "export": ["embedded", "--out", "plain"],
    "export RUN": ["--out", "plain"], "serve model": ["embedded"], "serve teachers": [], "ladder": [], "doctor": [],
    "dataset traces": ["--out", "d", "--licence", "other"],
    "replay": ["--estimate", "--teachers", "openai/gpt-5.5", "--tokenizer", "gpt2"]}


@pytest.mark.parametrize("name", SLOW)
def test_a_terminal_is_told_before_an_import_that_takes_seconds(name, tmp_path):
    (tmp_path / "RUN" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "CANDIDATES").write_text("{}\n")
    words = [word.replace("RUN", "./RUN") for word in name.split()] + SLOW[name]
    seen = seen_in_a_terminal(*words, program=(sys.executable, "-c", UNTIL_A_SLOW_IMPORT), cwd=tmp_path)
    before, sign, _ = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen).partition("<")
    assert sign and before.split(), seen


@pytest.mark.parametrize("line", ["hints list --json | head -n 1", "hints list | head -n 1", "--help | head -n 1",
                                  "traces errors --json | true"])
def test_a_pipe_that_closes_early_is_no_failure(line, tmp_path):
    done = subprocess.run(["bash", "-c", f"set -o pipefail; '{COMMAND}' {line}"], capture_output=True, text=True, timeout=600,
                          cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0
    assert not any(word in done.stderr for word in ("Traceback", "Exception", "BrokenPipe", "error:"))


def test_a_server_says_its_address_as_json():
    with started("serve", "teachers", "--agents", "mild", "--port", "0", "--json", env=ENVIRONMENT) as (server, line, said):
        first = json.loads(line)
        assert first["teachers"] == ["mild"] and first["url"].startswith("http://127.0.0.1:")
        server.terminate()
        server.join(600)
        assert server.exitcode == ExitCode.DONE and said.read_text() == line


# Completion

@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_each_shell(shell, tmp_path):
    script = ran("composer-rl", cwd=tmp_path, _COMPOSER_RL_COMPLETE=f"source_{shell}").stdout
    assert "composer-rl" in script and f"complete_{shell}" in script


def completed(line, tmp_path):
    done = ran("composer-rl", cwd=tmp_path, _COMPOSER_RL_COMPLETE="complete_bash", COMP_WORDS=line,
               COMP_CWORD=str(line.count(" ")))
    return done.stdout.split()


def test_names_are_completed(tmp_path):
    (tmp_path / "mine.yaml").touch()
    shipped = {path.stem for path in (SHIPPED_TASKS.parents[1] / "recipes").glob("*.yaml")}
    assert "toy" in shipped and set(completed("composer-rl train --config ", tmp_path)) == shipped | {"mine.yaml"}
    assert completed("composer-rl ladder --arms A1,A", tmp_path) == [f"A1,{arm}" for arm in ARMS]
    assert completed("composer-rl ladder --preset ", tmp_path) == ["quick", "standard", "full"]
    assert completed("composer-rl replay --gate s", tmp_path) == ["sure"]


def test_a_folder_stands_for_the_trace_files_in_it(call, rows, tmp_path):
    from composer_replication.envs.toy.traces import toy_traces
    from composer_replication.traces.export import write_traces
    traces = toy_traces()
    for name, some in (("b.json", traces[10:20]), ("a.jsonl.gz", traces[:10]), ("below/c.jsonl", traces[20:])):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        write_traces(some, tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes.txt").write_text("no trace")
    for name in (("traces", "errors"), ("hints", "list")):
        assert rows(*name, "runs") == rows(*name, "runs/a.jsonl.gz", "runs/b.json") != []
    (tmp_path / "empty").mkdir()
    done = call("hints", "list", "empty")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "empty: no trace file lies directly in this folder" in done.stderr
    assert "files that end in .json, .jsonl, .traj" in done.stderr
