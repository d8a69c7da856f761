"Hint layers of one's own, by their place, from every command that makes hints."
import orjson
import pytest
from typer.testing import CliRunner

from composer_replication.cli import hints
from composer_replication.cli.app import app
from composer_replication.core.files import read_jsonl
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer

LAYER = '''
class Same:
    name = "same"

    def generate(self, error_kind, error_meta):
        return "Look at what the last tool said."


class Picky:
    name = "picky"

    def generate(self, error_kind, error_meta):
        return "There are other tools." if error_kind == "tool_not_found" else None


class Wanting(Same):
    def __init__(self, table):
        self.table = table


def nothing():
    return None


def broken():
    raise KeyError("table")
'''


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "own_layers.py").write_text(LAYER)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


def rows(result):
    assert result.exit_code == 0, result.output
    return [orjson.loads(line) for line in result.stdout.splitlines()]


def test_a_layer_of_ones_own_speaks_first_and_the_others_after_it(call):
    own = rows(call("hints", "list", "--json", "--hints", "own_layers:Same"))
    assert {row["layer"] for row in own} == {"same"} and {row["hint"] for row in own} == {"Look at what the last tool said."}
    order = rows(call("hints", "list", "--json", "--hints", "own_layers:Picky", "--hints", "raw_error"))
    assert {row["layer"] for row in order} == {"picky", "raw_error"}
    alone = rows(call("hints", "list", "--json", "--hints", "raw_error"))
    assert all(b["layer"] == "picky" if a["kind"] == "tool_not_found" else a == b for a, b in zip(alone, order, strict=True))


@pytest.mark.parametrize("name, told", [
    ("own_layers:Nobody", "module 'own_layers' has no 'Nobody' that makes a hint layer"),
    ("no_such_module:Same", "there is no hint layer 'no_such_module:Same'"),
    ("unheard_of", "there is no layer 'unheard_of' here; use raw_error, sibling, sql, template, or package.module:layer"),
    ("own_layers:Wanting", "the hint layer 'own_layers:Wanting' needs table"),
    ("own_layers:nothing", "'own_layers:nothing' makes NoneType, which has no `generate(error_kind, error_meta)`"),
    ("own_layers:broken", "the hint layer 'own_layers:broken' could not be made: KeyError ('table')"),
    ("judge", "judge and learned ask a model, which only a recipe names"),
])
def test_a_layer_that_cannot_be_made_is_told_in_a_sentence(call, name, told):
    result = call("hints", "list", "--hints", name)
    assert result.exit_code != 0 and told in " ".join(result.output.split()), result.output


@pytest.mark.slow
def test_hints_score_and_explore_take_it(call):
    scored = call("hints", "score", "--hints", "own_layers:Same", "--sites", "2", "--json", "--out", "scores")
    assert scored.exit_code == 0, scored.output
    assert {row["layer"] for row in map(orjson.loads, open("scores/scores.jsonl", "rb"))} == {"same"}
    page = call("explore", "--hints", "own_layers:Same", "--traces", "2", "--out", "page.html")
    assert page.exit_code == 0, page.output
    assert "Look at what the last tool said." in open("page.html").read()


def test_rows_of_other_settings_are_kept_aside_and_told(tmp_path, capsys):
    file, settings = tmp_path / "scores.jsonl", {"sites": 4}

    def gather(rows, known, settings):
        return hints._gather(lambda told: iter(rows), lambda row: row, known, file, settings, "scoring")

    gather([{"n": 1}, {"n": 2}], {}, settings)
    with pytest.raises(KeyboardInterrupt):
        hints._gather(interrupted, lambda row: row, {}, file, {"sites": 5}, "scoring")
    assert [row for _, row in read_jsonl(tmp_path / "scores-1.jsonl")] == [{"n": 1}, {"n": 2}] and not file.read_text()
    assert "kept as scores-1.jsonl" in capsys.readouterr().err.replace("\n", " ")
    gather([{"n": 3}], {}, {"sites": 5})
    assert gather([{"n": 3}, {"n": 4}], {1: {"n": 3}}, {"sites": 5}) and not (tmp_path / "scores-2.jsonl").exists()


def interrupted(told):
    raise KeyboardInterrupt
    yield


def test_another_template_or_tokenizer_is_another_model(tmp_path):
    from types import SimpleNamespace
    embedded_model().save_pretrained(tmp_path)
    embedded_tokenizer().save_pretrained(tmp_path)
    loaded = SimpleNamespace(name=str(tmp_path), base=None)
    before = hints._weights(loaded)
    assert hints._weights(loaded) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert hints._weights(loaded) != before
