"What a page says of its making: the command, the data by its hash, nothing that looks like a key."
import hashlib
import json
import re
import shlex

import pytest
from forks import composer

from composer_replication.core.provenance import command_line, provenance, source_commit
from composer_replication.envs.toy.traces import toy_path
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.record import run_record
from composer_replication.report.html import page
from composer_replication.report.run import run_page


def test_the_data_is_named_by_what_is_in_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"one\n")
    made = provenance([tmp_path / "a.jsonl"], seed=7)
    assert made["data"] == {"a.jsonl": hashlib.sha256(b"one\n").hexdigest()[:12]} and made["seed"] == 7
    assert str(tmp_path) not in json.dumps(made["data"])
    assert made["versions"]["python"] and made["hardware"]["cores"] >= 1


def test_two_files_of_one_name_are_both_named(tmp_path):
    for folder, text in (("a", b"one"), ("b", b"two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_bytes(text)
    digests = provenance([tmp_path / "a" / "x", tmp_path / "b" / "x"])["data"]
    assert digests == {"x": hashlib.sha256(b"one").hexdigest()[:12], "x (2)": hashlib.sha256(b"two").hexdigest()[:12]}


@pytest.mark.parametrize("words, shown", [
    *((["--set", f"{name}={value}"], ["--set", f"{name}=<hidden>"]) for name, value in (
        ("hub_token", "hf_abc"), ("api_key", "sk-1"), ("my_secret", "x"), ("password", "y"))),
    (["--set=hub_token=hf_abc", "wandb.api_key=1"], ["--set=hub_token=<hidden>", "wandb.api_key=<hidden>"]),
    (["--set", "max_tokens=3", "a token: b"], ["--set", "max_tokens=3", "a token: b"]),
    (["--queue", "sftp://me:pw1@host/q"], ["--queue", "sftp://<hidden>@host/q"]),
    (["--set", "vllm_server_base_url=http://u:pw2@host:1"], ["--set", "vllm_server_base_url=http://<hidden>@host:1"])])
def test_what_looks_like_a_key_is_not_kept(words, shown):
    assert command_line(["/a/b/composer-rl", "train", *words]) == ["composer-rl", "train", *shown]


def test_a_key_inside_a_setting_is_hidden():
    shown = command_line(["composer-rl", "--set", "model_init_kwargs={token: hf_x, dtype: auto}", "--set", 'x={"token": "hf_x"}'])
    assert "hf_x" not in " ".join(shown) and "dtype: auto" in shown[2]


def test_the_commit_is_that_of_this_repository():
    commit = source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{12}\+?", commit)


def test_a_page_ends_with_what_made_it():
    made = {"command": "composer-rl x '<b>'", "seed": 3, "versions": {"python": "3.11"}}
    shown = page("T", "<p>body</p>", made=made)
    end = shown.partition("How this page was made")[2]
    assert "composer-rl x &#39;&lt;b&gt;&#39;" in end and "python 3.11" in end
    assert "How this page was made" not in page("T", "")


def test_the_page_of_a_command_can_be_made_again_by_its_own_line(tmp_path):
    done = composer("explore", "--traces", 1, "--seed", 3, "--out", "here.html", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "here.html").read_text()
    [line] = re.findall(r"<p>The same again:</p><pre>(.*?)</pre>", shown)
    assert shlex.split(line) == ["composer-rl", "explore", "--traces", "1", "--seed", "3", "--out", "here.html",
                                 "--json"]
    assert toy_path().name in shown and hashlib.sha256(toy_path().read_bytes()).hexdigest()[:12] in shown


def test_an_evaluation_says_what_made_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "Double 2.", "answer": "#### 4"}\n')
    line = ["eval", "embedded", "--task", "gsm8k", "--tasks", "rows.jsonl", "--max-turns", 1, "--max-tokens", 64,
            "--seed", 4, "--out", "o"]
    done = composer(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "o" / "result.json").read_text())
    assert shlex.split(row["made"]["command"]) == ["composer-rl", *map(str, line)] and row["made"]["seed"] == 4
    assert row["made"]["data"] == {"rows.jsonl": hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()[:12]}
    assert {"commit", "date", "versions", "hardware"} <= row["made"].keys() and row["made"]["model"] == "embedded"


def test_the_page_of_a_run_names_its_data_and_its_command(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"a": 1}\n')
    recipe = load_recipe("toy", {"traces": f"[{tmp_path / 'm*.jsonl'}, embedded]", "output_dir": str(tmp_path)})
    record = run_record(recipe, ["t"])
    of = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
          for path in (tmp_path / "mine.jsonl", toy_path())}
    assert record["data"] == of
    end = run_page(record).partition("How this page was made")[2]
    assert all(f"{name} {digest}" in end for name, digest in of.items()) and record["versions"]["torch"] in end
    assert shlex.join(record["command"]).partition(" ")[0] in end and f"{record['hardware']['cores']}" in end
