"""The page of a comparison: what was run, the table, the figures, how to read them."""

from __future__ import annotations

from pathlib import Path

from laconic.errors import TaskError
from laconic.measure import records
from laconic.measure.measures import MEASURES
from laconic.measure.report.facts import Facts, Setting, read_facts
from laconic.measure.report.figures import link_use, over_bytes, over_time, step_split
from laconic.measure.report.fits import fits_page
from laconic.measure.report.inspected import holds_inspection
from laconic.measure.report.markup import frame
from laconic.measure.report.sweep import over_links
from laconic.measure.report.table import other_figures, table
from laconic.measure.report.unions import holds_unions, unions_page

_NOTES = (
    "Time is training time; evaluation is taken off the clock.",
    "Speed-up is by training time to the target, never by ratio; what did not reach it has none.",
    "Step times are medians, with the quartiles below them. Bytes are per worker and step.",
    "Ratio is what a float32 all-reduce of the same gradients would have sent, over what was sent.",
    "Bold marks the best of a column; a scheme that sends nothing is a bound on speed and does not compete.",
)
_INTERFACE_NOTE = "The interface sees more bytes than laconic counts, by TCP/IP headers and acknowledgements."
_LAB_NOTE = "The lab limits the rate of each link and adds no propagation delay, which would slow every exchange."
_DELAY_NOTE = "A link's delay, jitter and loss are those between two hosts, one way."
_SWEEP_NOTE = "Against link speed, speed-up is that of a step, not of the time to a target."


def write_report(folder: Path) -> Path:
    """Write folder/report.html from the records in the folder; the same records give the same bytes."""
    if not (folder / records.RECORDS).is_file():
        raise TaskError(f"{folder} has no {records.RECORDS}; give a folder that `laconic compare --out` wrote")
    path = folder / "report.html"
    try:
        page = _page_of(folder)
        path.write_bytes(page.encode("utf-8", "replace"))  # a lone surrogate in a name becomes ?
    except TaskError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise TaskError(f"{path} cannot be made from the records ({why}); run `laconic compare` again") from error
    return path


def _page_of(folder: Path) -> str:
    if holds_inspection(folder):
        return fits_page(folder)
    return unions_page(folder) if holds_unions(folder) else _page(read_facts(folder))


def _page(facts: Facts) -> str:
    count = len(facts.schemes)
    title = f"{facts.setting.task}: {count} scheme{'s' * (count != 1)} compared"
    notes = [*_NOTES] if facts.rows else []
    if facts.setting.hosts is not None:
        notes += [_INTERFACE_NOTE] if facts.rows else []
        links = [facts.setting.link or "", *facts.setting.link_of.values(), *(point.link for point in facts.sweep)]
        notes += [_DELAY_NOTE if any("delay=" in link for link in links) else _LAB_NOTE]
    notes += [f"Under {figure.head}: {figure.meaning}." for figure in other_figures(facts.rows)]
    notes += [_SWEEP_NOTE] if facts.sweep else []
    body = f"""{table(facts) if facts.rows else ""}
<section class="figures">
{_figures(facts)}
</section>"""
    return frame(title, _sentence(facts.setting), body, notes)


def _figures(facts: Facts) -> str:
    draw = [over_time, over_bytes, step_split] if facts.rows else []
    draw += [link_use] if any(row.figures["link_use"] is not None for row in facts.rows) else []
    draw += [over_links] if facts.sweep else []
    return "\n".join(one(facts) for one in draw)


def _sentence(setting: Setting) -> str:
    """What was run, in one sentence."""
    model = f" {setting.model}" if setting.model else ""
    where = "one machine"
    if setting.hosts is not None:
        links = [f"{'unshaped' if setting.link == 'none' else setting.link} links"] if setting.link else []
        links += [f"host {host} on {link}" for host, link in setting.link_of.items()]
        where = f"{setting.hosts} host{'s' * (setting.hosts != 1)} of the lab" + f" ({', '.join(links)})" * bool(links)
    how = [f"{setting.steps} step{'s' * (setting.steps != 1)}"] if setting.steps else []
    how += [f"{setting.batch} examples per worker and step"] if setting.batch else []
    how += [f"{setting.rounds} round{'s' * (setting.rounds != 1)}", f"seed {setting.seed}"]
    measure = MEASURES[setting.measure]
    how += [f"target {measure.noun} {measure.brief(setting.target)}"] if setting.target is not None else []
    workers = f"{setting.workers} worker{'s' * (setting.workers != 1)}"
    return f"{setting.task}{model}, trained by {workers} on {where}: {', '.join(how)}."
