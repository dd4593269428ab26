"""The pages: scripts stand in their Markdown, and the rest is put in while mkdocs builds the site.

    python tools/site.py        # writes examples/ into README.md and docs/; tests/tools/test_docs.py checks them

Between `<!-- text of FILE -->` and `<!-- -->` stands a file of examples/, and between `<!-- script of NAME -->` and
`<!-- -->` examples/with_NAME.py as a diff, so that both can be read on a Git host. Where a page says
`<!-- names of laconic.select -->`, `<!-- options of laconic train -->`, `<!-- plot of RECORD -->` or
`<!-- age of RECORD -->` (whether the sources have changed since), mkdocs puts in what docstrings, argparse and records
have, through the hook below.
"""

from __future__ import annotations

import argparse
import ast
import html
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from laconic.cli import all_commands
from results import changed_sources, read_result, with_figures

ROOT = Path(__file__).parents[1]
_LINE = 80
_FIRST = ("attach", "follow", "join", "plan", "serve", "hook", "parse", "Session", "Follower")  # of the reference
_LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml"}
_MADE = re.compile(r"<!-- (names|options|plot|age) of ([\w./ -]+) -->")
_WRITTEN = re.compile(r"<!-- (script|text) of ([\w./-]+) -->.*?<!-- -->", re.S)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as it is built: mkdocs calls this for each."""
    made = {"names": names_of, "options": options_of, "plot": plot_of, "age": age_of}
    markdown = _MADE.sub(lambda mark: made[mark[1]](mark[2]), with_figures(markdown, ROOT / "results"))
    return re.sub(r"^```python\n(.*?)^```$", _with_added_lines, markdown, flags=re.S | re.M)


def _with_added_lines(block: re.Match[str]) -> str:
    """The block, in which lines that say that they are added have the colour of those in a diff."""
    added = [str(number) for number, line in enumerate(block[1].splitlines(), 1) if re.search("# (the )?added", line)]
    return f'```python hl_lines="{" ".join(added)}"\n{block[1]}```' if added else block[0]


def with_scripts(markdown: str) -> str:
    """The page with every script that it marks as examples/ has it today."""
    made = {"script": script_of, "text": text_of}
    return _WRITTEN.sub(lambda mark: f"<!-- {mark[1]} of {mark[2]} -->\n{made[mark[1]](mark[2])}\n<!-- -->", markdown)


def names_of(module_name: str) -> str:
    """Every public name of a module, its signature, its docstring, its fields and methods."""
    module = importlib.import_module(module_name)
    names = sorted(public(module), key=lambda pair: _FIRST.index(pair[0]) if pair[0] in _FIRST else len(_FIRST))
    return "\n".join(_described(name, value) for name, value in names)


def public(module: ModuleType) -> list[tuple[str, Any]]:
    """Classes and functions of ours that a module shows: by __all__, where it has one, else all but what it hides."""
    shown = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    own = (
        module.__name__ if "__path__" not in vars(module) else "laconic."
    )  # a file shows its own, a room what it names
    values = [(name, getattr(module, name)) for name in shown]
    return [
        (name, value)
        for name, value in values
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(own)
    ]


def _described(name: str, value: Any) -> str:
    text = f"### {name}\n\n```text\n{_signature(name, value)}\n```\n\n{_words(value)}\n"
    if not inspect.isclass(value):
        return text
    rows = [f"| `{field}` | {default} | {words} |" for field, default, words in _fields(value)]
    if any(not row.endswith("|  |") for row in rows):
        text += "\n| field | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    kinds = (FunctionType, classmethod, staticmethod, property)
    methods = [(n, m) for n, m in vars(value).items() if isinstance(m, kinds) and not n.startswith("_") and m.__doc__]
    if methods:
        text += (
            "\n**Methods**\n\n"
            + "\n".join(f"- `{n}{_arguments(m)}`: {_words(m).splitlines()[0]}" for n, m in methods)
            + "\n"
        )
    return text


def _words(value: Any) -> str:
    """Its own docstring; indented lines, which are equations, become blocks, and arguments and errors lists."""
    doc = getattr(value, "__doc__", None) or ""
    if inspect.isclass(value) and doc.startswith(f"{value.__name__}("):  # what dataclasses write by themselves
        return ""
    prose, *sections = re.split(r"^(Args|Returns|Raises|Example):\n", inspect.cleandoc(doc), flags=re.M)
    text = "\n".join(line if line.startswith("    ") else _escaped(line) for line in prose.splitlines())
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        text = f"{text.rstrip()}\n\n**{title}**\n\n{_section(title, textwrap.dedent(body).strip())}"
    return text


def _section(title: str, body: str) -> str:
    if title == "Example":
        return f"```python\n{body}\n```"
    if title == "Returns":
        return _escaped(body)
    items = [item.replace("\n", " ") for item in re.sub(r"\n +", " ", body).splitlines()]
    return "\n".join(f"- `{name}`: {_escaped(words)}" for name, _, words in (one.partition(": ") for one in items))


def _escaped(line: str) -> str:
    return re.sub(r"(?<!`)([*_<|])(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", r"\\\1", line)


def _signature(name: str, value: Any) -> str:
    """How it is called; a parameter a line where one line is too long."""
    if _is_plain(value):
        return name
    args = inspect.signature(value)
    text = _short(f"{name}{args}").removesuffix(" -> None")
    if len(text) <= _LINE:
        return text
    parameters = [str(one) for one in args.parameters.values()]
    kinds = [one.kind for one in args.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    lines = "".join(f"    {_short(one)},\n" for one in parameters)
    return f"{name}(\n{lines}){text[text.rindex(')') + 1 :]}"


def _short(text: str) -> str:
    """Types by their last name, and not in quotes; of a default that is too long for a line its class."""
    text = re.sub(
        r"<class '([\w.]+)'>|(?<=: )'([^']*)'|'([A-Z]\w*)'", lambda quoted: quoted[quoted.lastindex or 0], text
    )
    text = re.sub(r"\b(?:[a-z_]\w*\.)+([A-Z]\w*)", r"\1", text)
    return text if len(text) < _LINE - 4 else re.sub(r"(= \w+)\(.+\)$", r"\1(...)", text)


def _is_plain(value: Any) -> bool:
    return inspect.isclass(value) and (issubclass(value, BaseException) or getattr(value, "_is_protocol", False))


def _arguments(method: Any) -> str:
    if isinstance(method, property):
        return ""
    function = getattr(method, "__func__", method)
    return f"({', '.join(p for p in inspect.signature(function).parameters if p not in ('self', 'cls'))})"


def _fields(value: type) -> Iterator[tuple[str, str, str]]:
    """(name, default, the comment beside it) of each field that a class declares."""
    lines = textwrap.dedent(inspect.getsource(value)).splitlines()
    for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            _, _, comment = lines[node.lineno - 1].partition("  # ")
            default = re.sub(r"^field\(default_factory=(\w+)\)", r"\1()", ast.unparse(node.value)) if node.value else ""
            yield node.target.id, f"`{default}`".replace("|", "\\|") if default else "", _escaped(comment)


def options_of(command: str) -> str:
    """The commands below one, or its options, as its parser has them."""
    parser, words = all_commands(), ""
    for word in command.split()[1:]:
        parser, words = {name: (one, help) for name, one, help in _below(parser)}[word]
    if below := "\n".join(f"### {one.prog}\n\n{options_of(one.prog)}" for _, one, _ in _below(parser)):
        return f"{_sentence(words)}\n\n{below}"
    rows = [
        f"| {', '.join(f'`{flag}`' for flag in action.option_strings) or f'`{action.metavar or action.dest}`'} "
        f"| {_escaped(action.help % {'default': action.default, 'prog': parser.prog} if action.help else '')} |"
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS
    ]
    table = "\n".join(["| option | |", "|---|---|", *rows]) if rows else ""
    return f"{_sentence(parser.description or words)}\n\n{table}\n"


def _sentence(words: str) -> str:
    return _escaped(words[:1].upper() + words[1:].rstrip(".") + "." if words else "")


def _below(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """(its name, its parser, its line in the list) of each command below one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = {one.dest: one.help or "" for one in action._choices_actions}
            yield from ((name, one, lines.get(name, "")) for name, one in action.choices.items())


def plot_of(name: str) -> str:
    """Bars of the column that a record says is to be drawn; they have the colour of the text, by day and by night."""
    record = read_result(ROOT / "results" / f"{name}.json")
    column = record["plot"]
    rows = [
        (next(iter(row.values())), row[column]) for row in record["rows"] if isinstance(row.get(column), int | float)
    ]
    longest = max(value for _, value in rows)
    bars = "".join(
        f'<text x="0" y="{40 * i + 14}">{html.escape(str(label))}</text>'
        f'<rect x="0" y="{40 * i + 19}" width="{max(1, 400 * value / longest):.0f}" height="12" opacity="0.5"/>'
        f'<text x="{400 * value / longest + 6:.0f}" y="{40 * i + 30}">{value:.4g}</text>'
        for i, (label, value) in enumerate(rows)
    )
    return (
        f'<figure><svg viewBox="0 0 480 {40 * len(rows)}" width="480" fill="currentColor" font-size="13" role="img" '
        f'aria-label="{html.escape(name)}">{bars}</svg><figcaption>{html.escape(column)}</figcaption></figure>'
    )


def age_of(name: str) -> str:
    """A line where the sources of a record are no longer those that it measured."""
    changed = changed_sources(read_result(ROOT / "results" / f"{name}.json"))
    return f"*Measured before {', '.join(f'`{one}`' for one in changed)} changed.*" if changed else ""


def script_of(name: str) -> str:
    """The docstring of a script, and the script as a diff, in which the statements that name laconic are new."""
    source = (ROOT / "examples" / f"with_{name}.py").read_text()
    module = ast.parse(source)
    lines = source.splitlines()
    new = {number for number, line in enumerate(lines, 1) if "laconic" in line.lower()}
    for node in ast.walk(module):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno in new:
            new |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    begin = (module.body[0].end_lineno or 0) + 1  # after the docstring and an empty line
    shown = [
        f"{'+' if number in new else ' '}{line.removesuffix('  # laconic')}".rstrip()
        for number, line in enumerate(lines, 1)
        if number > begin
    ]
    return "\n".join([ast.get_docstring(module) or "", "", "```diff", *shown, "```"])


def text_of(name: str) -> str:
    """A file of examples/ as it is, without its docstring."""
    path = ROOT / "examples" / name
    text = re.sub(r'\A""".*?"""\n+', "", path.read_text(), flags=re.S)
    return f"```{_LANGUAGES[path.suffix]}\n{text.rstrip()}\n```"


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(with_scripts(page.read_text()))
