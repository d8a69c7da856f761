"""What an error text says, in one sentence: texts that look like the sentences' own placeholders."""
import pytest

from composer_replication.hints.diagnose import diagnose


@pytest.mark.parametrize("error, kept", [
    ("FileNotFoundError: [Errno 2] No such file or directory: 'out/part_{2}.csv'", "part_{2}.csv"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'out/part_{0}.csv'", "part_{0}.csv"),
    ("cat: data/{7}.txt: No such file or directory", "{7}.txt"), ("Unknown column '{3}' in 'field list'", "`{3}`"),
    ("Error: user {4} not found", "{4}"), ("no such column: {5}", "`{5}`"), ("name 'x' is not defined", "`x`"),
    ("SyntaxError: invalid syntax: {9}", "{9}")])
def test_braces_of_an_error_are_its_own(error, kept):
    assert kept in diagnose(error)
