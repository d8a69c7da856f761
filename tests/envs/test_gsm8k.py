"""The verifier against all of GSM8K's own answers, against what models print, and against what would hang it."""
# ruff: noqa: E501
import gzip
import json
import random
import re
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from gsm8k_answers import ANSWERS

from composer_replication.envs.gsm8k.env import answer_text, gsm8k_reward, gsm8k_rows, number_of, number_reward


@pytest.fixture(scope="module")
def problems(shared_data):
    with gzip.open(shared_data / "tasks" / "gsm8k_test.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.data
def test_the_gold_solution_of_every_test_problem_verifies_and_a_changed_number_does_not(problems, shared_data):
    rows = gsm8k_rows(shared_data / "tasks" / "gsm8k_test.jsonl.gz")
    assert len(rows) == len(problems) == 1319 and len({r["task_id"] for r in rows}) == 1319
    gold = [r["answer"] for r in rows]
    assert gold == [str(int(Decimal(p["answer"].split("####")[-1].strip().replace(",", "")))) for p in problems]
    solutions = [[{"role": "assistant", "content": p["answer"]}] for p in problems]
    assert gsm8k_reward(solutions, gold) == [1.0] * 1319
    rng = random.Random("changed")
    change = [lambda g: f"{g}1", lambda g: str(-int(g) or 1), lambda g: str(int(g) + rng.choice([-1, 1])), lambda g: f"{g}.5"]
    changed = [p["answer"].rpartition("#### ")[0] + "#### " + rng.choice(change)(g) for p, g in zip(problems, gold)]
    assert gsm8k_reward(changed, gold) == [0.0] * 1319
    appended = [p["answer"] + "1" for p in problems]  # also behind a thousands separator: 2,125 -> 2,1251
    assert gsm8k_reward(appended, gold) == [0.0] * 1319


FRAMES = ["#### {}", "\\boxed{{{}}}", "so \\( \\boxed{{{}}} \\).", "$\\boxed{{{}}}$", "{}", "**{}**", "${}", "\\${}", "#### ${}", "#### {} dollars",
          "The answer is {} dollars.", "16 - 3 = 13, so {}", "**#### {}**", "<answer>{}</answer>", "#### {}\n\nQuestion: what is 17?",
          "##### {}%", "first #### 7, no: #### {}", "\\boxed{{{}\\text{{ dollars}}}}", "It is {}.", "={}", "#### {} apples.", "$\\boxed{{\\${}}}$",
          "\\boxed{{\\text{{{} apples}}}}", "The answer is {}.", "The answer is: {}", "**Answer: {}**", "So she has {} left.", "Total = {}",
          "#### x = {}", "#### The total is {} pounds", "#### {}%", "#### ({})", "It costs {} dollars", "#### {} * 1 = {}", "#### {}/1",
          "The final answer is **{}**", "#### {} km"]


@pytest.mark.parametrize("frame", FRAMES)
def test_every_way_of_printing_a_number(frame):
    for number in ("1234", "1,234", "1234.0", "1,234.00"):
        text = frame.replace("{}", number).replace("{{", "{").replace("}}", "}")
        assert number_reward(text, "1234") == 1.0, (text, answer_text(text))
    for number in ("1233", "123", "12345", "1,2341", "-1234", "1234.5"):
        text = frame.replace("{}", number).replace("{{", "{").replace("}}", "}")
        assert number_reward(text, "1234") == 0.0, text


@pytest.mark.parametrize("text", ["", "no number", "####", "#### none", "\\boxed{}", "\\boxed", "½", "٣",
                                  "#### 18 or 17", "#### 18, 17", "x18", "#### 18 19", "#### nan1", "\ud800"])
def test_what_holds_no_right_number_is_wrong_and_never_a_crash(text):
    assert number_reward(text, "18") == 0.0


@pytest.mark.parametrize("text", [None, [], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": []}]])
def test_a_completion_without_text_is_wrong(text):
    assert gsm8k_reward([text], ["18"]) == [0.0]


MARKS = ["#### {}", "#### {}\n\nQuestion: what is 17?", "so \\( \\boxed{{{}}} \\).", "First 7.\nThe answer is {}"]


@pytest.mark.parametrize("text, value", ANSWERS)
def test_an_answer_is_the_number_that_a_person_reads(text, value):
    want = None if value is None else Fraction(value)
    for completion in (mark.format(text) for mark in MARKS):
        assert number_of(*answer_text(completion)) == want, completion
        for other in {18, 17, 5, 2, 1, 19} - {want}:
            assert number_reward(completion, str(other)) == 0.0, completion
        if want is not None and want.denominator == 1:
            assert number_reward(completion, str(want)) == 1.0, completion


def in_words(n):
    "A number from 0 to 999,999 in English, written apart from the reader."
    small = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
             "nineteen").split()
    if n < 20:
        return small[n]
    if n < 100:
        return "twenty thirty forty fifty sixty seventy eighty ninety".split()[n // 10 - 2] + (f"-{small[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{small[n // 100]} hundred" + (f" and {in_words(n % 100)}" if n % 100 else "")
    return f"{in_words(n // 1000)} thousand" + (f" {'and ' * (n % 1000 < 100)}{in_words(n % 1000)}" if n % 1000 else "")


def test_numbers_in_words():
    rng = random.Random("words")
    for n in [*range(1001), *(rng.randrange(10**6) for _ in range(500))]:
        assert number_of(in_words(n)) == n and number_of(f"negative {in_words(n).replace('-', ' ').replace(' and', '')} eggs") == -n, in_words(n)


def test_calculations_are_worked_out_as_python_does():
    rng = random.Random("calculations")
    for _ in range(500):
        text = str(rng.randint(1, 30))
        for _ in range(rng.randint(1, 4)):
            text = f"({text})" if rng.random() < 0.3 else text
            text += f" {rng.choice('+-*/')} {rng.randint(1, 30)}"
        want = Fraction(eval(re.sub(r"\d+", lambda m: f"Fraction({m[0]})", text)))  # of digits and operators made here
        assert number_of(text) == want and number_of(f"{text} = {want}") == want and number_of(f"{text} = {want + 1}") is None, text


@pytest.mark.parametrize("text, value", [
    ("She has 3 pears and 5 plums, so 8 fruits.", 8), ("16 - 3 = 13, so 18", 18), ("It is 17, not 18", 17), ("It is 18, not 17.", 18),
    ("She earns 2 million", 2_000_000), ("It is 5 squared", 25), ("It is 17 or 18.", None), ("He has 17 pears and 18 plums", None),
    ("I do not know which one", None), ("One moment please", None), ("eighteen", 18), ("Step 1. It is 7. Step 2. She has 18 eggs. That is all.", 18),
    ("The answer is 7. No: the answer is 18. It took 3 steps.", 18), ("The answer is 18 because 9 * 2 = 18", 18), ("7\n18", 18),
    ("It is 18:00", None), ("Over two years he pays $8 + $10 = $18.", 18), ("As 7 > 5, she has 18 eggs", 18), ("She pays 18 to the man", 18), ("At least 18", None), ("Answer: 18 or 17", None), ("\\boxed{7} so \\boxed{18} of 20", 18), ("#### \\boxed{18}", 18), ("#### 7\n#### 18\n", 18),
    ("\\boxed{\\text{x} = \\frac{36}{2}}", 18), ("\\boxed{18", 18), ("\\boxed 18", 18), ("\\boxed{}", None), ("between 17 and 18", None)])
def test_completions_without_a_line_of_their_own(text, value):
    assert number_of(*answer_text(text)) == value


@pytest.mark.parametrize("text", ["#### " + "9" * 100_000, "(" * 50_000 + "18", "\\boxed{" * 20_000, "1,234 " * 50_000 + "!",
                                  "-$ " * 50_000, "#### 1e999999999", "#### " + "{" * 300 + "1", "-" * 10**5 + "1", "#### " + "1 " * 10**5,
                                  "\\frac" * 20_000 + "1", "#### " + "9^" * 99 + "9", "answer is " * 20_000 + "1", "x * " * 10**5 + "1", "_" * 10**6 + "1",
                                  "#### " + "(-" * 99 + "1", "one hundred " * 10**4, " " * 10**6 + "1", "<a" * 10**5 + "1", "1," * 10**6])
def test_long_texts_are_read_in_bounded_time(text):
    started = time.perf_counter()
    assert number_reward(text, "17") == 0.0
    assert time.perf_counter() - started < 50


def test_broken_files_are_told_in_a_sentence(tmp_path):
    for name, content, what in [("a.jsonl", b'{"question": "q"}\n', "a-0 is no problem"), ("b.jsonl", b"[1]\n", "b-0 is no"),
                                ("c.jsonl.gz", b"no gzip", "cannot be read"), ("d.jsonl", b"\xff\n", "cannot be read"),
                                ("e.jsonl", b'{"question": "q", "answer": "no mark"}\n', "e-0 is no problem"),
                                ("f.jsonl.gz", gzip.compress(b'{"question"' * 99)[:-9], "cannot be read")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=what):
            gsm8k_rows(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read"):
        gsm8k_rows(tmp_path / "absent.jsonl")
    (tmp_path / "g.jsonl").write_text('{"question": "q", "answer": "#### 1,000"}\n')
    assert gsm8k_rows(tmp_path / "g.jsonl")[0]["answer"] == "1000"
    with pytest.raises(ValueError, match="2 rows of .* it has 1"):
        gsm8k_rows(tmp_path / "g.jsonl", n=2)


@pytest.mark.data
def test_draws_are_named_by_their_seed(shared_data):
    path = shared_data / "tasks" / "gsm8k_train.jsonl.gz"
    first, again, other = (gsm8k_rows(path, 50, seed) for seed in (0, 0, 1))
    assert first == again != other and len({r["task_id"] for r in first}) == 50
