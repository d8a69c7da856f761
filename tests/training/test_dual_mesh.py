"Experts sharded over all devices and all else over pairs of them: gradients and weights are those of one process."
import dual_mesh_script
import pytest
import torch
from dual_mesh_script import GROUP, RANKS, mixture, rows, train
from ranks import ended, jobs


def furthest(ours, theirs):
    "The largest difference of a tensor, as a share of its largest entry."
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)


@pytest.mark.slow
def test_two_meshes_train_as_one_process_does(tmp_path):
    with jobs(dual_mesh_script, tmp_path) as begin:
        ended(begin([], RANKS, out=str(tmp_path)))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    alone = mixture()
    gradients = train(alone, alone.parameters(), rows())
    weights = {n: p.detach() for n, p in alone.named_parameters()}
    assert any(".experts." in name for name in weights)
    for name, weight in weights.items():
        parts = RANKS if ".experts." in name else GROUP
        assert [rank["held"][name] for rank in ranks] == [weight.numel() // parts] * RANKS, name
    for ours, theirs in zip(ranks[0]["gradients"], gradients, strict=True):
        assert furthest(ours, theirs) < 1e-9
    assert furthest(ranks[0]["weights"], weights) < 1e-9
