"""The command `laconic`. Data goes to stdout, the rest to stderr, and an error is one line that says what to do.

The library brings `schemes` and `doctor`. Other distributions add commands through the entry-point group
`laconic.commands`: each entry is a function `add(commands, parse)` that adds parsers to argparse's `commands`, and may
call `parse(words)` to read the words of another command. The lab, laconic-lab, adds its commands so.
"""

from laconic.cli.console import as_worker, is_worker, number, say, table, to_json
from laconic.cli.main import Commands, Parse, all_commands, main, run
