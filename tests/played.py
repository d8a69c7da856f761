"Episodes that several trainers of a test file would play alike are played once."
import copy
import hashlib

_PLAYED = {}


def played_once(trainer):
    """The trainer, which takes over what another one has played with the same weights, rows, names, limits and environment.

    Nothing else decides an episode; tests/rollout and the tests of resuming hold that. Environments that count across episodes
    are not for this."""
    play = trainer.play

    def remembered(rows, names):
        weights = hashlib.sha256()
        for tensor in trainer.model.state_dict().values():
            weights.update(tensor.detach().contiguous().view(-1).numpy().data)
        key = (weights.digest(), trainer.factory, repr(trainer.args.rollout_config), trainer.args.bf16, *names, repr(rows))
        if key not in _PLAYED:
            _PLAYED[key] = play(rows, names)
        return copy.deepcopy(_PLAYED[key])

    trainer.play = remembered
    return trainer
