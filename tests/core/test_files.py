"Files are whole for whoever reads them, whoever writes."
import gzip
import json
import os
import threading

import pytest

from composer_replication.cli.console import sentence
from composer_replication.core.errors import InputProblem
from composer_replication.core.files import (
    json_bytes,
    json_value,
    read_json,
    read_jsonl,
    write_file,
    write_json,
    write_jsonl,
)
from composer_replication.core.texts import read_text


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


def test_a_link_and_permissions_stay_and_a_device_is_refused(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "device").symlink_to(os.devnull)
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    for name in ("device", "pipe"):
        with pytest.raises(InputProblem, match="this is a device or a pipe; name a file"):
            write_jsonl(tmp_path / name, [{"a": 1}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "link", "pipe", "real"]
    assert (tmp_path / "device").is_symlink() and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_texts_and_rows_of_editors_and_shells_are_read(encoding, tmp_path):
    (tmp_path / "text").write_bytes("é: 1\r\nb: 2\r\n".encode(encoding))
    assert read_text(tmp_path / "text") == "é: 1\nb: 2\n"
    if encoding != "utf-16":
        (tmp_path / "rows").write_bytes('{"a": 1}\r\n'.encode(encoding))
        assert list(read_jsonl(tmp_path / "rows")) == [(1, {"a": 1})]


@pytest.mark.parametrize("content", [b"\xff\x00\xff", b"a\x00b", b"\xe9", "\ud800".encode("utf-16-le", "surrogatepass")])
def test_a_file_that_is_no_text_is_named(content, tmp_path):
    (tmp_path / "picture").write_bytes(content)
    with pytest.raises(InputProblem, match="picture: this is no text in UTF-8"):
        read_text(tmp_path / "picture")


def test_half_a_letter_spoils_no_file_and_a_sentence_names_the_path(tmp_path):
    assert write_file(tmp_path / "a", "n\udcff").read_text() == "n?"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OSError) as problem:
        write_file(tmp_path / "full", "text")
    assert sentence(problem.value) == f"{tmp_path / 'full'}: is a directory; check the path and its permissions."
