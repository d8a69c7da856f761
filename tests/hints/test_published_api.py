"""The published hint generator's calls, as code written against it makes them."""
import json

import pytest

from composer_replication import hints
from composer_replication.hints import (
    HINT_TEMPLATES,
    CompositeHintGenerator,
    HintContext,
    LLMJudgeHintGenerator,
    RoutingHintGenerator,
    TemplateHintGenerator,
    default_composite,
    dispatch,
    is_tool_runtime_kind,
    register,
    templates,
)
from composer_replication.hints.templates import (
    GENERAL,
    hint_json_decode,
    hint_repeated_failure,
    hint_runtime_error,
    hint_tool_not_found,
    hint_type_error,
)

KINDS = ("tool_not_found", "json_decode", "type_error", "runtime_error", "repeated_failure")
TOOL = {"available_tools": ["read_file", "list_files"], "tool_name": "file_read"}
SCHEMA = {"name": "book", "parameters": {"type": "object", "properties": {"user_id": {"type": "string"}},
                                         "required": ["user_id"]}}


def full(**more):
    return HintContext(error_kind="type_error", error_message="TypeError: book() got an unexpected keyword argument 'user'",
                       available_tools=["book"], tool_name="book", tool_schema=SCHEMA, intent="book a seat", **more)


def test_a_context_with_all_keys_is_a_mapping_of_them():
    context = full()
    assert set(context) == {"error_kind", "error_message", "available_tools", "tool_name", "tool_schema", "intent"}
    assert context.get("tool_name") == context["tool_name"] == "book" and "intent" in context
    assert dict(context)["available_tools"] == ["book"] and json.loads(json.dumps({**context})) == dict(context)


def test_every_key_of_a_context_is_optional():
    assert dict(HintContext()) == {} and len(HintContext(intent="x")) == 1
    assert HintContext(tool_name="x").get("intent") is None and HintContext(tool_name="x").get("intent", "none") == "none"
    with pytest.raises(KeyError):
        HintContext()["tool_name"]
    assert HintContext(tool_name="x") == {"tool_name": "x"} and {"tool_name": "x"} == HintContext(tool_name="x")


@pytest.mark.parametrize("kind", KINDS)
def test_dispatch_gives_text_for_every_kind_with_any_context(kind):
    for context in (None, {}, {"error_message": "no rule knows this"}, TOOL, HintContext(), full()):
        text = dispatch(kind, context)
        assert isinstance(text, str) and text.strip()
        assert dispatch("no_such_kind", context) is TemplateHintGenerator().generate("no_such_kind", context) is None
    assert dispatch(kind) == dispatch(kind, {})


def test_dispatch_reads_a_dict_as_it_reads_ours():
    for kind in KINDS:
        assert dispatch(kind, dict(full())) == dispatch(kind, full())
    assert "`read_file`" in dispatch("tool_not_found", TOOL) and "file_read" not in dispatch("tool_not_found", TOOL)
    assert "`user_id`" in dispatch("type_error", full())


METAS = [None, {}, {"tool_name": "f"}, {"error_message": ""}, {"error": ""}, {"error_message": None}, {"available_tools": []},
         {"tool_name": "f", "tool_schema": {}}, {"intent": "x"}, HintContext(), HintContext(tool_name="f")]


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.fixture
def registry():
    before = dict(HINT_TEMPLATES)
    yield
    HINT_TEMPLATES.clear()
    HINT_TEMPLATES.update(before)


@pytest.mark.usefixtures("registry")
def test_a_registered_function_reads_its_context_as_a_mapping():
    def mine(ctx):
        return f"{ctx['tool_name']} of {len(ctx.get('available_tools', []))}, {ctx.get('seconds')}, {dict(ctx)['error_kind']}"

    assert register("slow", mine) is None and HINT_TEMPLATES["slow"] is mine
    for context in (TOOL | {"seconds": 3}, HintContext.of(TOOL | {"seconds": 3})):
        assert dispatch("slow", context) == "file_read of 2, 3, slow"
    assert TemplateHintGenerator().generate("slow", TOOL) == "file_read of 2, None, slow"


def test_the_templates_are_importable_and_take_any_context():
    shipped = (hint_tool_not_found, hint_json_decode, hint_type_error, hint_runtime_error, hint_repeated_failure)
    for kind, template in zip(KINDS, shipped):
        assert HINT_TEMPLATES[kind] is template is getattr(templates, f"hint_{kind}") is getattr(hints, f"hint_{kind}")
        for context in ({}, TOOL, full()):
            assert template(context) == dispatch(kind, context)


STYLE = "style communic verbose effort concise tone format wordy rambl explanation etiquette clarity".split()
RUNTIME = ("error exception fail decode timeout traceback exit_code nonzero syntax import assertion tool runtime crash "
           "exec").split()


def test_kinds_of_tools_and_programs_are_told_from_style():
    assert all(is_tool_runtime_kind(k) for k in KINDS) and not is_tool_runtime_kind("something_else")
    assert all(is_tool_runtime_kind(f"a_{marker}_b") for marker in RUNTIME)
    assert not any(is_tool_runtime_kind(f"a_{marker}_b") for marker in STYLE)
    assert not any(is_tool_runtime_kind(f"{marker}_error") for marker in STYLE)  # style wins
    assert is_tool_runtime_kind("HTTP_Timeout") and not is_tool_runtime_kind("Verbose_Error")


class Unnamed:
    def __init__(self):
        self.asked = []

    def generate(self, kind, meta):
        self.asked.append((kind, dict(meta)))
        return f"About {kind}."


def test_a_routed_generator_needs_no_name():
    inner = Unnamed()
    routed = RoutingHintGenerator(inner)
    assert routed.generate("runtime_error", TOOL) == "About runtime_error." and routed.generate("style", TOOL) is None
    assert inner.asked == [("runtime_error", TOOL)]
    only_style = RoutingHintGenerator(inner, route=lambda kind: kind == "style")
    assert only_style.generate("style", {}) == "About style." and only_style.generate("runtime_error", {}) is None


def test_a_judge_reads_a_plain_dict_and_is_asked_once(tmp_path):
    prompts = []
    judge = LLMJudgeHintGenerator(lambda prompt: prompts.append(prompt) or "Be brief.", cache_dir=tmp_path)
    meta = {"error_message": "The answer is far too long.", "intent": "I explain everything", "available_tools": ["finish"]}
    assert judge.generate("verbose", meta) == judge.generate("verbose", meta) == "Be brief." and len(prompts) == 1
    shown = ("Kind of error: verbose", *meta["available_tools"], meta["intent"], meta["error_message"])
    assert all(text in prompts[0] for text in shown)
    with pytest.raises(TypeError):
        LLMJudgeHintGenerator(str, tmp_path)  # cache_dir is keyword-only


class Fixed:
    name = "fixed"

    def __init__(self, text):
        self.text = text

    def generate(self, kind, meta):
        return self.text


def test_in_a_composite_the_first_answer_wins():
    assert CompositeHintGenerator([Fixed(None), Unnamed(), Fixed("later")]).generate("odd", TOOL) == "About odd."
    assert CompositeHintGenerator([Fixed(None)]).generate("odd", TOOL) is None
    assert CompositeHintGenerator([]).generate("odd", {}) is None


def test_the_default_composite_takes_keywords_alone():
    with pytest.raises(TypeError):
        default_composite(str)
    composite = default_composite()
    assert composite.generate("tool_not_found", TOOL) == dispatch("tool_not_found", TOOL)
    assert "odd words" in composite.generate("runtime_error", {"error_message": "odd words"})  # no rule knows it: the raw error
    assert composite.generate("style", {"error_message": "too long"}) is None  # no error text, and no judge
    assert composite.generate("", TOOL) is None


def test_the_raw_layer_stays_on_beside_a_judge(tmp_path):
    asked = []
    complete = lambda prompt: asked.append(prompt) or "Be brief."
    composite = default_composite(llm_complete=complete, cache_dir=tmp_path, enable_raw_error=True)
    assert "boom" in composite.generate("http_timeout", {"error_message": "boom"}) and not asked
    assert composite.generate("style", {"error_message": "too long"}) == "Be brief." and len(asked) == 1
    assert "boom" in default_composite(llm_complete=complete).generate("http_crash", {"error": "boom"})
    without = default_composite(llm_complete=complete, enable_raw_error=False)
    assert without.generate("runtime_error", {"error_message": "boom"}) == "Be brief."


def test_the_collator_calls_the_hook_at_every_error_site():
    from composer_replication import CollatorConfig, ComposerDataCollator, ToolCall, Trace, TraceExample, Turn
    from composer_replication.envs.toy.model import embedded_tokenizer
    from composer_replication.traces.error_sites import find_error_sites

    def failing(name):
        return (Turn("assistant", tool_calls=(ToolCall(name, {}, name),)),
                Turn("tool", f"Error: unknown tool {name}", tool_call_id=name, observation=True, failed=True))

    tool = {"type": "function", "function": {"name": "ls", "description": "", "parameters": {"type": "object", "properties": {}}}}
    trace = Trace("t", (Turn("user", "Look."), *failing("cat"), *failing("dir"), Turn("assistant", "No.")), (tool,))
    calls = []

    def hook(kind, meta):
        calls.append((kind, meta.get("tool_name"), dict(meta)["available_tools"]))
        return f"There is only {meta['available_tools'][0]}." if meta["tool_name"] == "cat" else None

    collator = ComposerDataCollator(embedded_tokenizer(), CollatorConfig(hint_generator=hook))
    batch = collator([TraceExample(trace)])
    assert [site.turn for site in find_error_sites(trace)] == [1, 3]
    assert calls == [("tool_not_found", name, ("ls",)) for name in ("cat", "dir")]
    assert batch.sites == 1 and [b.label for b in batch.trees[0].branches] == ["There is only ls."]
    assert collator.excluded == [("t", 3, "no layer had a hint")]


def test_a_layer_of_ones_own_is_made_by_name():
    from composer_replication.core.errors import InputProblem
    from composer_replication.hints import make_layers, register_layer
    from composer_replication.hints.layers import LAYERS

    @register_layer("fixed")
    class Mine(Fixed):
        def __init__(self, complete=None):
            self.text = complete and complete("?")

    try:
        made = make_layers(["template", "raw_error", "fixed", "judge", "sibling"], complete=lambda prompt: "Mine.", siblings=None)
        assert [layer.name for layer in made] == ["template", "raw_error", "fixed", "judge", "sibling"]
        assert CompositeHintGenerator(made).generate("style", {}) == "Mine."
    finally:
        del LAYERS["fixed"]
    with pytest.raises(InputProblem, match="no hint layer 'fixed'; use one of " + ", ".join(sorted(LAYERS))):
        make_layers(["fixed"])


def test_the_package_and_the_root_name_the_same_classes():
    import composer_replication

    for name in hints.__all__:
        if name in composer_replication.__all__:
            assert getattr(composer_replication, name) is getattr(hints, name)
