"Files are whole for whoever reads them, whoever writes."
import gzip
import json
import threading

import pytest

from composer_replication.core.errors import InputProblem
from composer_replication.core.files import json_bytes, json_value, read_json, read_jsonl, write_json, write_jsonl


def test_threads_that_write_one_path_leave_no_torn_file(tmp_path):
    path, wrong = tmp_path / "one.json", []
    write_json(path, ["x"] * 1000)

    def work(word):
        for _ in range(200):
            try:
                write_json(path, [word] * 1000)
                if len(json.loads(path.read_text())) != 1000:
                    wrong.append("torn")
            except (OSError, ValueError) as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(word,)) for word in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and [p.name for p in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**64), 10**30, 12345678901234567890123])
def test_integers_of_any_size_stay_what_they_are(number, tmp_path):
    for value in ({"n": number, "x": 1e19}, {"n": [number], "x": 0.5}, {"n": -number, "x": 2**53 + 1}):
        assert json_value(json.dumps(value)) == read_json(json_bytes(value)) == value
        assert [repr(v) for v in json_value(json_bytes(value)).values()] == [repr(v) for v in value.values()]
    assert read_json(f'{{"n": {number}, "x": NaN, "y": "\\ud83d"}}') == {"n": number, "x": None, "y": "\ufffd"}
    write_jsonl(tmp_path / "a.jsonl", [{"n": number}])
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [(1, {"n": number})]


def test_only_integers_take_the_slow_path():
    with pytest.raises(TypeError):
        json_bytes({"half": "\ud83d"})
    with pytest.raises(TypeError):
        json_bytes({"n": 2**70, "set": {1}})
    text = {"text": "0123456789012345678901234567890", "n": 1}
    assert json_value(json.dumps(text)) == text


def test_a_damaged_gzip_file_of_rows_is_named(tmp_path):
    "Wherever the damage is: in the head, in a stream, in the sum at its end, or the rest is missing."
    whole = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(900)), mtime=0)
    kinds = set()
    for at in (*range(12), *range(12, len(whole), 41), *range(len(whole) - 9, len(whole))):  # head, stream, sum
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1:]):
            (tmp_path / "a.jsonl.gz").write_bytes(damaged)
            try:
                kinds.add(len(list(read_jsonl(tmp_path / "a.jsonl.gz"))))
            except InputProblem as problem:
                assert str(tmp_path / "a.jsonl.gz") in str(problem)
                kinds.add("damaged" in str(problem))
    assert kinds >= {True, 900}  # a byte of the head that says nothing
