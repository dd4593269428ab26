"""The commands that the lab adds to `laconic`."""

from laconic.cli import Commands, Parse
from laconic_lab.cli import bench, chaos, compare, demo, doctor, inspect, lab, plan, report, train


def add_commands(commands: Commands, parse: Parse) -> None:
    """Add all of them; `laconic.cli` calls this through the entry point."""
    for module in (train, compare, plan, report, inspect, lab, bench, chaos):
        module.add_parser(commands)
    demo.add_parser(commands, parse)
    doctor.extend(commands.choices["doctor"])
