"A class of the trainers that reads an attribute of another one of ours names it in its docstring."
import ast
import inspect
import re
import textwrap

import pytest

from composer_replication.training.offline import OfflineTrainer
from composer_replication.training.running import RunTrainer
from composer_replication.training.trainer import ComposerReplicationTrainer


def ours(kind):
    return [one for one in kind.__mro__ if issubclass(one, RunTrainer)]


def attributes(kind):
    "Return the attributes of `self` that a class sets or defines, methods left out, and those that it reads."
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    own = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "self"]
    stored, read = ({n.attr for n in own if isinstance(n.ctx, context)} for context in (ast.Store, ast.Load))
    return stored | {name for name, value in vars(kind).items() if not inspect.isfunction(value)}, read


def unnamed(kind):
    "Return what a class reads of those before it and does not name."
    before = set().union(*(attributes(one)[0] for one in ours(kind)[1:]))
    stored, read = attributes(kind)
    return (read & before) - stored - set(re.findall(r"`(\w+)`", kind.__doc__ or ""))


@pytest.mark.parametrize("kind", [RunTrainer, *ours(ComposerReplicationTrainer)[:-1], OfflineTrainer])
def test_what_a_class_reads_of_another_is_named_in_it(kind):
    assert unnamed(kind) == set()


def test_three_classes_of_ours_stand_above_each_other():
    assert len(ours(ComposerReplicationTrainer)) <= 3 and len(ours(OfflineTrainer)) <= 2


def test_an_attribute_that_is_read_and_not_named_is_found():
    class Reads(RunTrainer):
        "Reads `means`."

        def shown(self):
            return self.means, self.ways, self.log, self.accelerator

    assert unnamed(Reads) == {"ways"}
