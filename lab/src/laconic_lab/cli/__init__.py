"""The commands that the lab adds to `laconic`."""

from laconic.cli import Commands, Parse
from laconic_lab.cli import bench, chaos, compare, demo, inspect, jobs, lab, plan, train


def add_commands(commands: Commands, parse: Parse) -> None:
    """Add all of them; `laconic.cli` calls this through the entry point."""
    for module in (train, compare, plan, inspect, lab, bench, chaos, demo):
        module.add_parser(commands)
    compare.add_report_parser(commands)
    jobs.extend_doctor(commands.choices["doctor"])
