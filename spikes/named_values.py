"""What spikes 009 and 010 share: a hint without the wrong name that it warns of."""
import re


def without(hint: str, value: str) -> str:
    "The hint with `no table X` as `no such table` and `a column X` as `such a column`."
    quoted = re.escape(f"`{value}`")
    return re.sub(rf"\ba (\w+) {quoted}", r"such a \1", re.sub(rf"\bno (\w+) {quoted}", r"no such \1", hint))


def wrong_name(hint: str, failed: str) -> str | None:
    "The first value of the action that failed, by its text, which the hint names and can be without."
    values = re.findall(r"`([^`]+)`", hint)
    return next((value for value in values if value in failed and f"`{value}`" not in without(hint, value)), None)
