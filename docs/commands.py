"The site's page of commands, made of what `composer-rl --help` says."
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from composer_replication.cli.app import app
from composer_replication.cli.console import EXIT_CODES, ExitCode


def examples(help: str | None) -> list[str]:
    "The command lines at the end of a help, one a paragraph, each in backticks."
    return re.findall(r"^\s*`(composer-rl [^`]+)`$", help or "", re.MULTILINE)


def walk(command, name: str) -> Iterator[tuple[str, object]]:
    "A Typer command and all below it, each with its whole name, in the order of the help."
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from walk(below, f"{name} {word}")


def option_row(option) -> str:
    "A line of the table of arguments and options."
    name = option.opts[0] if option.param_type_name == "option" else option.metavar
    default = ", ".join(option.default) if isinstance(option.default, (list, tuple)) else option.default
    plain = isinstance(default, (int, float, str, Path)) and default is not False
    shown = "required" if option.required else f"`{default}`" if plain else ""
    return f"| `{name}` | {shown} | {option.help.replace('|', chr(92) + '|')} |"


def command_markdown(name: str, command) -> str:
    "What the help of a command says, as Markdown."
    words = command.help.split("Examples:")[0].strip()
    if hasattr(command, "commands"):
        return f"## {name}\n\n{words.removesuffix(EXIT_CODES).strip()}\n"
    arguments, options = ([p for p in command.params if p.param_type_name == kind] for kind in ("argument", "option"))
    named = [p.metavar + ("..." if p.nargs == -1 else "") for p in arguments]
    usage = " ".join([name, *(word if p.required else f"[{word}]" for word, p in zip(named, arguments)), "[OPTIONS]"])
    rows = "\n".join(map(option_row, arguments + options))
    return (f"### {name}\n\n{words}\n\n```text\n{usage}\n```\n\n| option | default | meaning |\n|:--|:--|:--|\n{rows}\n\n"
            "```bash\n" + "\n".join(examples(command.help)) + "\n```\n")


def page() -> str:
    "Every command: usage, options, examples."
    (_, root), *below = walk(typer.main.get_command(app), "composer-rl")
    codes = "".join(f"| {ending.value} | {ending.meaning} |\n" for ending in ExitCode)
    return "\n".join(["# Commands\n", root.help.split(EXIT_CODES)[0], f"## Exit codes\n\n| code | meaning |\n|--:|:--|\n{codes}",
                      *(command_markdown(name, command) for name, command in below)])
