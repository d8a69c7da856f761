"""What an error text says, in one sentence: texts that look like the sentences' own placeholders."""
import pytest

from composer_replication.hints.diagnose import diagnose


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
