"""Amounts: a number and a unit, read from text and written back."""
import re

GRAMS = {"g": 1, "kg": 1000, "mg": 0.001, "oz": 28.35}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def parse_amount(text):
    """Read an amount such as "1.5 kg" as a number of grams.

    Spaces around and between the parts are ignored, and capitals are read as small letters.
    Raises ValueError where the text is no amount or the unit is unknown.
    """
    match = _AMOUNT.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"no amount: {text!r}")
    number, unit = match.groups()
    if unit not in GRAMS:
        raise ValueError(f"unknown unit: {unit!r}")
    return float(number) * GRAMS[unit]


def format_amount(grams):
    """Write a number of grams with the largest unit of kg, g, mg that leaves at least 1, without trailing zeros.

    Nothing at all is "0 g".
    """
    for unit in ("kg", "g", "mg"):
        if grams >= GRAMS[unit]:
            number = f"{grams / GRAMS[unit]:.3f}".rstrip("0").rstrip(".")
            return f"{number} {unit}"
    return "0 g"


def add_amounts(*texts):
    """The sum of several amounts, as text: add_amounts("500 g", "1 kg") is "1.5 kg"."""
    return format_amount(sum(parse_amount(text) for text in texts))


def scale_amount(text, servings, original=4):
    """An amount for another number of servings than the recipe's original one.

    Raises ValueError where either number is not above 0.
    """
    if servings <= 0 or original <= 0:
        raise ValueError("servings must be above 0")
    return format_amount(parse_amount(text) * servings / original)
