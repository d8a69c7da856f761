"""Whatever a tested process writes: it is read within bounds, nothing raises but `Forgery`, and it earns 0 with the reason."""
import json
import os
import random
import resource
import time
from dataclasses import replace

import envs_tasks
import pytest
from envs_tasks import needs_sandbox

from composer_replication.envs.deletion.judge import grading, messages, phases, runner
from composer_replication.envs.deletion.judge.grading import grade, judge_counts
from composer_replication.envs.deletion.judge.messages import Forgery, Phase, read_message, read_messages, read_result
from composer_replication.envs.deletion.judge.observe import canonical
from composer_replication.envs.deletion.judge.phases import LONGEST_RESULT
from composer_replication.envs.deletion.judge.runner import RunnerProblem, run_phases
from composer_replication.envs.deletion.judge.trees import OverlayProblem

NODES = ("t.py::a", "t.py::b")
GOOD = [{"start": "t.py::a"}, {"node": "t.py::a", "outcome": "passed", "seconds": 0.1}, {"uncollected": "t.py", "why": "x"},
        {"call": 0, "came": {"value": ["list", [["int", "0x1"], ["bool", True]]], "after": [["none"]]}},
        {"call": 1, "came": {"raised": "E"}},
        {"probe": "t.py::a", "seen": [["str", "x"]], "raised": None}, {"end": True}, {"broke": "E: x"},
        {"captured": {"target": "m:f", "args": [{"literal": "1"}], "kwargs": {"n": {"range": [0, 3, 1]}}}}]
ODD = [None, True, 0, -1, 1.0, "1", 1 << 63, 10**400, 0.5, float("nan"), float("inf"), "",
       "x" * 5000, "\ud800", "\0", [], [[]], {}, {"a": 1}, ["list"], [None],
       json.loads("[" * 150 + "]" * 150)]


def test_every_message_of_the_judge_is_read():
    for message in GOOD:
        assert read_message(json.dumps(message).encode())[1] == message


def places(value, path=()):
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def test_another_type_in_any_place_is_refused_or_is_a_message():
    "Each part of each message replaced by each odd value; what is taken is taken as it stands."
    taken = 0
    for message in GOOD:
        for path in places(message):
            for odd in ODD:
                other = changed(message, path, odd)
                try:
                    taken_as = read_message(json.dumps(other).encode())[1]
                    if path == ("seconds",):  # a whole number is a number of seconds
                        other = changed(message, path, float(odd))
                    assert json.dumps(taken_as, sort_keys=True) == json.dumps(other, sort_keys=True)
                    taken += 1
                except Forgery as problem:
                    assert len(str(problem)) < 400 and "\n" not in str(problem)
    assert 50 < taken < 400  # texts and whole numbers of other values are still messages


def mutated(chance, data):
    "One of many ways to spoil a few lines."
    data, place = bytearray(data or b"\n"), chance.randrange(len(data) or 1)
    way = chance.randrange(8)
    if way == 0:
        data[place] = chance.randrange(256)
    elif way == 1:
        del data[place:place + chance.randrange(1, 30)]
    elif way == 2:
        data[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 30)))
    elif way == 3:
        data[place:place] = chance.choice((b"[", b'{"a":')) * chance.choice((10, 300, 200_000))
    elif way == 4:
        data[place:place] = chance.choice((b"NaN", b"1e999", b"-" + b"9" * 5000, b"\\ud800", b"\xff\xfe", b"\n", b"\0", b"\r\n"))
    elif way == 5:
        data += data[chance.randrange(len(data)):]
    elif way == 6:
        lines = bytes(data).split(b"\n")
        chance.shuffle(lines)
        data = bytearray(b"\n".join(lines))
    else:
        message = chance.choice(GOOD)
        path = chance.choice(list(places(message)))
        data[place:place] = b"\n" + json.dumps(changed(message, path, chance.choice(ODD))).encode() + b"\n"
    return bytes(data)


def test_10_000_fuzzed_results_neither_raise_nor_hang_nor_grow():
    """Through the reader of the pipe and the reader of the messages. The script between them reads nothing of it.

    At most the unspoilt messages count as passed: no mutation gives a test that nobody asked for."""
    chance, (reader, writer) = random.Random("fuzzed messages"), os.pipe()
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        kind = chance.choice(("tests", "probe", "capture"))
        data = b"".join(json.dumps(chance.choice(GOOD)).encode() + b"\n" for _ in range(chance.randrange(1, 6)))
        for _ in range(chance.randrange(1, 4)):
            data = mutated(chance, data)
        if len(data) < 60_000:  # what a pipe holds without a second process
            os.write(writer, data)
            got, cut = phases.gather(reader, time.monotonic(), reader)
            assert got == data
        phase = Phase("x", {}, NODES if kind != "probe" else ("t.py",), kind=kind, data={"calls": [1, 2]})
        result = read_result(phase, data, None, 0.0)
        assert set(result.outcomes) <= {*NODES, "t.py"} or not result.forged
        if result.forged:
            assert result.outcomes == {} == result.seconds and result.messages == ()
            assert result.problem.startswith("forged results: ")
    os.close(reader), os.close(writer)
    assert time.process_time() - begun < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


@pytest.mark.parametrize("data", [b"[" * LONGEST_RESULT, b"\n" * LONGEST_RESULT, b"[]\n" * (LONGEST_RESULT // 3),
                                  b"[]," * (LONGEST_RESULT // 3),
                                  b'{"end":[' + b"[]," * (LONGEST_RESULT // 4) + b"[]]}\n", b'"' + b"x" * LONGEST_RESULT + b'"\n',
                                  (b'{"start":"' + b"x" * 3000 + b'"}\n') * (LONGEST_RESULT // 3020)],
                         ids=["brackets", "ends", "lists", "no end", "one wide message", "one text", "many messages"])
def test_the_longest_result_is_read_in_bounded_time_and_memory(data):
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_result(Phase("x", {}), data, None, 0.0)
    assert time.process_time() - begun < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_pipe_that_is_never_closed_and_never_silent_is_left():
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        while True:
            try:
                os.write(writer, b"x" * 65536)
            except OSError:
                os._exit(0)
    try:
        got, cut = phases.gather(reader, time.monotonic() + 60)
        assert cut == "output" and len(got) <= LONGEST_RESULT + 65536
        assert phases.gather(reader, time.monotonic() - 1)[1] in ("wall", "output")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader), os.close(writer)


HONEST = [[["x" * 30_000] * 30, {i: "é" * 5000 for i in range(300)}], ["\ud800" * 10, {"\udcff": 1}], list(range(10**5)),
          10**5000, [1 << 70, float("nan"), float("inf"), -0.0, None, ..., 1j], b"\xff" * 10**6]


@pytest.mark.parametrize("value", HONEST, ids=range(6))
def test_what_the_judge_itself_sends_of_honest_values_is_no_forgery(value):
    got, (reader, writer) = bytearray(), os.pipe()
    os.set_blocking(reader, False)
    real, phases.os.write = os.write, lambda fd, data: got.extend(data) or len(data)
    try:
        send = phases._sender(writer)
    finally:
        phases.os.write = real
    send(call=0, came={"value": canonical(value), "after": []})
    send(probe="t.py::a", seen=[canonical(value)], raised=None)
    send(end=True)
    os.close(reader), os.close(writer)
    assert len(read_messages(bytes(got), "probe", ("t.py",), 1)) == 3


PASSED, END = b'{"node": "t.py::a", "outcome": "passed", "seconds": 0.25}', b'{"end": true}'
CALL = b'{"call": %d, "came": {"raised": "E"}}'


@pytest.mark.parametrize("lines, kind, problem", [
    ([PASSED, PASSED], "tests", "two results"), ([PASSED.replace(b"::a", b"::c")], "tests", "not asked for"),
    ([CALL % 1, CALL % 0], "probe", "not asked for then"), ([CALL % 0, CALL % 0], "probe", "not asked for then"),
    ([CALL % 2], "probe", "not asked for then"), ([CALL % 0], "tests", "sends none"), ([END, PASSED], "tests", "behind the end"),
    ([PASSED, CALL % 0], "capture", "sends none"), ([PASSED, END], "tests", None), ([CALL % 0, CALL % 1, END], "probe", None)])
def test_a_phase_sends_what_was_asked_for_once_and_in_order(lines, kind, problem):
    data = b"\n".join(lines) + b"\n"
    if problem is None:
        assert len(read_messages(data, kind, NODES, 2)) == len(lines)
    else:
        with pytest.raises(Forgery, match=problem):
            read_messages(data, kind, NODES, 2)


# through the judge

WRITE = """

def _write():
    import json, os, sys
    frame = sys._getframe()
    while "plan" not in frame.f_locals:
        frame = frame.f_back
    plan = frame.f_locals["plan"]
    for node in plan["nodes"]:
        if plan["kind"] == "tests":
            os.write(3, (json.dumps({"node": node, "outcome": "passed", "seconds": 0.1}) + "\\n").encode())
    line = LINE
    while line:
        line = line[os.write(3, line):]
    END


_write()
"""


@pytest.fixture
def judged(larder, initials):
    "Grades the original with code behind it."
    path, text = envs_tasks.solution(larder, initials)
    return lambda behind="": grade(initials, larder, {path: (text + behind).encode()})


@needs_sandbox
def test_one_line_that_is_not_the_judges_earns_nothing_and_keeps_the_reason(judged):
    "On the right solution, behind forged passes of all that was asked for."
    found = judged(WRITE.replace("LINE", repr(b"[" * 200_000 + b"\n")).replace("END", "os._exit(0)"))
    assert (found.reward, found.hacked) == (0.0, True) and found.findings[0].what.startswith("forged results: "), found


@needs_sandbox
@pytest.mark.parametrize("end", ["os.close(3)", "os.closerange(0, 100)", "os.write(3, b'{\"node\": ')\n    os._exit(0)",
                                 "os.kill(os.getppid(), 9)\n    os._exit(0)", "os.kill(0, 9)",
                                 "import time\n    os.close(3)\n    time.sleep(100)"])
def test_a_process_that_says_no_more_earns_nothing(end, judged, monkeypatch):
    monkeypatch.setattr(grading, "JUDGE_LIMITS", runner.Limits(wall_s=1.5, memory_mb=2048))
    before = judge_counts()
    found = judged(WRITE.replace("LINE", "b''").replace("END", end))
    assert found.reward == 0.0 and found.findings, found
    assert judge_counts() == before | {"graded": before["graded"] + 1}


SECRETS = """

def _look():
    import gc, os, sys
    seen, frame = [], sys._getframe()
    while frame:
        seen += [repr(value) for value in frame.f_locals.values()]
        frame = frame.f_back
    seen += [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple, set)] + [repr(os.environ), repr(sys.argv)]
    text = "".join(seen).encode("utf-8", "replace")
    os.write(3, b'{"broke": "' + b" ".join(word for word in WORDS if word[::-1] in text) + b'"}\\n')
    os._exit(0)


_look()
"""


@needs_sandbox
def test_nothing_that_must_stay_secret_is_in_the_process(initials, larder):
    "Outcomes of held-out records, names of other trees, the folder on the host: in no frame, no container, no environment."
    path, text = envs_tasks.solution(larder, initials)
    phase, _ = grading.records_phase(initials, larder, {})
    assert len(initials.heldout_records) > 4
    outcomes = {json.dumps(r["came"].get("value", [""])[-1]) for r in initials.heldout_records if r["kind"] == "call"}
    # some outcomes equal what tests or the docstring show
    visible = "".join(file.read_text() for file in (larder.tree / "tests").glob("*.py"))
    words = {value for value in outcomes if len(value) > 6 and value not in json.dumps(phase.data) + visible + text}
    words |= {"PYTHONPATH", "golden_diff", "heldout_records", "fail_to_pass", str(larder.tree), str(runner.state_folder())}
    code = SECRETS.replace("WORDS", repr([word.strip('"').encode()[::-1] for word in words]))
    looks = {path: text + code}
    runs = run_phases(larder, [Phase("tests", looks, initials.fail_to_pass), replace(phase, overlay={**phase.overlay, **looks})])
    assert [run.messages[-1] for run in runs] == [{"broke": "HTAPNOHTYP"}] * 2  # that one word shows that the looking works


# who is to blame

@needs_sandbox
def test_the_machinery_is_tried_again_counted_and_then_raised(judged, monkeypatch):
    starts, disk = [RunnerProblem("no start")], [OSError(28, "No space left on device")]

    def failing(failures, real):
        def call(*given, **named):
            if failures:
                raise failures.pop()
            return real(*given, **named)
        return call

    monkeypatch.setattr(runner.JudgeProcess, "wait", failing(starts, runner.JudgeProcess.wait))
    monkeypatch.setattr(runner, "lay_out", failing(disk, runner.lay_out))
    monkeypatch.setattr(runner, "_PAUSE_S", 0)
    before = judge_counts()
    assert judged().reward == 1.0
    assert judge_counts() == {"graded": before["graded"] + 1, "again": before["again"] + 2, "unscored": before["unscored"]}
    disk += [OSError(28, "No space left on device")] * runner.TRIES
    with pytest.raises(RunnerProblem, match="tried 3 times: .*No space left"):
        judged()
    assert judge_counts()["unscored"] == before["unscored"] + 1 and judge_counts()["again"] == before["again"] + 4
    monkeypatch.setattr(grading, "unreadable", failing([OSError(5, "Input/output error")], grading.unreadable))
    with pytest.raises(RunnerProblem, match="cannot work: .*Input/output"):
        judged()


@needs_sandbox
@pytest.mark.parametrize("problem", [RecursionError(), MemoryError(), KeyError(1), OverlayProblem("the overlay names x")])
def test_whatever_else_goes_wrong_is_the_submissions(initials, larder, monkeypatch, problem):
    def run(tree, phases, *given, **named):
        if "src/larder/bad.py" in phases[0].overlay or ours:
            raise problem
        return real(tree, phases, *given, **named)

    real, ours = grading.run_phases, False
    monkeypatch.setattr(grading, "run_phases", run)
    found = grade(initials, larder, {"src/larder/bad.py": b"x"})
    assert found.reward == 0.0 and found.findings[0].weight == 1.0 and found.findings[0].what
    ours = not isinstance(problem, OverlayProblem)
    if ours:
        with pytest.raises(RunnerProblem, match=f"has a fault: {type(problem).__name__}"):
            grade(initials, larder, {})


ENDS = ["", "import os\nos._exit(0)", "raise SystemExit", "while True: pass", "import os\nos.write(3, b'x\\n')",
        "import os\nos.close(3)", "raise RecursionError", "x = bytearray(1 << 40)", "import sys\nsys.setrecursionlimit(10)",
        "def f(): f()\nf()", "import sys\nsys.modules.clear()",
        "import builtins\nbuiltins.__dict__.clear()", "import json\njson.dumps = None",
        "import os\nos.kill(0, 9)", "import signal\nsignal.alarm(1)",
        "class float(float): pass", "import re\nre.sub = None",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"]
MOST_S = 2.0  # of one phase


def mutated_source(chance, text):
    "A source with a few bytes, tokens or lines changed, and sometimes an end that does harm."
    for _ in range(chance.randrange(1, 4)):
        way, lines = chance.randrange(6), text.split("\n")
        place = chance.randrange(len(lines))
        if way == 0:
            del lines[place]
        elif way == 1:
            lines.insert(place, lines[chance.randrange(len(lines))])
        elif way == 2:
            lines[place] = lines[place].replace("return", chance.choice(("yield", "await", "return not", "raise")))
        elif way == 3:
            other = chance.choice(("1e999", "-1", "10**9", "''", "[]", "..."))
            lines[place] = lines[place].replace(chance.choice("0123456789"), other)
        elif way == 4:
            lines[place] = "".join(chance.choice((c, c, c, c, chr(chance.randrange(0x10FFFF)))) for c in lines[place])
        else:
            lines[place] = lines[place].replace("if", chance.choice(("while", "if not", "assert")))
        text = "\n".join(lines)
    return (text + "\n" + chance.choice(ENDS[:1] * len(ENDS) + ENDS)).encode(errors=chance.choice(("replace", "surrogatepass")))


@needs_sandbox
@pytest.mark.parametrize("count", [6, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutated_submissions_never_raise_nor_hang(count, initials, larder, monkeypatch):
    monkeypatch.setattr(grading, "JUDGE_LIMITS", runner.Limits(wall_s=MOST_S, memory_mb=1024))
    path, text = envs_tasks.solution(larder, initials)
    chance, before = random.Random("mutated submissions"), judge_counts()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        found = grade(initials, larder, {path: mutated_source(chance, text)})
        assert found.reward in (0.0, 1.0) and (found.reward == 0 or found.passed)
    assert judge_counts() == before | {"graded": before["graded"] + count}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 300_000  # KiB
    assert grade(initials, larder, {path: text.encode()}).reward == 1.0


def test_as_many_messages_as_are_allowed_are_read_and_one_more_is_not(monkeypatch):
    monkeypatch.setattr(messages, "MOST_MESSAGES", 5)
    line = b'{"start": "t.py::a"}\n'
    assert [len(read_messages(line * n)) for n in (0, 1, 4, 5)] == [0, 1, 4, 5]
    assert len(read_messages(line * 5 + line[:9])) == 5  # the last line has no end
    with pytest.raises(Forgery, match="more than 5"):
        read_messages(line * 6)
