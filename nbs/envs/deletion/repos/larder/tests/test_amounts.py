import pytest

from larder import add_amounts, format_amount, parse_amount, scale_amount


@pytest.mark.parametrize("text, grams", [("1 g", 1), ("1.5 kg", 1500), (" 20G ", 20), ("2 oz", 56.7), ("500mg", 0.5)])
def test_parse_amount(text, grams):
    assert parse_amount(text) == pytest.approx(grams)


@pytest.mark.parametrize("text", ["", "kg", "1", "one kg", "1 kg 2", "-1 g"])
def test_parse_amount_refuses(text):
    with pytest.raises(ValueError, match="no amount"):
        parse_amount(text)


def test_parse_amount_unknown_unit():
    with pytest.raises(ValueError, match="unknown unit: 'cups'"):
        parse_amount("2 cups")


def test_format_amount():
    assert format_amount(1500) == "1.5 kg"
    assert format_amount(999) == "999 g"
    assert format_amount(0.25) == "250 mg"
    assert format_amount(1000) == "1 kg"
    assert format_amount(12.34) == "12.34 g"


def test_format_amount_nothing():
    assert format_amount(0) == "0 g"


def test_add_amounts():
    assert add_amounts("500 g", "1 kg") == "1.5 kg"
    assert add_amounts("250 mg", "750 mg") == "1 g"
    assert add_amounts() == "0 g"


def test_scale_amount():
    assert scale_amount("200 g", 2) == "100 g"
    assert scale_amount("300 g", 6, original=2) == "900 g"
    assert scale_amount("800 g", 5) == "1 kg"


@pytest.mark.parametrize("servings, original", [(0, 4), (2, 0), (-1, 4)])
def test_scale_amount_refuses(servings, original):
    with pytest.raises(ValueError, match="above 0"):
        scale_amount("1 g", servings, original)
