"""The verifier against all of GSM8K's own answers, against what models print, and against what would hang it."""
import gzip
import json
import random
import threading
import time
from decimal import Decimal

import pytest

from composer_replication.envs.gsm8k import env
from composer_replication.envs.gsm8k.env import answer_text, gsm8k_reward, gsm8k_rows, number_reward


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


@pytest.mark.parametrize("frame", ["#### {}", "\\boxed{{{}}}", "so \\( \\boxed{{{}}} \\).", "$\\boxed{{{}}}$", "{}", "**{}**",
                                   "${}", "\\${}", "#### ${}", "#### {} dollars", "The answer is {} dollars.",
                                   "16 - 3 = 13, so {}",
                                   "**#### {}**", "<answer>{}</answer>", "#### {}\n\nQuestion: what is 17?", "##### {}%",
                                   "first #### 7, no: #### {}", "\\boxed{{{}\\text{{ dollars}}}}", "It is {}.", "={}"])
def test_every_way_of_printing_a_number(frame):
    for number in ("1234", "1,234", "1234.0", "1,234.00"):
        assert number_reward(frame.format(number), "1234") == 1.0, (frame, answer_text(frame.format(number)))
    for number in ("1233", "123", "12345", "1,2341", "-1234", "1234.5"):
        assert number_reward(frame.format(number), "1234") == 0.0, (frame, number)


@pytest.mark.parametrize("text", ["", "no number", "####", "#### none", "\\boxed{}", "\\boxed", "½", "٣",
                                  "#### 18 or 17", "#### 18, 17", "x18", "#### 18 19", "#### nan1", "\ud800"])
def test_what_holds_no_right_number_is_wrong_and_never_a_crash(text):
    assert number_reward(text, "18") == 0.0


@pytest.mark.parametrize("text", [None, [], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": []}]])
def test_a_completion_without_text_is_wrong(text):
    assert gsm8k_reward([text], ["18"]) == [0.0]


def test_what_cannot_be_computed_in_time_is_unscored_and_counted():
    told, started = {}, time.perf_counter()
    texts = [r"\boxed{9^{9^{9^9}}}", "#### 18"]
    assert gsm8k_reward(texts, ["18"] * 2, log_metric=told.__setitem__, task_id=[1, 2]) == [None, 1.0]
    assert told == {"gsm8k/unscored": 1 / 2} and time.perf_counter() - started < 80


@pytest.mark.parametrize("text", ["#### " + "9" * 100_000, "(" * 50_000 + "18", "\\boxed{" * 20_000, "1,234 " * 50_000 + "!",
                                  "-$ " * 50_000, "#### 1e999999999", "#### " + "{" * 300 + "1"])
def test_long_texts_are_read_in_bounded_time(text):
    started = time.perf_counter()
    assert number_reward(text, "17") in (0.0, None)
    assert time.perf_counter() - started < 50


def test_other_threads_score_as_the_main_one_does():
    found = []
    texts = ["#### 18", "It costs $18.00.", "#### 17", "none", r"\boxed{9 \cdot 2}",
             "#### Janet makes 18 dollars", "#### 18 (dollars)", "#### 9 * 2 = 17"]
    thread = threading.Thread(target=lambda: found.extend(number_reward(t, "18") for t in texts))
    thread.start()
    thread.join(90)
    assert found == [number_reward(t, "18") for t in texts] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_a_reader_that_died_is_replaced(monkeypatch):
    reader = env._Reader()
    written = answer_text(r"\boxed{9 \cdot 2}")
    assert reader.reward(written, "18") == 1.0
    reader._process.kill()
    reader._process.wait()
    assert reader.reward(written, "18") == 1.0
    monkeypatch.setattr(env, "START", -2 * env.SECONDS)  # killed at once: too late
    assert reader.reward("(" * 400 + "18", "18") in (None, 0.0)
    reader._stop() if reader._process else None


FRAMES = ["\\boxed{{{}}}",
          "so \\( \\boxed{{{}}} \\).", "$\\boxed{{{}}}$", "#### {} dollars", "#### \\({}\\)", "#### x = {}",
          "#### \\( x = {} \\)",
          "#### {} red apples", "\\boxed{{{}\\text{{ dollars}}}}", "={}", "\\boxed{{x = {}}}"]


@pytest.mark.parametrize("frame", FRAMES)
def test_a_number_in_its_frame_is_scored_in_every_thread_as_in_the_main_one(frame):
    texts, found = [frame.format(n) for n in ("18", "1,800", "18.0", "17", "-18", "18.5")], []
    thread = threading.Thread(target=lambda: found.extend(number_reward(t, "18") for t in texts))
    thread.start()
    thread.join(20)
    assert found == [number_reward(t, "18") for t in texts] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("text", ["\\boxed{2x}", "\\boxed{\\frac{36}{2}}", "\\boxed{9 \\cdot 2}", "\\boxed{1{8}}"])
def test_what_is_more_than_a_number_is_not_read_as_one(text):
    assert answer_text(text) == text


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
