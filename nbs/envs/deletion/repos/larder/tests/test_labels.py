import pytest

from larder import batch_code, initials, label, roman


@pytest.mark.parametrize("name, expected", [
    ("Black Cherry Jam", "black-cherry-jam"), ("  No. 7  (hot!) ", "no-7-hot"), ("", ""), ("A_B", "a-b"),
])
def test_label(name, expected):
    assert label(name) == expected


def test_label_separator():
    assert label("Black Cherry", separator="_") == "black_cherry"
    assert label("Black Cherry", separator="") == "blackcherry"


def test_label_longest():
    assert label("black cherry jam", longest=12) == "black-cherry"
    assert label("black cherry jam", longest=11) == "black"
    assert label("blackberries", longest=5) == "black"
    assert label("jam", longest=10) == "jam"


def test_initials():
    assert initials("black cherry jam") == "BCJ"
    assert initials("jam", dots=True) == "J."
    assert initials("plum  jam", dots=True) == "P.J."
    assert initials("") == ""


@pytest.mark.parametrize("number, expected", [(1, "I"), (4, "IV"), (9, "IX"), (14, "XIV"), (1994, "MCMXCIV"), (3999, "MMMCMXCIX")])
def test_roman(number, expected):
    assert roman(number) == expected


@pytest.mark.parametrize("number", [0, -1, 4000])
def test_roman_refuses(number):
    with pytest.raises(ValueError, match="no Roman numeral"):
        roman(number)


def test_batch_code():
    assert batch_code("plum jam", 12) == "PJ000124"
    assert batch_code("apple", 99999) == "A999995"
    assert batch_code("quince", 0) == "Q000000"
