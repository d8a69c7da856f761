"Hint layers of one's own, by their place, from every command that makes hints."
import orjson
import pytest

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
    ("own_layers:broken", "what makes the hint layer 'own_layers:broken' ended with KeyError ('table')"),
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
