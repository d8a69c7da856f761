"""Labels: what is written on jars and boxes."""
import re

NUMERALS = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
            (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def label(name, separator="-", longest=None):
    """A name in small letters and digits, its words joined by the separator.

    Everything else separates words. With `longest`, whole words are left out at the end until it fits; a first word
    that is too long is cut.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if longest is None:
        return separator.join(words)
    while len(words) > 1 and len(separator.join(words)) > longest:
        words.pop()
    return separator.join(words)[:longest]


def initials(name, dots=False):
    """The first letters of a name's words in capitals: "black cherry jam" is "BCJ", with dots "B.C.J."."""
    letters = [word[0].upper() for word in name.split()]
    return "".join(f"{letter}." for letter in letters) if dots else "".join(letters)


def roman(number):
    """A number from 1 to 3999 in Roman numerals. Raises ValueError for any other."""
    if not 1 <= number <= 3999:
        raise ValueError(f"no Roman numeral for {number}")
    parts = []
    for value, numeral in NUMERALS:
        count, number = divmod(number, value)
        parts.append(numeral * count)
    return "".join(parts)


def batch_code(name, number):
    """A batch's code: its initials, the number in five digits, and a check digit.

    The check digit is the sum of the digits, each times its place counted from 1 at the left, modulo 10.
    """
    digits = f"{number:05d}"
    check = sum(place * int(digit) for place, digit in enumerate(digits, start=1)) % 10
    return f"{initials(name)}{digits}{check}"
