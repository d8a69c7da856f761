"Calls as fenced blocks: around the template of every family, what is rendered is read back, and a rollout keeps its ids."


import time
from importlib import resources

import pytest
from small_tokenizers import REAL
from transformers import AutoTokenizer

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy
from composer_replication.rollout.tool_call_parser import ParsedTurn, TurnReader, read_fenced
from composer_replication.rollout.types import RolloutConfig
from composer_replication.tree.build import build_tree
from composer_replication.tree.chat import TemplateProblem
from composer_replication.tree.controls import MARK
from composer_replication.tree.fenced import LANGUAGES, fence, set_template
from composer_replication.tree.template import probe_template

FENCED = (resources.files("composer_replication") / "data" / "templates" / "fenced.jinja").read_text()



def tool(name, required, **kinds):
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": properties, "required": required}}}


QUERY, RUN, WRITE = tool("query", ["sql"], sql="string"), tool("run", ["command"], command="string"), tool(
    "write", ["path", "text"], path="string", text="string", line="integer")
TOOLS = QUERY, RUN, WRITE
CALLS = [ToolCall("query", {"sql": "SELECT '<|im_end|>', \"é\"\n  FROM t"}), ToolCall("run", {"command": "ls | wc -l"}),
         ToolCall("write", {"path": "a.md", "text": "```\ncode\n```\n", "line": 3}),
         ToolCall("query", {"sql": "a\n```\nb"}), ToolCall("query", {"sql": "{\"not\": \"arguments\"}"})]


def chat_of(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    set_template(tokenizer, FENCED)
    return probe_template(tokenizer)


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_what_a_family_renders_is_read_back(tokenizers, name):
    if name == "phi-4-mini":  # the template in this folder is for tools alone
        with pytest.raises(TemplateProblem):
            chat_of(tokenizers / name)
        return
    chat = chat_of(tokenizers / name)
    reader = TurnReader.of(chat)
    for call in CALLS:
        acted = Turn("assistant", "I look.", tool_calls=(ToolCall(call.name, call.arguments, "call_0"),))
        turns = [Turn("user", "Do it."), acted, Turn("tool", "7 rows", tool_call_id="call_0"),
                 Turn("assistant", "Done.")]
        trace = Trace("t", tuple(turns), tools=TOOLS)
        dialect = chat.dialect(trace)
        messages, count, raw = dialect.messages(turns, [True] * 4)
        text = chat.render(dialect, messages[:2], TOOLS, raw=raw)
        asked = chat.render(dialect, messages[:1], TOOLS, True)
        assert text.startswith(asked) and all(word in asked
                                              for word in ("```sql", "```bash", "```write", "Does write."))
        turn = text[len(asked):].removesuffix(dialect.after).removesuffix(dialect.end).replace(MARK, "")
        read = reader.read(tuple(chat.tokenizer.encode(turn, add_special_tokens=False)), frozenset(), tools=TOOLS)
        assert (read.content.strip(), read.calls) == ("I look.", (call,)), turn
        assert "7 rows" in chat.render(dialect, messages, TOOLS, raw=raw)
        build_tree(trace, chat)


@pytest.mark.parametrize("text, call, content", [
    ("I look.\n```sql\nSELECT 1\n```\nThen I answer.", ToolCall("query", {"sql": "SELECT 1"}), "I look."),
    ("```SQL\nSELECT 1\n```", ToolCall("query", {"sql": "SELECT 1"}), ""),
    ("```query\nSELECT 1\n```", ToolCall("query", {"sql": "SELECT 1"}), ""),
    ("```query\n{\"sql\": \"SELECT 1\"}\n```", ToolCall("query", {"sql": "SELECT 1"}), ""),
    ("```sql\nSELECT 1", ToolCall("query", {"sql": "SELECT 1"}), ""),
    ("```json\n{}\n```\n```bash\nls\n```", ToolCall("run", {"command": "ls"}), "```json\n{}\n```"),
    ("```write\n{\"path\": \n```", ToolCall("write", "{\"path\": "), ""),
    ("```sql\n```", ToolCall("query", {"sql": ""}), ""),
    ("```\nSELECT 1\n```", None, "```\nSELECT 1\n```"),  # of three tools, which?
    ("Use ```sql SELECT 1``` here.", None, "Use ```sql SELECT 1``` here."),
])
def test_the_first_block_of_a_tool_is_the_call(text, call, content):
    read = read_fenced(ParsedTurn(text), TOOLS)
    assert (read.content, read.calls) == (content, (call,) if call else ())


def test_two_tools_of_one_language_stay_two():
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    set_template(tokenizer, FENCED)
    tools = QUERY, tool("explain", ["sql"], sql="string")
    call = {"type": "function", "function": {"name": "explain", "arguments": {"sql": "SELECT 1"}}}
    messages = [{"role": "user", "content": "Do."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(messages, tools=list(tools), tokenize=False)
    acted = text.rpartition("<|assistant|>")[2].removesuffix("<|end|>")
    assert "```explain" in acted and read_fenced(ParsedTurn(acted), tools).calls == (ToolCall("explain", {"sql": "SELECT 1"}),)
    assert read_fenced(ParsedTurn("```sql\nSELECT 1\n```"), tools).calls == (ToolCall("query", {"sql": "SELECT 1"}),)


def test_a_block_with_other_line_ends_is_a_call():
    read = read_fenced(ParsedTurn("I look.\r\n```sql\r\nSELECT 1,\r\n 2\r\n```\r\n"), [QUERY])
    assert read.calls == (ToolCall("query", {"sql": "SELECT 1,\n 2"}),)


@pytest.mark.parametrize("piece", [" ", "\t", "a", "```", "``` \n", "\r", "`", "```sql\n"])
def test_reading_takes_steps_in_proportion_to_the_text(piece):
    def seconds(size):
        text = "```" + piece * size + "x"
        started = time.process_time()
        read_fenced(ParsedTurn(text), TOOLS)
        return time.process_time() - started
    seconds(1000)
    assert seconds(160_000) < 100 * seconds(10_000) + 0.5  # 16 times the text; 256 times where it is quadratic


def test_template_and_reader_know_the_same_languages():
    assert f"languages = {LANGUAGES} " in FENCED


def test_two_required_arguments_or_options_are_json():
    assert [fence(t) for t in (*TOOLS, tool("f", [], sql="string"), tool("g", ["n"], n="integer"))] == [
        ("sql", "sql"), ("bash", "command"), ("write", None), ("f", None), ("g", None)]


def test_a_rollout_acts_by_blocks_and_keeps_its_ids():
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
                               "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    set_template(tokenizer, FENCED)
    said = []

    def generate(rows, sampling, limits, seeds):
        text = ["```sql\nSELECT name FROM sqlite_master\n```", "```SQL\nSELECT 1;\n```\n ", "Done."][len(said)]
        said.append(tokenizer.encode(text + "<|end|>", add_special_tokens=False))
        return [said[-1]] * len(rows), [[-1.0] * len(said[-1])] * len(rows)

    policy = CallablePolicy(generate, tokenizer)
    [rollout] = collect(policy, SqlEnv, sql_rows(1, 0, "test"), RolloutConfig(max_turns=6, max_tokens=4000))
    turns = [turn for turn in rollout.trace.turns if turn.role != "system"]
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    calls = [call.arguments["sql"] for turn in turns for call in turn.tool_calls]
    assert calls == ["SELECT name FROM sqlite_master", "SELECT 1;"]
    sampled = [i for i, mask in zip(rollout.completion_ids, rollout.completion_mask) if mask]
    assert sampled == [i for ids in said for i in ids]
    assert rollout.ending.value == "done"
