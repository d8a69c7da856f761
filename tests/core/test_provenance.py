"What a page says of its making: the command, the data by its hash, nothing that looks like a key."
import hashlib
import json
import re
import shlex

import pytest
from forks import composer

from composer_replication.core.provenance import command_line, provenance, source_commit
from composer_replication.envs.toy.traces import toy_path
from composer_replication.report.html import page


def test_the_data_is_named_by_what_is_in_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"one\n")
    made = provenance([tmp_path / "a.jsonl"], seed=7)
    assert made["data"] == {"a.jsonl": hashlib.sha256(b"one\n").hexdigest()[:12]} and made["seed"] == 7
    assert str(tmp_path) not in json.dumps(made["data"])


@pytest.mark.parametrize("word", ["hub_token=hf_abc", "api_key=sk-1", "my_secret=x", "PASSWORD=y".lower()])
def test_what_looks_like_a_key_is_not_kept(word):
    name = word.partition("=")[0]
    assert command_line(["/a/b/composer-rl", "train", "--set", word]) == ["composer-rl", "train", "--set", f"{name}=<hidden>"]


def test_a_key_inside_a_setting_is_hidden():
    words = ["composer-rl", "--set", "model_init_kwargs={token: hf_x, dtype: auto}", "--set", 'x={"token": "hf_x"}', "a token: b"]
    shown = command_line(words)
    assert "hf_x" not in " ".join(shown) and "dtype: auto" in shown[2] and shown[-1] == "a token: b"


def test_a_key_is_hidden_in_every_spelling_of_set():
    words = ["composer-rl", "--set=hub_token=hf_abc", "wandb.api_key=1", "--set", "max_tokens=3"]
    assert command_line(words) == ["composer-rl", "--set=hub_token=<hidden>", "wandb.api_key=<hidden>", "--set", "max_tokens=3"]


def test_the_commit_is_that_of_this_repository():
    commit = source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{12}\+?", commit)


def test_a_page_ends_with_what_made_it_and_links_to_those_beside_it():
    made = {"command": "composer-rl x '<b>'", "seed": 3, "versions": {"python": "3.11"}, "pages": {"episodes": "episodes.html"}}
    shown = page("T", "<p>body</p>", made=made)
    end = shown.partition("How this page was made")[2]
    assert "composer-rl x &#39;&lt;b&gt;&#39;" in end and 'href="episodes.html"' in end and "python 3.11" in end
    assert "How this page was made" not in page("T", "")


def test_the_page_of_a_command_can_be_made_again_by_its_own_line(tmp_path):
    done = composer("compose", "--steps", 1, "--seed", 3, "--out", "here", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "here" / "report.html").read_text()
    [line] = re.findall(r"<p>The same again:</p><pre>(.*?)</pre>", shown)
    assert shlex.split(line) == ["composer-rl", "compose", "--steps", "1", "--seed", "3", "--out", "here", "--json"]
    assert toy_path().name in shown and hashlib.sha256(toy_path().read_bytes()).hexdigest()[:12] in shown


def test_a_login_in_an_address_is_hidden():
    shown = command_line(["composer-rl", "train", "--queue", "sftp://me:pw1@host/q", "--set", "vllm_server_base_url=http://u:pw2@host:1"])
    assert "pw1" not in " ".join(shown) and "pw2" not in " ".join(shown) and shown[3] == "sftp://<hidden>@host/q"
