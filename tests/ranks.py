"Jobs in processes of their own, one process or several that train together."
import time
from contextlib import contextmanager
from pathlib import Path

from forks import SERVER
from waiting import free_port

from composer_replication.training.checkpoint import load_buffer

LIMIT = 300  # seconds that any process may take; on an idle machine none needs 30


def run(name, scene, out, **more):
    "One task of a job."
    return {"name": name, "scene": scene, "out": str(out)} | more


def left(out, name, rank=0):
    "What a task left behind."
    return load_buffer(Path(out) / f"{name}-rank{rank}.pt")


@contextmanager
def processes():
    "A list for processes that shall not outlive the context."
    begun = []
    try:
        yield begun
    finally:
        for process in begun:
            process.kill()
            process.join(LIMIT)


@contextmanager
def jobs(script, logs):
    "Gives a function that starts a job of the script's `main`; no process outlives the context."
    def begin(tasks, ranks=1, **job):
        port, made = str(free_port()), []
        for rank in range(ranks):
            env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
            if ranks > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            log = logs / str(len(begun))
            process = SERVER.Process(target=script.main, args=({"tasks": tasks, "env": env, "log": str(log)} | job,))
            process.start()
            process.log = log
            begun.append(process)
            made.append(process)
        return made

    with processes() as begun:
        yield begin


def ended(processes, codes=None):
    "What each said, once all have ended with these codes: all 0 where none are named."
    end, said = time.monotonic() + LIMIT, []
    for process, code in zip(processes, codes or [0] * len(processes), strict=True):
        process.join(max(end - time.monotonic(), 0.01))
        said.append(process.log.read_text() if process.log.exists() else "")
        assert process.exitcode == code, f"{process.exitcode}: {said[-1][-3000:]}"
    return said
