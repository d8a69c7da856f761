"A trainer of the small world that keeps what each step was made of."
import world
from datasets import Dataset
from trainer_script import BASE
from transformers.trainer_callback import PrinterCallback

from composer_replication.envs.toy.model import embedded_model
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.losses.batch import TraceExample
from composer_replication.replay.pairs import group_pairs, sibling_pairs
from composer_replication.traces.siblings import SiblingIndex
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.step import Steps
from composer_replication.training.trainer import ComposerReplicationTrainer

ONE_STEP = BASE | {"save_strategy": "no", "max_steps": 1, "alpha_sdpo": 0.0, "sample_every": 0, "max_grad_norm": 0.0,
                   "optim": "sgd", "per_device_train_batch_size": 16, "lr_scheduler_type": "constant"}


def paired():
    "Six recorded traces with pairs."
    traces = toy_traces()
    index = SiblingIndex(traces)
    return [e for t in traces if (e := TraceExample(t, pairs=tuple(sibling_pairs(t, index)))).pairs][:6]


class Kept(ComposerReplicationTrainer):
    "Keeps the last batch as generated, and the gradients of each optimizer step."

    def _generate_and_score_completions(self, inputs):
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch

    def training_step(self, *args, **kwargs):
        out = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.steps = [*getattr(self, "steps", []), [p.grad.clone() for p in self.student.parameters()]]
        return out

    @property
    def grads(self):
        "Of the last step."
        return self.steps[-1]


class ComparedSteps(Steps):
    "Keeps for the trainer logits of both sides at hinted turns, from whole hidden states, and channel 2's sum, pass by pass."

    def _total(self, part, terms):
        if part.sites:
            t, (states, head) = self.trainer, part.teacher
            rows = part.forward.hidden[tuple(part.batch.sdpo_student.T)].detach()
            passed = t.student.lm_head(rows).detach(), head.logits(states), terms["sdpo"].total.item()
            t.passes = [*getattr(t, "passes", []), passed]
        return super()._total(part, terms)


class Compared(ComposerReplicationTrainer):
    steps_kind = ComparedSteps


def made(folder, environment=world.Files, rows=8, model=None, kind=Kept, given=None, **changes):
    "The trainer of one plain SGD step; `rows` may be tasks, `given` are more of its arguments."
    args = ComposerReplicationConfig(str(folder), **ONE_STEP | changes)
    own = {"hint_source": default_composite() if args.alpha_sdpo else None, "processing_class": world.tokenizer(),
           **({"pair_source": group_pairs} if args.beta_replay else {}), **(given or {})}
    tasks = Dataset.from_list(world.rows(rows) if isinstance(rows, int) else rows)
    trainer = kind(model or embedded_model("mild"), args=args, train_dataset=tasks, environment_factory=environment, **own)
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained(*args, **changes):
    "As `made`, after its training."
    trainer = made(*args, **changes)
    trainer.train()
    return trainer
