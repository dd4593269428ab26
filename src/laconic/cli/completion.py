"""laconic completion: what bash and zsh complete after `laconic`, from the parser itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from laconic.recipes import RECIPES

_SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X compinit bashcompinit && compinit && bashcompinit
_laconic() {{
  local words=
  case "${{COMP_WORDS[COMP_CWORD-1]}},${{COMP_WORDS[1]}}" in
    laconic,*) words="{commands}" ;;
    --scheme,*) words="{recipes}" ;;
{options}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _laconic laconic
"""


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], all_commands: Callable[[], argparse.ArgumentParser]
) -> None:
    """Add `laconic completion`."""
    parser = commands.add_parser(
        "completion",
        help="print what lets bash or zsh complete commands, options and recipes",
        epilog='add to ~/.bashrc or ~/.zshrc:  eval "$(laconic completion)"',
    )
    parser.set_defaults(run=lambda _: print(script_of(all_commands())) or 0)


def script_of(parser: argparse.ArgumentParser) -> str:
    """The functions that bash and zsh run to complete a line of this parser."""
    commands = subcommands(parser)
    options = "\n".join(f'    *,{name}) words="{" ".join(words_of(command))}" ;;' for name, command in commands.items())
    return _SCRIPT.format(commands=" ".join(commands), recipes=" ".join(RECIPES), options=options)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands that stand below this one."""
    below = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: command for action in below for name, command in action.choices.items()}


def words_of(parser: argparse.ArgumentParser) -> list[str]:
    """The commands below this one, and the long options of all of them."""
    parsers = subcommands(parser)
    options = [name for each in (parser, *parsers.values()) for name in each._option_string_actions]
    return [*parsers, *sorted({name for name in options if name.startswith("--")})]
