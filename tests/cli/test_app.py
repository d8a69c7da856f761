"""Whole commands in processes of their own: output, exit codes, bad input, and the same table twice."""
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from forks import composer

COMMAND = Path(sys.executable).with_name("composer-rl")


@pytest.fixture(scope="module")
def demo():
    from composer_replication.envs.toy.traces import toy_path
    return toy_path()


def rows(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_errors_as_json_lines_name_exactly_what_was_promised(demo):
    found = rows(composer("traces", "errors", demo, "--json"))
    assert len(found) > 50 and all(set(r) == {"trace_id", "message_index", "kind", "evidence_index"} for r in found)
    assert all(r["message_index"] < r["evidence_index"] for r in found)


def test_hints_add_hint_and_layer_to_the_same_sites(demo):
    sites = rows(composer("traces", "errors", demo, "--json"))
    hinted = rows(composer("hints", "list", demo, "--json"))
    assert [{k: r[k] for k in sites[0]} for r in hinted] == sites
    assert set(hinted[0]) == {*sites[0], "action", "error", "hint", "layer"} and any(r["hint"] for r in hinted)


def test_compose_twice_gives_the_same_table_and_a_report(demo, tmp_path):
    first, second = ({k: v for k, v in rows(composer("compose", "--steps", 3, "--json", "--out", tmp_path / str(i)))[0].items()
                      if k != "seconds"} for i in range(2))
    for run in (first, second):
        for step in run["steps"]:
            del step["seconds"]
    assert first == second
    assert [bool(s["sites"]) for s in first["steps"]] == [True, False, True]
    assert all(s["sdpo_jsd"] == 0.0 for s in first["steps"] if not s["sites"])
    assert "<svg" in (tmp_path / "0" / "report.html").read_text()


@pytest.mark.slow
def test_another_seed_takes_other_traces(tmp_path):
    first, second = (rows(composer("compose", "--steps", 1, "--seed", seed, "--json", "--out", tmp_path))[0]["steps"][0]
                     for seed in (0, 1))
    assert first["trace_ids"] != second["trace_ids"]


def test_bad_files_give_a_sentence_each_and_the_rest_goes_on(demo, tmp_path):
    whole = gzip.decompress(demo.read_bytes())
    lines = whole.splitlines(keepends=True)
    bad = {"truncated.jsonl.gz": gzip.compress(whole)[:-2000], "half.jsonl": lines[0] + lines[1][:300],
           "broken.jsonl": lines[0] + b'{"messages": "\xff\xfe"}\n' + lines[1], "foreign.jsonl": b'{"a": 1}\n',
           "empty.jsonl": b""}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    done = composer("traces", "show", *sorted(tmp_path.iterdir()), demo, "--json")
    assert done.returncode == 0
    counts = {Path(r["file"]).name: r["traces"] for r in map(json.loads, done.stdout.splitlines())}
    assert counts["half.jsonl"] == 1 and counts["broken.jsonl"] == 2 and counts["foreign.jsonl"] == 0
    assert counts["toy_traces.jsonl.gz"] == len(lines) and 0 < counts["truncated.jsonl.gz"] < len(lines)
    warnings = done.stderr.splitlines()
    assert len(warnings) == len(bad)
    for name in bad:
        assert any(name in w and w.rstrip().endswith(".") and ";" in w for w in warnings), (name, warnings)
    assert "line 2" in next(w for w in warnings if "half" in w)


def test_strict_stops_at_the_first_problem(demo, tmp_path):
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    done = composer("traces", "errors", tmp_path / "foreign.jsonl", demo, "--json", "--strict")
    assert done.returncode == 1 and done.stdout == "" and "foreign.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments, said", [
    (["compose", "nowhere.jsonl"], "no such file"),
    (["compose", "empty.jsonl"], "no trace could be read"),
    (["compose", "--model", "nowhere"], "neither a folder nor in the hub's cache"),
    (["hints", "list", "--tools", "nowhere.json", "empty.jsonl"], "tools cannot be read"),
])
def test_what_cannot_run_ends_with_one_sentence(arguments, said, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    done = composer(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_reader_who_has_seen_enough_is_no_error(demo):
    done = subprocess.run(["bash", "-c", f"set -o pipefail; '{COMMAND}' hints list '{demo}' --json | head -n 1"],
                          capture_output=True, text=True, timeout=600)
    assert json.loads(done.stdout) and "Traceback" not in done.stderr and "Exception" not in done.stderr


def chat(call_error="Error: no such thing", trace_id="t", calls=1, **more):
    "An OpenAI chat whose last call fails."
    tool_calls = [{"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": {i}}}'}}
                  for i in range(calls)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "fine"} for i in range(calls - 1)]
    return {"trace_id": trace_id, "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": tool_calls}, *results,
        {"role": "tool", "tool_call_id": f"c{calls - 1}", "content": call_error},
        {"role": "assistant", "content": "Done."}], **more}


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize("command", [["traces", "errors"], ["hints", "list"], ["compose", "--steps", "1"]])
def test_text_that_looks_like_markup_is_only_text(command, tmp_path):
    file = write(tmp_path / "x[b].jsonl", chat("Error: no [/usr/x] and [/b] here", trace_id="[/x]"), {"a[/b]": 1})
    done = composer(*command, file, cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "x[b].jsonl" in done.stderr


def test_two_traces_of_one_name_are_told_apart(tmp_path):
    files = [write(tmp_path / folder / "run.jsonl", {k: v for k, v in chat(said).items() if k != "trace_id"})
             for folder, said in (("a", "Error: no such thing"), ("b", "fine"))]
    assert {r["trace_id"] for r in rows(composer("traces", "errors", *files[::-1], "--json"))} == {"run@2"}
    run = rows(composer("compose", *files, "--steps", 2, "--batch-size", 4, "--json", "--out", tmp_path / "o"))[0]
    assert sorted(i for s in run["steps"] for i in s["trace_ids"]) == ["run", "run@2"]


def test_a_pipe_that_must_be_read_twice_is_refused_at_once(tmp_path):
    import os
    os.mkfifo(tmp_path / "pipe")
    done = composer("hints", "list", tmp_path / "pipe")
    assert done.returncode == 1 and "cannot be read twice" in done.stderr


def test_the_report_shows_the_result_that_failed(tmp_path):
    file = write(tmp_path / "t.jsonl", chat("Error: EVIDENCE not found", calls=2))
    assert composer("compose", file, "--steps", 1, "--out", tmp_path / "o").returncode == 0
    page = (tmp_path / "o" / "report.html").read_text()
    assert "EVIDENCE" in page[page.index("The error"):page.index("The hint")]


def test_a_report_that_cannot_be_written_is_found_out_before_the_run(tmp_path):
    (tmp_path / "taken").write_text("")
    done = composer("compose", "--steps", 1, "--out", tmp_path / "taken" / "o")
    assert done.returncode == 1 and "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize("tools", ['[{"name": 1}]', '[{"function": 5}]', '[{"function": {"name": 3}}]', '{"a": 1}'])
def test_tools_without_names_are_refused(tools, tmp_path):
    (tmp_path / "tools.json").write_text(tools)
    done = composer("hints", "list", write(tmp_path / "t.jsonl", chat()), "--tools", tmp_path / "tools.json")
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    assert (done.returncode == 1) is (tools != '{"a": 1}')


def test_tokens_that_the_model_does_not_know_are_told(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from composer_replication.envs.toy.model import embedded_tokenizer
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=1, num_key_value_heads=1)).save_pretrained(tmp_path / "m")
    embedded_tokenizer().save_pretrained(tmp_path / "m")
    done = composer("compose", "--model", tmp_path / "m", "--steps", 1, cwd=tmp_path)
    assert done.returncode == 1 and "vocabulary 64" in done.stderr and "Traceback" not in done.stderr


def test_nothing_read_is_no_success(tmp_path):
    done = composer("traces", "show", write(tmp_path / "t.jsonl", {"a": 1}), "--json")
    assert done.returncode == 1 and "no trace could be read" in done.stderr
