"""Every call of the published API through the default composite and its hook: a tool's error is never left without a text."""
import pytest

from composer_replication.core.trace import ERROR_KINDS, HintContext
from composer_replication.hints import (
    CompositeHintGenerator,
    RoutingHintGenerator,
    TemplateHintGenerator,
    default_composite,
    is_tool_runtime_kind,
)
from composer_replication.hints.templates import GENERAL, HINT_TEMPLATES, dispatch, register

METAS = [None, {}, {"tool_name": "f"}, {"error_message": ""}, {"error": ""}, {"error_message": None}, {"available_tools": []},
         {"tool_name": "f", "tool_schema": {}}, {"intent": "x"}, HintContext(), HintContext(tool_name="f")]


@pytest.mark.parametrize("kind", ERROR_KINDS)
@pytest.mark.parametrize("meta", METAS, ids=repr)
def test_what_says_little_gets_what_the_template_says(kind, meta):
    composite, expected = default_composite(), dispatch(kind, meta)
    assert expected
    for source in (composite.as_collator_hook(), composite.generate, default_composite(enable_raw_error=False).generate,
                   default_composite(llm_complete=lambda prompt: "").as_collator_hook(), TemplateHintGenerator().generate):
        assert source(kind, meta) == expected


def test_the_general_sentence_comes_last():
    hook = default_composite().as_collator_hook()
    assert hook("type_error", {"tool_name": "f"}) == GENERAL["type_error"]
    assert "odd words" in hook("runtime_error", {"error_message": "odd words"})
    assert "boom" in hook("runtime_error", {"error": "boom"})
    judged = default_composite(llm_complete=lambda prompt: "Look first.", enable_raw_error=False)
    assert judged.generate("runtime_error", {"error_message": "odd words"}) == "Look first."


def test_what_no_template_knows_stays_without_a_text():
    hook = default_composite().as_collator_hook()
    assert [hook(kind, {"tool_name": "f"}) for kind in ("style", "no_such_kind", "")] == [None, None, None]
    assert CompositeHintGenerator([]).generate("type_error", {}) is None  # no template was asked for


def test_a_template_of_one_s_own_answers_the_hook(monkeypatch):
    monkeypatch.setattr("composer_replication.hints.templates.HINT_TEMPLATES", dict(HINT_TEMPLATES))
    register("own_error", lambda ctx: f"Mind {ctx.get('tool_name')}.")
    assert default_composite().as_collator_hook()("own_error", {"tool_name": "f"}) == "Mind f."


def test_a_routed_inner_generator_needs_no_name():
    class Inner:
        def generate(self, kind, meta):
            return f"{kind}!"

    routed = RoutingHintGenerator(Inner(), route=is_tool_runtime_kind)
    assert [routed.generate(kind, {}) for kind in ("type_error", "style")] == ["type_error!", None]
