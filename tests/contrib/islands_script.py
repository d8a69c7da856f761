"One island in a process of its own, which may die at a moment that the test names."
import os
import signal
import time
from dataclasses import fields
from pathlib import Path

import torch
import trainer_script

from composer_replication.contrib.islands.diloco import Island, Islands
from composer_replication.contrib.islands.settings import IslandSettings
from composer_replication.training.checkpoint import last_complete_checkpoint, save_buffer
from composer_replication.training.trainer import ComposerReplicationTrainer


def apart(settings):
    "The trainer's settings, and those of its island."
    own = {field.name: settings[field.name] for field in fields(IslandSettings) if field.name in settings}
    return {name: value for name, value in settings.items() if name not in own}, IslandSettings(**own)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Watched(Islands):
    "Dies at a step, after so many of its own, or in a given call of torchft's manager; says when the others know it."

    def __init__(self, trainer, island, settings, out, dies=None, hold=None):
        super().__init__(trainer, island, settings)
        self.out, self.dies, self.hold, self.calls, self.steps = out, dies or [None, 0], hold, 0, 0

    def _begin(self):
        super()._begin()
        self.out.with_name(f"{self.out.name}-begun-{self.island.returns}").touch()
        method, at = self.dies
        if method not in (None, "step", "steps"):
            owner = self.group if method == "configure" else self.manager
            inner = getattr(owner, method)

            def counted(*args, **kwargs):
                self.calls += 1
                return die() if self.calls == at else inner(*args, **kwargs)

            setattr(owner, method, counted)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        if self.dies in (["step", state.global_step], ["steps", self.steps]):
            die()
        if self.hold and self.hold[0] == state.global_step:
            end = time.monotonic() + 200
            while not all(Path(name).exists() for name in self.hold[1]) and time.monotonic() < end:
                time.sleep(0.05)
        super().on_step_end(args, state, control, **kwargs)


def main(job):
    "Train as one island; what it leaves behind goes to `OUT.pt`. Without a lighthouse it trains alone."
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"})
    os.dup2(os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    out = Path(job["out"])
    settings, own = apart(job["settings"])
    trainer: ComposerReplicationTrainer = trainer_script.make("two", out, **settings)
    if "island" in job:
        trainer.add_callback(Watched(trainer, Island(**job["island"]), own, out, job.get("dies"), job.get("hold")))
    start = last_complete_checkpoint(out) if job.get("resume") else None
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    save_buffer(Path(f"{out}.pt"), trainer_script.outcome(trainer) | {"step": trainer.state.global_step})
