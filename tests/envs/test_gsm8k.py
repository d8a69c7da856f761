"""The verifier against all of GSM8K's own answers, against what models print, and against what would hang it."""
# ruff: noqa: E501
import gzip
import json
import random
import time
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

import pytest

from composer_replication.core.errors import InputProblem
from composer_replication.envs.gsm8k.env import INSTRUCTION, answer_text, gsm8k_reward, gsm8k_rows, number_of, number_reward


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


FRAMES = ["#### {}", "\\boxed{{}}", "so \\( \\boxed{{}} \\).", "<think>#### 7</think>\n#### {}", "#### 7, no:\n#### {}\n", "####{}", "\\boxed{7}\n#### {}",
          "#### 7\n\\boxed{{}}", "an open [THINK] \\boxed{3} [/THINK] #### {}", "thought so\n</think>\n\n#### {}", "#### {}\n\nDone."]
NUMBERS = {"1234": 1234, "1,234": 1234, "+1234": 1234, "-1,234": -1234, "−12": -12, "1234.0": 1234, "1,234.50": "1234.5", "$1,234": 1234, "\\$5": 5, "-$5": -5, "$-5": -5,
           "€5": 5, "18%": 18, "18 %": 18, "18\\%": 18, "0": 0, "-0": 0, "007": 7}
NONE = ["", "none", "18 eggs", "1,23", "12,34", "1,2341", "18 or 17", "9 * 2", "18 = 18", "eighteen", "1e3", "1/2", "½", "٣", "18.", ".5", "--5", "-$-5", "$$5", "$5%%", "x18",
        "18 19", "{18}", "\\text{18}", "**18**", "nan", "inf", "0x12", "1_000", "1 234", "~18", "18+", "5²", "\ud800", "1" * 50]


@pytest.mark.parametrize("frame", FRAMES)
def test_one_plain_number_behind_the_last_mark_is_the_answer(frame):
    for text, value in NUMBERS.items():
        assert number_of(answer_text(frame.replace("{}", text))) == Fraction(value), (frame, text)
    for text in NONE:
        assert number_of(answer_text(frame.replace("{}", text))) is None, (frame, text)


@pytest.mark.parametrize("text", ["18", "The answer is 18.", "<think>#### 18", "<think>\n#### 18\n</think>", "</think>#### 17<think>#### 18", "#### 18\n#### ",
                                  "#### 18\n\\boxed", "#### 18 #### 17", "<think>a</think> #### 18 <thinking> but", "[THINK]#### 18", "####\n18"])
def test_without_one_plain_number_outside_of_a_thought_there_is_no_reward(text):
    assert number_reward(text, "18") == 0.0


def test_the_prompt_says_the_form_and_shows_one_that_is_read():
    assert number_of(answer_text(INSTRUCTION)) == 42


@pytest.mark.parametrize("text", [None, [], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": []}]])
def test_a_completion_without_text_is_wrong(text):
    assert gsm8k_reward([text], ["18"]) == [0.0]


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


@pytest.mark.parametrize("more", [",000", "0", ",000,000"])
def test_a_number_of_any_length_is_judged(more):
    "A model that repeats itself writes thousands of digits; Python reads 4,300 of them."
    for times in (0, 12, 100, 5000):
        assert number_reward(f"#### 1{more * times}", "1") == float(times == 0)
        assert number_reward(f"#### 1.0{'0' * times}", "1") == float(times < 40)


def test_lines_end_where_json_lines_end(tmp_path):
    "These stand raw within JSON's strings."
    question = "a\u2028b\u2029c\u0085d"
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": question, "answer": "#### 3"}, ensure_ascii=False) + "\n", encoding="utf-8")
    row, = gsm8k_rows(tmp_path / "p.jsonl")
    assert question in row["prompt"][0]["content"]


def test_a_damaged_file_is_named(tmp_path):
    whole = gzip.compress(json.dumps({"question": "a" * 5000, "answer": "#### 3"}).encode() * 50, mtime=0)
    for at in range(0, len(whole), 7):
        (tmp_path / "p.jsonl.gz").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1:])
        with suppress(InputProblem):  # or nothing that matters was damaged
            gsm8k_rows(tmp_path / "p.jsonl.gz")
