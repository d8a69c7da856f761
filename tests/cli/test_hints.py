"Hint layers of one's own, by their place, from every command that makes hints."
from types import SimpleNamespace

import orjson
import pytest

from composer_replication.cli import hints
from composer_replication.core.files import kept_rows, read_jsonl, write_jsonl
from composer_replication.core.trace import Trace
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.checkpoint import fingerprint

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


@pytest.fixture(autouse=True)
def layers(tmp_path):
    (tmp_path / "own_layers.py").write_text(LAYER)


def test_a_layer_of_ones_own_speaks_first_and_the_others_after_it(rows):
    own = rows("hints", "list", "--hints", "own_layers:Same")
    assert {row["layer"] for row in own} == {"same"} and {row["hint"] for row in own} == {"Look at what the last tool said."}
    order = rows("hints", "list", "--hints", "own_layers:Picky", "--hints", "raw_error")
    assert {row["layer"] for row in order} == {"picky", "raw_error"}
    alone = rows("hints", "list", "--hints", "raw_error")
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
    file = tmp_path / "scores.jsonl"
    case = SimpleNamespace(trace=Trace("t", ()), site=SimpleNamespace(turn=0))
    row = lambda n: {"trace_id": "t", "turn": 0, "n": n}

    def gather(rows, settings):
        asked = []
        make = lambda known, tell: asked.append(known) or iter(rows)
        made = hints.gather_scores(make, lambda row: row, lambda case, row: row, [case], file, settings, "./mine", "scoring")
        assert made == rows
        return asked[0]

    assert gather([row(1)], {"sites": 4}) == {} and gather([row(1)], {"sites": 4}) == {("t", 0): row(1)}
    with pytest.raises(KeyboardInterrupt):
        hints.gather_scores(interrupted, lambda row: row, None, [case], file, {"sites": 5}, "./mine", "scoring")
    assert [row for _, row in read_jsonl(tmp_path / "scores-1.jsonl")] == [row(1)] and not file.exists()
    assert "kept as scores-1.jsonl" in capsys.readouterr().err.replace("\n", " ")
    assert gather([row(3)], {"sites": 5}) == {} and not (tmp_path / "scores-2.jsonl").exists()


def interrupted(known, tell):
    raise KeyboardInterrupt
    yield


@pytest.mark.parametrize("settings", [{"seed": 1}, {}, {"seed": 0, "more": None}])
def test_rows_are_those_of_equal_settings_alone(tmp_path, settings):
    file = tmp_path / "rows.jsonl"
    assert kept_rows(file, {"seed": 0}) == ([], None)
    write_jsonl(file, [{"n": 1}])
    assert kept_rows(file, {"seed": 0}) == ([{"n": 1}], None)
    assert kept_rows(file, settings) == ([], tmp_path / "rows-1.jsonl") and not file.exists()
    (tmp_path / "rows.jsonl").touch()  # nothing of worth
    assert kept_rows(file, {"seed": 0}) == ([], None)


def test_another_template_or_tokenizer_is_another_model(tmp_path):
    embedded_model().save_pretrained(tmp_path)
    embedded_tokenizer().save_pretrained(tmp_path)
    loaded = SimpleNamespace(name=str(tmp_path), base=None)
    before = fingerprint(loaded)
    assert fingerprint(loaded) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(loaded) != before
