"Recorded episodes of coding agents, in their own formats."
import json


def trajectory(steps):
    "A mini-swe-agent trajectory of (command, code, output)."
    messages = [{"role": "system", "content": "Use the shell."}, {"role": "user", "content": "Mend it."}]
    for number, (command, code, output) in enumerate(steps):
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        answer = f"<returncode>{code}</returncode>\n<output>\n{output}</output>"
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": f"c{number}", "content": answer}]
    return {"info": {"exit_status": "Submitted", "submission": ""}, "messages": messages}


def claude_code(steps):
    "Lines of a session, of (tool, input, result, failed)."
    lines, before = [], None

    def say(role, content):
        nonlocal before
        model = {"id": f"m{len(lines)}", "model": "claude-sonnet-4-5"} if role == "assistant" else {}
        lines.append({"parentUuid": before, "isSidechain": False, "cwd": "/w", "sessionId": "s", "version": "2.0.14",
                      "type": role, "uuid": f"u{len(lines)}", "message": {"role": role, "content": content} | model})
        before = f"u{len(lines) - 1}"

    say("user", "Mend it.")
    for number, (name, given, result, failed) in enumerate(steps):
        say("assistant", [{"type": "tool_use", "id": f"t{number}", "name": name, "input": given}])
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": result} | ({"is_error": True} if failed else {})
        say("user", [result])
    say("assistant", [{"type": "text", "text": "Done."}])
    return lines


def codex(steps):
    "Lines of a rollout, of (tool, arguments, result, failed)."
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it."}]}]
    for number, (name, given, result, _) in enumerate(steps):
        own = isinstance(given, str)
        form = {"type": "custom_tool_call", "input": given} if own else {"type": "function_call", "arguments": json.dumps(given)}
        items.append({"call_id": f"c{number}", "name": name} | form)
        items.append({"type": f"{form['type']}_output", "call_id": f"c{number}", "output": result})
    items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]})
    meta = {"timestamp": "t", "type": "session_meta", "payload": {"id": "s", "cwd": "/w", "cli_version": "0.98.0"}}
    return [meta, *({"timestamp": "t", "type": "response_item", "payload": item} for item in items)]


def openhands(steps):
    "Events, of (tool, action, result, exit code)."
    events = [{"id": "e", "source": "user", "kind": "MessageEvent",
               "llm_message": {"role": "user", "content": [{"type": "text", "text": "Mend it."}]}}]
    for number, (name, given, result, code) in enumerate(steps):
        named = {"tool_name": name, "tool_call_id": f"c{number}"}
        acts = {"id": f"a{number}", "source": "agent", "kind": "ActionEvent", "thought": []}
        sees = {"id": f"o{number}", "source": "environment", "kind": "ObservationEvent"}
        seen = {"kind": "Observation", "content": [{"type": "text", "text": result}], "exit_code": code, "is_error": bool(code)}
        events += [acts | named | {"action": {"kind": "Action"} | given}, sees | named | {"observation": seen}]
    events.append({"id": "z", "source": "agent", "kind": "MessageEvent",
                   "llm_message": {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}})
    return events
