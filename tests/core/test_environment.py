"Environments of TRL's kind and ours in each other's hands, held against what TRL and transformers read; and the registry."
import inspect
import sys
import types

import pytest
from transformers.utils import get_json_schema

from composer_replication.core.environment import (
    Environment,
    TrlEnvironment,
    environment_names,
    environment_of,
    load,
    register_environment,
    trl_factory,
)
from composer_replication.core.errors import InputProblem
from composer_replication.core.tools import ToolHolder, ToolProblem, ToolResult, tool
from composer_replication.core.trace import ToolCall


class Shelf(ToolHolder):
    "Ours."

    def reset(self, items=(), **row):
        self.items = list(items)
        return f" It holds {len(self.items)}."

    @tool
    def put(self, names: list[str], at: int | None = None) -> str:
        """
        Put items on the shelf.

        Args:
            names: What.
            at: Where, counted from 0.
        """
        if at is not None and at > len(self.items):
            raise ToolProblem("Error: there is no such place.")
        self.items[at or 0:at or 0] = names
        return " ".join(self.items)

    @tool
    def clear(self) -> str:
        """
        Take everything away.
        """
        self.items = []
        return "empty"

    def reward(self, answer=""):
        return float(len(self.items)) + len(answer)

    def close(self):
        self.items = None


class Plain:
    "TRL's."

    def reset(self, **row):
        self.row = row

    def add(self, a: int, b: float = 0.5, tags: list[str] | None = None) -> str:
        """
        Add.

        Args:
            a: One.
            b: Two.
            tags: Names.
        """
        if a < 0:
            raise ValueError("too  small\nby far")
        return a + b

    async def later(self) -> str:
        """
        Wait.
        """
        return "later"

    def _hidden(self):
        pass

    def close(self):
        self.closed = True


def trl_tools(cls):
    "What TRL 1.16 makes of an environment's class, in its own words."
    return [name for name, _ in inspect.getmembers(cls, predicate=inspect.isfunction)
            if name not in ("reset", "get_reward") and not name.startswith("_")]


def test_ours_in_trls_hands():
    made = trl_factory(Shelf)
    assert sorted(trl_tools(made)) == ["clear", "put"] and made.__name__ == "Shelf"
    one, two = made(), made()
    assert [get_json_schema(getattr(one, s["function"]["name"])) for s in Shelf.tools] == list(Shelf.tools)
    assert one.reset(items=["x"]) == " It holds 1." and two.reset() == " It holds 0."
    assert one.put(names=["a"], at=1) == "x a" and one.put(names=["b"]) == "b x a" and two.put(names=["c"]) == "c"
    assert one.put(names=["a"], at=9) == "Error: there is no such place."
    assert one.put(names="a") == "TypeError: the call does not fit put: 'names' must be an array, not 'a'."
    assert one.put(name="a").startswith("TypeError: the call does not fit put: there is no argument 'name'")
    assert (one.get_reward(), two.get_reward()) == (3.0, 1.0)
    assert [r.error_kind for r in two.results] == [None] and sorted({r.error_kind for r in one.results}, key=str) == [
        None, "runtime_error", "type_error"]
    one.reset()
    assert one.results == () and one.tools == Shelf.tools


def test_trl_gets_the_types_behind_references():
    class Mover(Shelf):
        pass

    by = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    properties = {"to": {"$ref": "#/$defs/Point"}, "by": by, "all": {"$ref": "#/$defs/List"}}
    definitions = {"Point": {"type": "object"}, "List": {"type": "array", "items": {"$ref": "#/$defs/List"}}}
    parameters = {"type": "object", "required": ["to"], "properties": properties, "$defs": definitions}
    Mover.tools = ({"type": "function", "function": {"name": "move", "description": "Move.", "parameters": parameters}},)
    hints = trl_factory(Mover)().move.__annotations__
    assert hints["to"] is dict and hints["by"] == int | None and hints["all"] == list[list[list[list[list]]]]


def test_trls_in_our_hands():
    environment = environment_of(Plain())
    assert isinstance(environment, TrlEnvironment) and isinstance(environment, Environment)
    assert environment_of(environment) is environment and isinstance(environment_of(Shelf()), Shelf)
    assert [s["function"]["name"] for s in environment.tools] == trl_tools(Plain)[:1] + ["later"]
    assert environment.reset(x=1) is None and environment.environment.row == {"x": 1}
    assert environment.call(ToolCall("add", {"a": 2})) == ToolResult("2.5", flagged=False)
    assert environment.call(ToolCall("add", {"a": 2, "tags": None})) == ToolResult("2.5", flagged=False)
    assert environment.call(ToolCall("add", {"a": -1})) == ToolResult("ValueError: too small by far", "runtime_error")
    assert environment.call(ToolCall("add", {"a": "1"})).error_kind == "type_error"
    assert environment.call(ToolCall("reset", {})).error_kind == "tool_not_found"
    assert environment.call(ToolCall("add", '{"a": ')).error_kind == "json_decode"
    assert environment.call(ToolCall("later", {})).text == "later"
    assert environment.reward("x") is None  # it has no get_reward
    environment.close()
    assert environment.environment.closed


def test_there_and_back():
    episode = trl_factory(lambda: environment_of(Plain()))
    assert sorted(trl_tools(episode)) == ["add", "later"]
    assert [get_json_schema(getattr(episode(), n)) for n in ("add", "later")] == list(environment_of(Plain()).tools)


def test_an_environment_is_registered_in_one_line(monkeypatch):
    from composer_replication.core import environment
    monkeypatch.setattr(environment, "_FACTORIES", dict(environment._FACTORIES))
    register_environment("shelf")(Shelf)
    assert isinstance(load("shelf"), Shelf) and "shelf" in environment_names()
    mine = types.ModuleType("their_package")
    mine.make = lambda start=0: Plain()
    monkeypatch.setitem(sys.modules, "their_package", mine)
    assert isinstance(load("their_package:make", start=3), TrlEnvironment)


@pytest.mark.parametrize("name, what",
                         [("os:none", "module 'os' has no 'none'"), ("no_such_package:make", "ModuleNotFoundError"),
                                        (":", "the import of '' ended")])
def test_a_factory_that_is_not_there_is_told(name, what):
    with pytest.raises(InputProblem, match=what) as problem:
        load(name)
    assert "\n" not in str(problem.value)


def test_built_in_environments_are_found_by_their_folder():
    assert {"deletion", "gsm8k", "toy"} <= set(environment_names())
    for environment in (load("gsm8k"), load("toy"), load("deletion", tasks=[])):
        assert isinstance(environment, Environment)
        environment.close()


def test_what_a_factory_says_nothing_of_has_its_default():
    from composer_replication.core.environment import Offer, offer_of
    from composer_replication.envs.deletion.env import FeatureDeletionEnv
    from composer_replication.envs.gsm8k.env import Gsm8kEnv

    def plain():
        return None

    plain.demonstrations = lambda n, seed, tasks: ["shown"] * n
    assert offer_of(lambda: None) == Offer() == Offer(False, False, None, None, None, None)
    assert offer_of(plain).demonstrations(2, 0, None) == ["shown"] * 2 and offer_of(plain).task_set is None
    assert offer_of(FeatureDeletionEnv).runs_code
    assert offer_of(FeatureDeletionEnv).reads_tasks and offer_of(Gsm8kEnv).tools == () and offer_of(Gsm8kEnv).task_set
