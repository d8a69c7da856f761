# ruff: noqa: E501
"The gate: what it must refuse, and what it must let pass."

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.hints.echo import without_action
from composer_replication.hints.leak_check import MIN_CHARS, leaks, refusal, repeats, seen_before
from composer_replication.hints.text import call_text

PATCH = """diff --git a/shop/price.py b/shop/price.py
--- a/shop/price.py
+++ b/shop/price.py
@@ -10,6 +10,8 @@ def price(item, country):
     cost = item.cost
     if item.on_sale:
-        cost = cost * SALE
+        cost = cost * item.sale_factor
+    rate = tax_rates.lookup(country, default=STANDARD_RATE)
+    x = 1
     return cost
"""
ADDED = ["cost = cost * item.sale_factor", "rate = tax_rates.lookup(country, default=STANDARD_RATE)"]


@pytest.mark.parametrize("line", ADDED)
@pytest.mark.parametrize("shape", ["{}", "Write `{}` there.", "```python\n    {}\n```", "so   {}  is it"])
def test_added_lines_of_a_patch_are_refused_in_any_dress(line, shape):
    assert leaks(shape.format(line), PATCH)
    assert leaks(shape.format(line.replace(" ", "")), PATCH)
    assert leaks(shape.format(line.upper()), PATCH)


@pytest.mark.parametrize(
    "hint",
    [
        "Look at shop/price.py.",
        "The function `price` ignores `country`.",
        "cost = cost * SALE is wrong",
        "if item.on_sale: return cost",
        "Set x = 1 first.",
        "tax_rates may help",
        "cost = item.cost",
    ],
)
def test_context_removed_and_short_lines_and_names_are_no_leak(hint):
    assert not leaks(hint, PATCH)


def test_a_line_that_only_moved_is_no_secret():
    moved = "--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n-import collections.abc\n import os\n+import collections.abc\n"
    assert not leaks("The file needs import collections.abc.", moved)


def test_a_run_of_words_across_lines_is_a_leak():
    gold = "First cancel the old reservation, then book the direct flight on the ninth with the gift card."
    assert leaks("You should cancel the old reservation, then book the direct flight today.", gold)
    assert not leaks("You may have to cancel the old reservation and book another.", gold)


@pytest.mark.parametrize(
    "gold, hint, leak",
    [
        ("42", "The answer is 42.", True),
        ("42", "The answer is 420.", False),
        ('[{"find": {"city": ["Lafayette, LA"], "n": [400]}}]', "Expected one of ['Lafayette, LA'].", True),
        ('[{"find": {"city": ["Lafayette, LA"], "n": [400]}}]', "Expected one of [400].", True),
        ('[{"find": {"city": ["Lafayette, LA"], "n": [400]}}]', "Use `find` with a city.", False),
        ('[{"book": {"insurance": "no", "cabin": "economy"}}]', "There is no reservation of that name.", False),
        ('[{"book": {"insurance": "no", "cabin": "economy"}}]', "Choose economy.", True),
        ("no", "There is no such file.", False),
        (None, "anything", False),
        ("", "anything", False),
        ("  \n", "anything", False),
    ],
)
def test_plain_and_json_solutions(gold, hint, leak):
    assert leaks(hint, gold) is leak


def test_what_the_policy_has_seen_is_no_leak():
    book = Turn("assistant", tool_calls=(ToolCall("book", {"flight": "HAT999"}),))
    turns = (
        Turn("user", "I want the flight HAT085 on 2024-05-19."),
        book,
        Turn("tool", "Error", observation=True),
        Turn("user", "Flight HAT417 then."),
    )
    tools = ({"type": "function", "function": {"name": "search_direct_flight"}},)
    gold = (
        '[{"name": "search_direct_flight", "arguments": {"flight": "HAT085"}}, '
        '{"name": "pay", "arguments": {"flight": "HAT417"}}]'
    )
    trace = Trace("t", turns, tools, gold=gold)
    assert refusal("Only these tools exist here: `search_direct_flight`.", trace, 1) is None
    assert refusal("Search `HAT085` first.", trace, 1) is None
    assert refusal("Book `HAT417`.", trace, 1) == "leaks the reference solution"  # it is named only after the turn
    assert "HAT417" not in seen_before(trace, 1)


COMMAND = Turn("assistant", "I run it.", tool_calls=(ToolCall("bash", {"command": "cd /testbed && python -m pytest -xvs"}),))
SQL = Turn("assistant", "SELECT name FROM players WHERE age > 3")
FENCED = Turn("assistant", "Then:\n```sql\nSELECT name FROM players\n```")
ACTION = Turn("assistant", "execute[SELECT name FROM players]")
BROKEN = Turn("assistant", tool_calls=(ToolCall("bash", '{"command": "python -c \\"pri'),))


@pytest.mark.parametrize(
    "action, hint",
    [
        (COMMAND, "cd /testbed && python -m pytest -xvs"),
        (COMMAND, "Command 'cd /testbed  &&  python -m pytest -xvs' timed out"),
        (COMMAND, 'bash(command="cd /testbed && python -m pytest -xvs")'),
        (COMMAND, '{"command": "cd /testbed && python -m pytest -xvs"}'),
        (SQL, "select name from players where age > 3"),
        (SQL, "`SELECT name FROM players WHERE age > 3` fails."),
        (FENCED, "Try SELECT name FROM players again."),
        (ACTION, "Run `SELECT name FROM players`."),
        (BROKEN, '{"command": "python -c \\"pri'),
        (Turn("assistant", "ls"), " `ls`. "),
    ],
)
def test_the_failed_action_is_refused(action, hint):
    assert repeats(hint, action)


@pytest.mark.parametrize(
    "action, hint",
    [
        (COMMAND, "Run pytest on one file only."),
        (COMMAND, "cd /testbed && python -m pytest test_json.py"),
        (SQL, "SELECT name FROM player WHERE age > 3"),
        (SQL, "There is no table `players`."),
        (Turn("assistant", "ls"), "Use ls -la instead."),
        (
            Turn("assistant", tool_calls=(ToolCall("get_user", {"user_id": "mia_li_3668_smith"}),)),
            "There is no user `mia_li_3668_smith`.",
        ),
        (Turn("assistant", tool_calls=(ToolCall("list_all_airports", {}),)), "Only these tools exist here: `list_all_airports`."),
    ],
)
def test_what_only_resembles_the_failed_action_passes(action, hint):
    assert not repeats(hint, action)


name = st.text("abcdefgh_", min_size=1, max_size=12).filter(lambda s: s.strip("_"))
value = st.one_of(st.integers(), st.text(min_size=1, max_size=30), st.booleans(), st.lists(st.integers(), max_size=3))


@given(name, st.dictionaries(name, value, min_size=2, max_size=4), st.text(max_size=20), st.text(max_size=20))
@example("a", {"_a": "\x1f", "__a": ":{{"}, "", "0")  # hardly a word in it, but long enough with its signs
def test_a_rendered_call_is_always_recognised(tool, arguments, before, after):
    call = ToolCall(tool, arguments)
    action = Turn("assistant", tool_calls=(call,))
    text = call_text(call)
    assert repeats(text, action)
    if len("".join(text.split())) >= 2 * MIN_CHARS:
        assert repeats(f"{before} {text} {after}", action)


@given(st.text(max_size=200), st.text(max_size=200))
def test_the_gate_never_crashes(hint, gold):
    trace = Trace("t", (Turn("user", "x"), SQL), gold=gold)
    assert refusal(hint, trace, 1) in (None, "empty", "repeats the failed action", "leaks the reference solution")
    if (
        gold.strip()
        and len(hint.strip()) > 0
        and sum(c.isalnum() for c in gold) > 3
        and not gold.strip().startswith(("[", "{"))
        and "@@" not in gold
        and "--" not in gold
        and "++" not in gold
    ):
        assert leaks(f"so {gold} it is", gold)


ECHOES = [  # the command, what the terminal showed, what is left of it
    ("cat > a.py <<'EOF'\nimport os\nprint(os.nam)\nEOF\npython a.py", "> cat > a.py <<'EOF'\n> import os\n> print(os.nam)\n> EOF\n> python a.py\nOddError: no nam", "OddError: no nam"),
    ("make check install", "$ make check install\nthe store is locked", "the store is locked"),
    ("make check install", "root@box:/w# make check install\nthe store is locked\nroot@box:/w#", "the store is locked"),
    ("set -x; make check install", "+ make check install\nthe store is locked", "+ make check install\nthe store is locked"),
    ("make check install\nmake report all", "+ make check install\n+ make report all\nthe store is locked", "the store is locked"),
    ("python -c 'import shop; shop.open(1)'", ">>> python -c 'import shop; shop.open(1)'\nBadState: locked", "BadState: locked"),
    ("pip install numpy pandas", "error: \"pip install numpy pandas\" was killed", 'error: "…" was killed'),
    ("alpha beta gamma delta", "1 | alpha beta gamma delta\nthe parser stopped at beta", "1 | …\nthe parser stopped at beta"),
]  # fmt: skip


@pytest.mark.parametrize("command, shown, left", ECHOES)
def test_what_shows_the_action_again_is_cut_out(command, shown, left):
    action = Turn("assistant", tool_calls=(ToolCall("bash", {"command": command}),))
    kept = without_action(shown, action)
    assert kept.startswith(left) and not repeats(kept, action)


def test_code_in_a_traceback_stays():
    script = "import shop\n\ndef main():\n    shop.open(1)\n\nmain()\n"
    error = 'Traceback (most recent call last):\n  File "a.py", line 6, in <module>\n    main()\n  File "a.py", line 4, in main\n    shop.open(1)\nBadState: locked'
    action = Turn("assistant", tool_calls=(ToolCall("bash", {"command": f"cat > a.py <<'EOF'\n{script}EOF\npython a.py"}),))
    assert without_action(error, action) == error
    test = "def test_open():\n    shop = Shop()\n    assert shop.open(1) == 2\n"
    red = "    def test_open():\n        shop = Shop()\n>       assert shop.open(1) == 2\nE       assert 1 == 2\n\ntest_a.py:3: AssertionError"
    wrote = Turn("assistant", tool_calls=(ToolCall("bash", {"command": f"cat > test_a.py <<'EOF'\n{test}EOF\npytest"}),))
    assert ">       assert shop.open(1) == 2\nE       assert 1 == 2" in without_action(red, wrote)


def test_a_large_action_is_cut_out_quickly():
    from time import process_time

    body = "\n".join(f"value_{n} = {n} * 3" for n in range(20_000))
    action = Turn("assistant", tool_calls=(ToolCall("write", {"path": "a.py", "content": body}),))
    start = process_time()
    assert without_action(body + "\nthe disk is full", action) == "the disk is full"
    assert process_time() - start < 3
