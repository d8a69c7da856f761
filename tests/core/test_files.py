"Files are whole for whoever reads them, whoever writes."
import json
import threading

from composer_replication.core.files import write_json


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
