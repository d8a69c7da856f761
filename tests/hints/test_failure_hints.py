# ruff: noqa: E501
"""Whole hints of the shared minimal cases, and of further members of their kinds."""

import json

import pytest

from composer_replication.hints.layers import RawErrorHintGenerator, default_composite
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.formats.base import read_record
from composer_replication.traces.read import read_traces

HEADER = "============================= test session starts ==============================\nplugins: " + ", ".join(f"plug{n}-1.{n}" for n in range(60))


@pytest.mark.data
@pytest.mark.parametrize(
    "name, says, silent",
    [
        ("hint-pytest-head.jsonl", ["assert 3 == 4", "test_a.py:9", "1 failed, 2 passed"], ["plug3"]),
        ("echoed-command-no-hint.jsonl", ["BadState: the store is locked by another process"], ["python /w/repo/check_everything.py\n"]),
        ("import-error-kind.jsonl", ["parse_jsonl_file"], ["JSON object"]),
    ],
)
def test_hints_of_the_shared_cases(shared_data, name, says, silent):
    path = shared_data.parent / "cases" / "traces" / name
    if not path.exists():
        pytest.skip("the shared cases are not beside the checkout")
    [trace] = read_traces(path, strict=True)
    [site] = find_error_sites(trace)
    hint = default_composite().hint(trace, site)
    assert len(hint.text) <= 500 and [s for s in says if s not in hint.text] == [] and not any(s in hint.text for s in silent), hint.text


@pytest.mark.data
def test_unlike_errors_are_not_said_to_be_the_same(shared_data):
    path = shared_data.parent / "cases" / "traces" / "repeated-unlike.jsonl"
    if not path.exists():
        pytest.skip("the shared cases are not beside the checkout")
    [trace] = read_traces(path, strict=True)
    hints = [default_composite().hint(trace, site) for site in find_error_sites(trace)]
    assert [h.layer for h in hints] == ["raw_error"] * 3 and not any("same way" in h.text for h in hints)


def hints(command, *answers):
    messages = [{"role": "user", "content": "Go."}]
    for n, answer in enumerate(answers):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": f"c{n}", "content": answer}]
    trace = read_record({"messages": messages})
    return [default_composite().hint(trace, site).text for site in find_error_sites(trace)]


@pytest.mark.parametrize(
    "command, answer, says",
    [
        ("pytest -q", HEADER + "\nE       AssertionError: assert 'a' == 'b'\n\ntest_a.py:9: AssertionError\n1 failed in 0.1s\nExit code: 1", "assert 'a' == 'b'"),
        ("pytest -q", HEADER + "\nE   ModuleNotFoundError: No module named 'shop'\nERROR test_a.py\n1 error in 0.1s\nExit code: 1", "`shop` is not installed"),
        ("npx jest totals", "$ npx jest totals\n" + "ok 1\n" * 200 + "  ● totals\n\n    Expected: 4\n    Received: 3\n\nTests:       1 failed\nExit code: 1", "Expected: 4\n    Received: 3"),
        ("make check install all", "make check install all\n" + "building\n" * 200 + "the store is locked\nmake: *** [check] Error 9\nExit code: 2", "the store is locked\nmake: *** [check] Error 9"),
        ("python a.py", 'Traceback (most recent call last):\n  File "/w/run.py", line 1, in <module>\n    import shop\n  File "/w/shop.py", line 7\n    x = (1\n        ^\nSyntaxError: \'(\' was never closed', "`/w/shop.py` does not parse ('(' was never closed): look at line 7"),
        ("apt-get install x", "Do you want to continue? [Y/n] Traceback (most recent call last):\n  File \"/usr/bin/x\", line 1, in f\n    open('/dev/tty')\nOSError: [Errno 6] No such device or address: '/dev/tty'", "--yes"),
    ],
)  # fmt: skip
def test_hints_show_the_failure(command, answer, says):
    [hint] = hints(command, answer)
    assert says in hint and "plug3" not in hint and not hint.count(command + "\n")


def test_a_repeated_failure_names_what_stayed_the_same():
    *_, last = hints("shopctl open", *(f"Error: the store {n} is locked by process {n}77 (0xff{n})" for n in range(3)))
    assert "failed in the same way (`Error: the store … is locked by process … (…)`)" in last
    *_, last = hints("python a.py", *(f'Traceback (most recent call last):\n  File "/w/a.py", line {n}, in f\n    f()\nBadState: store {n}' for n in range(4)))
    assert "(`BadState: store …`)" in last
    *_, last = hints("python a.py", *["Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    f()\nModuleNotFoundError: No module named 'x'"] * 3)
    assert last.startswith("The Python module `x` is not installed here") and "in the same way:" in last
    assert not any("same way" in h for h in hints("x", "Error: bad month", "Error: bad day", "Error: bad month", "Error: bad day"))


@pytest.mark.parametrize("max_chars", [60, 120, 500])
def test_the_published_call_stays(max_chars):
    error = "start " + "x" * 3000 + "\nOddError: locked"
    said = RawErrorHintGenerator(max_chars=max_chars).generate("runtime_error", {"error": error})
    assert len(said) <= max_chars and "OddError: locked"[: max_chars - 46] in said
    assert RawErrorHintGenerator().generate("runtime_error", {"error_message": "…"}) is None
