"""What an error text says, in one sentence: texts that look like the sentences' own placeholders."""
import pytest

from composer_replication.core.trace import HintContext
from composer_replication.hints.diagnose import diagnose
from composer_replication.hints.templates import hint_type_error
from composer_replication.hints.text import sentences


@pytest.mark.parametrize("error, kept", [
    ("FileNotFoundError: [Errno 2] No such file or directory: 'out/part_{2}.csv'", "part_{2}.csv"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'out/part_{0}.csv'", "part_{0}.csv"),
    ("cat: data/{7}.txt: No such file or directory", "{7}.txt"), ("Unknown column '{3}.x' in 'field list'", "`{3}`"),
    ("Column '{4}' in order clause is ambiguous", "`{4}`"), ("name 'x' is not defined", "`x`"),
    ("SyntaxError: invalid syntax: {9}", "{9}")])
def test_braces_of_an_error_are_its_own(error, kept):
    assert kept in diagnose(error)


@pytest.mark.parametrize("error, wrong", [
    ("Table 'car_1.cars' doesn't exist", "cars"),
    ("no such table: cars", "cars"),
    ('relation "cars" does not exist', "cars"),
    ("Unknown database 'car_1'", "car_1"),
    ("Unknown column 's.maker' in 'field list'", "maker"),
    ("Unknown column 'maker' in 'field list'", "maker"),
    ("no such column: maker", "maker"),
    ('column "maker" does not exist', "maker"),
    ("Error: User mia_li not found", "mia_li"),
    ("Error: Payment method credit_card_78 not found", "credit_card_78")])
def test_a_name_that_does_not_exist_is_not_repeated(error, wrong):
    "A hint stands before the turn: a model copies the name that it is warned of (spike 010)."
    assert wrong not in diagnose(error) and " such " in diagnose(error)


CELL = "OperationalError                          Traceback (most recent call last)\nCell In[1], line 3\n----> 3 c.execute(q)\n\n"
SCRIPT = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    c.execute(q)\n'


@pytest.mark.parametrize("error, named", [
    (CELL + "OperationalError: no such column: maker", "maker"),
    (SCRIPT + "sqlite3.OperationalError: no such table: cars", "cars"),
    (SCRIPT + 'psycopg2.errors.UndefinedTable: relation "cars" does not exist', "cars")])
def test_of_a_program_with_several_queries_the_name_tells_which(error, named):
    assert named in diagnose(error) and " such " in diagnose(error)


@pytest.mark.parametrize("error, says, never", [  # judged by a fresh reader (spike 142, draw 5): false or of no help as they were
    ("Error: gift card balance is not enough", "say so and offer something cheaper", "with several"),
    ("Error: not enough balance in payment method credit_card_7", "say so and offer something cheaper", "with several"),
    ("Error: payment amount does not add up, total price is 305, but paid 255",
     "as asked for here that is 305: check", "which is 305"),
    ("Error: flight HAT271 not available on date 2024-05-10", "compare that day with today", "search the flights of that day"),
    ("AttributeError: 'NoneType' object has no attribute 'format'", "A value is None", "what its class defines"),
    ("curl: (7) Failed to connect to localhost port 8000: Connection refused", "if it was started, read what it printed", None),
])
def test_what_is_not_known_is_not_said(error, says, never):
    hint = diagnose(error)
    assert says in hint and (never is None or never not in hint)


@pytest.mark.parametrize("text, count", [
    ("The code, such as 'JFK' for John F. Kennedy, or a name. Give it.", 2),
    ("Ask J. R. R. Tolkien. He knows.", 2), ("Take plan b. Go on.", 2)])
def test_an_initial_ends_no_sentence(text, count):
    assert len(sentences(text)) == count


TRACEBACK = """Traceback (most recent call last):
  File "/tmp/t.py", line 4, in <module>
    lexer = Lexer(config=dialect)
  File "{file}", line 300, in __init__
    self.d = config.get("a")
AttributeError: 'Dialect' object has no attribute 'get'
"""


def test_an_attribute_that_a_library_misses_is_traced_to_the_line_of_the_script():
    assert "reached from `lexer = Lexer(config=dialect)`" in diagnose(TRACEBACK.format(file="/x/lexer.py"))
    assert "reached from" not in diagnose(TRACEBACK.format(file="/tmp/t.py"))
    assert "reached from" not in diagnose("AttributeError: 'Dialect' object has no attribute 'get'")


@pytest.mark.parametrize("name, attribute", [("scipy", "misc"), ("xml", "etree"), ("concurrent", "futures")])
def test_a_submodule_has_to_be_imported_itself(name, attribute):
    assert f"import `{name}.{attribute}` itself" in diagnose(f"AttributeError: module '{name}' has no attribute '{attribute}'")


def test_a_description_that_names_the_refused_value_is_no_advice():
    said = "Invalid value for parameter 'root': 'HKEY'. Expected one of ['WinReg.HKEY']. Case insensitive."
    schema = {"name": "read", "parameters": {"type": "object", "required": ["root"], "properties": {
        "root": {"type": "string", "description": "The root key, such as HKEY"}}}}
    hint = hint_type_error(HintContext(error_kind="type_error", error_message=said, tool_name="read", tool_schema=schema))
    assert "another form than `HKEY`" in hint and "WinReg" not in hint


def test_keys_of_a_map_are_no_matter_of_type():
    properties = {"params": {"type": "object"}}
    schema = {"name": "prepare", "parameters": {"type": "object", "properties": properties, "required": ["params"]}}
    messages = [f"['{said} dict key parameter: 'size'.']" for said in ("Missing", "Unexpected")]
    hints = [hint_type_error(HintContext(error_kind="type_error", error_message=message, tool_name="prepare", tool_schema=schema))
             for message in messages]
    assert ["lacks the key `size`" in hints[0], "takes no key `size`" in hints[1]] == [True, True]


@pytest.mark.parametrize("error", [
    "head: cannot open '/a/data.csv' for reading: No such file or directory\nawk: cannot open , (No such file or directory)",
    "tee: cannot create '/a/data.csv' for writing: No such file or directory",
    "awk: cannot open /a/data.csv (No such file or directory)",
    "cat: /a/data.csv: No such file or directory", "sh: 1: /a/data.csv: No such file or directory"])
def test_the_path_that_is_missing_is_named(error):
    assert "no `/a/data.csv`" in diagnose(error)
