"Where channels act the head reads the sampled tokens alone, and those of hinted turns once for the policy and for channel 2."
import pytest
import torch
from played import played_once
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_script import make

from composer_replication.losses.chunked import LMHead
from composer_replication.losses.divergences import Divergence
from composer_replication.training.batches import sampled_mask
from composer_replication.training.passes import TwiceRead, score_sampled
from composer_replication.training.trainer import ComposerReplicationTrainer


class HeadProducts(TorchDispatchMode):
    "Rows that are multiplied by a matrix with a side as long as the vocabulary."

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear"):
            sides = (args[-2].shape[0], args[-2].shape[1], args[-1].shape[1])  # (a, b) @ (b, c)
            if self.vocab in sides:
                rest = sorted(sides)
                rest.remove(self.vocab)
                rest.remove(self.width)
                self.rows += rest[0]
        return out


class Watched(ComposerReplicationTrainer):
    "Counts the head's products of every step, backward pass included."

    sampling_checked = True  # which reads the head once more, at the first step

    def training_step(self, model, inputs, num_items_in_batch=None):
        with HeadProducts(self.student.config.vocab_size) as counted:
            counted.width = self.student.config.hidden_size
            loss = super().training_step(model, inputs, num_items_in_batch)
        batch = self._buffered_inputs[0]
        hinted = sum(len(b.ids) - b.start for r in batch["composer_rows"] for b in r.tree.branches if b.kind == "hint")
        self.counts = counted.rows, int(sampled_mask(batch).sum()), batch["completion_ids"].numel(), hinted
        return loss


def counts(folder, **changes):
    trainer = make("epochs", folder, Watched, per_device_train_batch_size=8, max_steps=1, save_strategy="no", **changes)
    played_once(trainer).train()
    return trainer.counts


def test_a_step_reads_the_vocabulary_for_sampled_tokens_alone(tmp_path):
    rows, sampled, scored_by_trl, hinted = counts(tmp_path)
    assert 0 < hinted < sampled < scored_by_trl
    assert rows == 4 * sampled + hinted  # logits twice and two gradients; the teacher's once more


def test_with_an_entropy_bonus_entropies_keep_their_gradient(tmp_path):
    rows, sampled, _, hinted = counts(tmp_path, entropy_coef=0.01)
    assert rows == 4 * sampled + 5 * hinted  # the tokens of hinted turns a second time, for channel 2


def test_a_divergence_over_the_whole_vocabulary_reads_them_again(tmp_path):
    rows, sampled, _, hinted = counts(tmp_path, sdpo_support="full", sdpo_top_k=None)
    assert rows > 4 * sampled + 5 * hinted


@pytest.mark.parametrize("hinted, temperature", ((0, 0.6), (7, 0.6), (7, 1.0)))
def test_scores_and_gradients_are_those_of_whole_logits(hinted, temperature):
    torch.manual_seed(hinted)
    hidden = torch.randn(3, 9, 5, requires_grad=True)
    weight, bias = torch.randn(70, 5, requires_grad=True), torch.randn(70, requires_grad=True)
    head, labels = LMHead(weight, bias, 0.8, 3.0), torch.randint(70, (3, 9))
    sampled = torch.rand(3, 9) < 0.5
    places = sampled.nonzero()[torch.randperm(int(sampled.sum()))[:hinted]]
    twice = TwiceRead(places, labels[tuple(places.T)], Divergence(1.0, temperature, "student_top_k", 4)) if hinted else None
    logprobs, entropy = score_sampled(hidden, head, labels, sampled, temperature, twice)
    whole = (head.logits(hidden) / temperature).log_softmax(-1)
    want = whole.gather(-1, labels[..., None])[..., 0] * sampled
    torch.testing.assert_close(logprobs, want)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1) * sampled)
    upstream = torch.randn(3, 9)
    leaves = hidden, weight, bias
    for a, b in zip(*(torch.autograd.grad((x * upstream).sum(), leaves, retain_graph=True) for x in (logprobs, want))):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
