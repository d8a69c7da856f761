"A store of a rollout queue at whose n-th access its user is killed."
from composer_replication.contrib.queue.store import Store


class Killed(BaseException):
    "The process is gone: nothing may catch it."


class Fused(Store):
    "A store whose user is killed at its n-th access, before or after it."

    fuse, after = None, False

    def _burn(self, act, *arguments):
        self.fuse = None if self.fuse is None else self.fuse - 1
        if self.fuse == -1 and not self.after:
            raise Killed
        result = act(self, *arguments)
        if self.fuse == -1 and self.after:
            raise Killed
        return result


for _act in (Store.put, Store.put_new, Store.read, Store.names, Store.remove):
    setattr(Fused, _act.__name__, lambda self, *arguments, act=_act: self._burn(act, *arguments))
