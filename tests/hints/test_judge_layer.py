"The judge's cache under concurrent processes, kills, broken files and a full disk; and what its prompt may hold."

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hinted import TURNS, meta

from composer_replication.core import files
from composer_replication.core.trace import HintContext
from composer_replication.hints import judge_layer as judge_module
from composer_replication.hints.judge_layer import AnswerCache, LLMJudgeHintGenerator, cache_key, judge_prompt
from composer_replication.hints.learned_layer import PART_CHARS, writer_prompt


def ask(layer, m=None):
    m = m or meta()
    return layer.generate(m.site.kind, m)


@pytest.mark.parametrize("prompt_of", [judge_prompt, writer_prompt])
def test_prompt_holds_neither_gold_nor_future_nor_thinking(prompt_of):
    prompt = prompt_of(meta())
    assert "User mia not found" in prompt and "Book a seat for Mia." in prompt and 'user_details(user_id="mia")' in prompt
    assert not [hidden for hidden in ("GOLDEN", "HAT417", "FUTURE", "SECRET", "call_17") if hidden in prompt]
    quoted = meta(gold='[{"book": {"city": ["Lafayette, LA"]}}]', error="Invalid value 'x'. Expected one of ['Lafayette, LA'].")
    assert "Lafayette" not in prompt_of(quoted) and "(withheld)" in prompt_of(quoted)


@pytest.mark.parametrize("prompt_of, most", [(judge_prompt, 20_000), (writer_prompt, 6 * (PART_CHARS + 50))])
def test_prompt_is_bounded_on_huge_turns(prompt_of, most):
    big = tuple(replace(t, content="word " * 200_000) for t in TURNS)
    assert len(prompt_of(meta(big, error="word " * 200_000))) < most


def test_same_site_same_answer_is_paid_for_once(tmp_path):
    asked = []
    layer = LLMJudgeHintGenerator(lambda p: asked.append(p) or "Ask for the id.", cache_dir=tmp_path)
    assert ask(layer) == ask(layer) == "Ask for the id."
    other = LLMJudgeHintGenerator(
        lambda p: asked.append(p) or "Never asked.", cache_dir=tmp_path
    )  # another object, another address
    assert ask(other) == "Ask for the id." and (other.calls, other.hits, len(asked)) == (0, 1, 1)
    assert ask(LLMJudgeHintGenerator(lambda p: "Another model.", cache_dir=tmp_path, model="other")) == "Another model."


def test_even_no_answer_is_kept(tmp_path):
    assert ask(LLMJudgeHintGenerator(lambda p: "NONE", cache_dir=tmp_path)) is None
    again = LLMJudgeHintGenerator(lambda p: 1 / 0, cache_dir=tmp_path)
    assert ask(again) is None and again.calls == 0


def test_a_judge_that_said_nothing_is_counted_and_asked_again(tmp_path):
    layer = LLMJudgeHintGenerator(lambda p: "<think>Only thoughts, and then no tokens left", cache_dir=tmp_path)
    assert ask(layer) is None and layer.failures == {"answered nothing": 1} and not list(tmp_path.rglob("*.json"))
    AnswerCache(tmp_path).put(cache_key(judge_prompt(replace(meta(), error_kind="runtime_error"))), "")
    assert ask(LLMJudgeHintGenerator(lambda p: "Use bar.", cache_dir=tmp_path)) == "Use bar."


def test_thoughts_are_no_hint():
    said = ask(LLMJudgeHintGenerator(lambda p: "<think>\nThe agent called foo.\n</think>\nUse bar instead."))
    assert said == "Use bar instead."


def test_a_changed_template_version_asks_anew(tmp_path, monkeypatch):
    ask(LLMJudgeHintGenerator(lambda p: "Old.", cache_dir=tmp_path))
    monkeypatch.setattr(judge_module, "TEMPLATE_VERSION", "judge/next")
    assert ask(LLMJudgeHintGenerator(lambda p: "New.", cache_dir=tmp_path)) == "New."


@pytest.mark.parametrize(
    "complete, name",
    [
        (lambda p: 1 / 0, "ZeroDivisionError"),
        (lambda p: None, "answered with NoneType"),
        (lambda p: b"bytes", "answered with bytes"),
    ],
)
def test_a_failing_judge_is_counted_and_no_crash(complete, name, tmp_path):
    layer = LLMJudgeHintGenerator(complete, cache_dir=tmp_path)
    assert ask(layer) is None and ask(layer) is None
    assert layer.failures == {name: 2}
    assert not list(tmp_path.rglob("*.json"))  # a failure is never kept as an answer


def test_an_interrupt_is_not_swallowed():
    def stop(prompt):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(LLMJudgeHintGenerator(stop))


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'"text"',
        b'{"answer": 3}',
        b'{"key": "other", "answer": "Wrong key."}',
        b"[" * 100_000,
        b"0" * 10_000,
    ],
)
def test_an_unreadable_file_is_a_miss_and_is_mended(rubbish, tmp_path):
    path = AnswerCache(tmp_path).path(cache_key(judge_prompt(meta())))
    path.parent.mkdir()
    path.write_bytes(rubbish)
    layer = LLMJudgeHintGenerator(lambda p: "Fresh.", cache_dir=tmp_path)
    assert ask(layer) == ask(layer) == "Fresh."
    assert (layer.calls, layer.hits) == (1, 1)


def test_a_full_disk_costs_the_cache_and_not_the_answer(tmp_path, monkeypatch):
    AnswerCache(tmp_path).put("ab" * 32, "kept")

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    layer = LLMJudgeHintGenerator(lambda p: "Ask first.", cache_dir=tmp_path)
    assert ask(layer) == "Ask first." and layer.failures == {"cache: OSError": 1}
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["ab" * 32 + ".json"]  # no left-over, nothing lost


def test_a_lone_surrogate_in_a_trace_is_no_crash(tmp_path):
    layer = LLMJudgeHintGenerator(lambda p: "Ask \ud800 first.", cache_dir=tmp_path)
    m = meta(error="broken \ud83d text")
    assert ask(layer, m) == ask(layer, m) == "Ask \ud800 first." and layer.hits == 1


def test_the_key_is_the_same_in_every_process():
    code = (
        "from composer_replication.hints.judge_layer import cache_key\n"
        "import sys; sys.path.insert(0, 'tests')\n"
        "from hinted import meta\n"
        "from composer_replication.hints.judge_layer import judge_prompt\n"
        "print(cache_key(judge_prompt(meta(tools=({'type': 'function', 'function': {'name': 'b'}},))), 'm'))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert other.stdout == cache_key(judge_prompt(meta(tools=({"type": "function", "function": {"name": "b"}},))), "m") + "\n"


def _worker(folder, number, barrier, results):
    layer = LLMJudgeHintGenerator(lambda p: "Ask first. " + "padding " * 20_000 + str(number), cache_dir=folder)
    barrier.wait()
    texts = []
    for i in range(40):  # everybody writes and reads the same ten keys
        m = meta(error=f"Error: number {i % 10}")
        texts.append(ask(layer, m))
    results.put((texts, layer.calls, layer.hits, dict(layer.failures)))


def test_concurrent_processes_share_one_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_worker, args=(tmp_path, n, barrier, results)) for n in range(4)]
    for w in workers:
        w.start()
    answers = [results.get(timeout=600) for _ in workers]
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    assert all(t == "Ask first." for texts, *_ in answers for t in texts)
    assert all(calls + hits == 40 and calls <= 10 and not failures for _, calls, hits, failures in answers)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 10 and all(p.suffix == ".json" for p in files)
    assert all(json.loads(p.read_bytes())["answer"].startswith("Ask first.") for p in files)


def _write_for_ever(folder, started):
    cache = AnswerCache(folder)
    for i in range(10**9):
        cache.put(cache_key(f"prompt {i % 20}"), f"{i} " + "answer " * 50_000)
        if i == 3:
            started.set()


def test_a_kill_at_any_moment_leaves_whole_answers(tmp_path):
    context = multiprocessing.get_context("fork")
    for delay in (0.0, 0.004, 0.011, 0.023):
        started = context.Event()
        writer = context.Process(target=_write_for_ever, args=(tmp_path, started))
        writer.start()
        assert started.wait(300)
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(300)
        entries = [json.loads(p.read_bytes()) for p in tmp_path.rglob("*.json")]
        assert entries and all(len(e["answer"].split()) == 50_001 for e in entries)


def _die_before_rename(folder):
    files.os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)
    AnswerCache(folder).put("cd" * 32, "new")


def test_a_kill_just_before_the_rename_keeps_the_old_answer(tmp_path):
    cache = AnswerCache(tmp_path)
    cache.put("cd" * 32, "old")
    writer = multiprocessing.get_context("fork").Process(target=_die_before_rename, args=(tmp_path,))
    writer.start()
    writer.join(300)
    assert writer.exitcode == -signal.SIGKILL
    assert cache.get("cd" * 32) == "old"


def test_each_pattern_has_its_prompt_and_errors_have_theirs():
    from composer_replication.hints.judge_layer import PATTERNS, judge_prompt, pattern_of
    from composer_replication.traces.habits import HABITS

    assert all(pattern_of(name) in PATTERNS for name in HABITS if HABITS[name].__module__ == "composer_replication.traces.habits")
    assert {pattern_of(name) for name in HABITS} - {None} == set(PATTERNS)
    prompts = {kind: judge_prompt(HintContext(kind, "noticed so")) for kind in (*PATTERNS, "runtime_error")}
    assert len(set(prompts.values())) == 5
    assert all(
        ("What was noticed:" in p) == (kind in PATTERNS) and ("that failed" in p) == (kind not in PATTERNS)
        for kind, p in prompts.items()
    )
    assert all("answer NONE" in p and "Do not repeat the failed action" in p for p in prompts.values())
