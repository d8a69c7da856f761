"""Processes of their own without seconds of imports each: forked from one that has imported what is heavy.

The start of a process (what an import costs, what it may not import, signals from the first moment) is for tests that start
one by hand."""
import gc
import multiprocessing
import os
import sys
import time
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([  # nothing of the command line: it looks at its terminal and environment as it is imported
    "jsonschema",  # beside JupyterLab's packages over a second
    "matplotlib.figure", "transformers.models.qwen3.modeling_qwen3", "composer_replication.training.trainer"])
FORCED = (  # each changes what a command sends to a pipe
    "PYTHONUNBUFFERED", "TQDM_DISABLE", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "COLUMNS", "TERMINAL_WIDTH")


def _command(arguments, cwd, environment, said, complained):
    "What the child does: its streams, its folder and environment, then the command line."
    for number, file in enumerate((os.devnull, said, complained)):
        os.dup2(os.open(file, os.O_RDWR), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["composer-rl", *arguments]
    gc.freeze()  # what was imported stays
    from composer_replication.cli import console
    from composer_replication.cli.app import main
    console.EVERY = 3600.0  # a busy machine makes an import take longer than a minute, and tests count lines
    main()


@contextmanager
def started(*arguments, cwd=None, env=None):
    "A `composer-rl` command in a process of its own, once it has said its first line: (process, that line, its output's file)."
    process, folder, said, complained = _start(arguments, cwd, env)
    with folder:
        try:
            end = time.monotonic() + 600
            while process.is_alive() and "\n" not in said.read_text() and time.monotonic() < end:
                process.join(0.05)
            assert "\n" in said.read_text(), complained.read_text()
            yield process, said.read_text().splitlines(keepends=True)[0], said
        finally:
            process.kill()
            process.join()


def composer(*arguments, cwd=None, env=None, timeout=600) -> CompletedProcess:
    "A whole `composer-rl` command in a process of its own, its output in files."
    process, folder, said, complained = _start(arguments, cwd, env)
    with folder:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutExpired(arguments, timeout, said.read_bytes(), complained.read_bytes())
        return CompletedProcess(arguments, process.exitcode, said.read_text(), complained.read_text())


def _start(arguments, cwd, env):
    forced = {name: os.environ.pop(name) for name in FORCED if name in os.environ}
    forkserver.ensure_running()
    os.environ.update(forced)
    folder = TemporaryDirectory()
    said, complained = Path(folder.name, "out"), Path(folder.name, "err")
    said.touch()
    complained.touch()
    words = [str(argument) for argument in arguments]
    process = SERVER.Process(target=_command, args=(words, str(cwd or Path.cwd()), dict(env or os.environ), said, complained))
    process.start()
    return process, folder, said, complained
