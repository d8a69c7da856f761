"`composer-rl serve teachers` as a process: what it prints, how it ends, and what it refuses."
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest
from typer import Typer
from typer.testing import CliRunner

from composer_replication.cli.serve import serve_teachers

RUN = "import typer; from composer_replication.cli.serve import serve_teachers; typer.run(serve_teachers)"
SLEEP = "import time; import composer_replication.experiments.teachers as t; t.LocalTeacher.answer = lambda *_: time.sleep(60); "


def run(*arguments):
    app = Typer()
    app.command()(serve_teachers)
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, " ".join(re.sub(r"\x1b\[\d+m", "", done.stderr).split())


def completion(url, name):
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))


@pytest.mark.parametrize("number, busy", [(signal.SIGTERM, False), pytest.param(signal.SIGINT, True, marks=pytest.mark.slow)])
def test_it_serves_until_it_is_told_to_stop(number, busy):
    names = ["medium"] if busy else ["mild", "teacher-2"]
    agents = [word for name in names for word in ("--agents", name)]
    command = [sys.executable, "-c", SLEEP + RUN if busy else RUN, "--port", "0", *agents]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        first, second = server.stderr.readline(), server.stderr.readline()
        url = re.fullmatch(rf"Serving {', '.join(names)} at (http://127\.0\.0\.1:\d+/v1)\. Ctrl-C ends it\.\n", first)[1]
        assert second == f"composer-rl replay TRACES {' '.join(f'--teachers {n}@{url}' for n in names)}\n"
        if busy:
            threading.Thread(target=lambda: pytest.raises(OSError, completion, url, "medium"), daemon=True).start()
            threading.Event().wait(1)
        else:
            assert completion(url, "mild")["model"] == "mild"
        server.send_signal(number)
        assert server.wait(120) == 0 and server.stderr.read() == "" and server.stdout.read() == ""
    finally:
        server.kill()
        server.wait(10)


def test_what_it_cannot_serve():
    code, said = run("--agents", "brilliant")
    assert (code, said) == (1, "error: there are no agents 'brilliant'; name one of good, fair, poor, or some of mild, medium, "
                               "strong, teams, teacher-1, teacher-2, teacher-3.")
    code, said = run("--agents", "good", "--agents", "poor")
    assert code == 1 and "there are no agents 'good'" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run("--agents", "mild", "--port", str(taken.getsockname()[1]))
    assert code == 1 and "cannot be listened on" in said and "choose another address or port" in said
