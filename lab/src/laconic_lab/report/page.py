"""The page of a comparison: what was run, the table, the figures, how to read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from laconic_lab import records
from laconic_lab.compare import Comparison, conclusion
from laconic_lab.errors import LaconicError, TaskError
from laconic_lab.figures import MEASURES
from laconic_lab.report.facts import Facts, Setting, facts_so_far, read_facts
from laconic_lab.report.figures import link_use, over_bytes, over_time, step_split
from laconic_lab.report.inspected import fits_page
from laconic_lab.report.markup import frame, text
from laconic_lab.report.planned import PLAN, plan_page
from laconic_lab.report.table import other_figures, table

REPORT = "report.html"
_REFRESH_S = 3  # while a comparison goes on
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


def write_report(folder: Path) -> Path:
    """Write folder/report.html from the records in the folder; the same records give the same bytes."""
    if (folder / PLAN).is_file():
        return _write(folder, lambda: plan_page(folder / PLAN))
    if not (folder / records.RECORDS).is_file():
        raise TaskError(f"{folder} has no {records.RECORDS}; give a folder that `laconic compare --out` wrote")
    return _write(folder, lambda: _page_of(folder))


def write_report_so_far(
    folder: Path, comparison: Mapping[str, Any], comparison_so_far: Comparison, state: str, *, is_running: bool
) -> Path:
    """Write folder/report.html of a comparison that is not at its end; `state` says where it stands."""
    refresh_s = _REFRESH_S if is_running else None
    return _write(folder, lambda: _page(facts_so_far(folder, comparison, comparison_so_far), state, refresh_s))


def _write(folder: Path, make: Callable[[], str]) -> Path:
    path = folder / REPORT
    try:
        page = make().encode("utf-8", "replace")  # a lone surrogate in a name becomes ?
        half_written = path.with_suffix(".part")  # a browser never loads half a page
        half_written.write_bytes(page)
        half_written.replace(path)
    except TaskError:
        raise
    except (ArithmeticError, AttributeError, LaconicError, LookupError, OSError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise TaskError(f"{path} cannot be made from the records ({why}); run what wrote them again") from error
    return path


def _page_of(folder: Path) -> str:
    is_inspection = next(records.read(folder, "inspection"), None) is not None
    return fits_page(folder) if is_inspection else _page(read_facts(folder))


def _page(facts: Facts, state: str = "", refresh_s: int | None = None) -> str:
    count = len(facts.schemes)
    title = f"{facts.setting.task}: {count} scheme{'s' * (count != 1)} compared{' so far' * bool(state)}"
    notes = [*_NOTES] if facts.rows else []
    if facts.setting.hosts is not None:
        notes += [_INTERFACE_NOTE] if facts.rows else []
        links = [facts.setting.link or "", *facts.setting.link_of.values()]
        notes += [_DELAY_NOTE if any("delay=" in link for link in links) else _LAB_NOTE]
    notes += [f"Under {figure.head}: {figure.meaning}." for figure in other_figures(facts.rows)]
    body = f"""{_answer(facts)}
{table(facts) if facts.rows else ""}
<section class="figures">
{_figures(facts)}
</section>"""
    sentence = f"{state} {_sentence(facts.setting)}" if state else _sentence(facts.setting)
    return frame(title, sentence, body, notes, refresh_s=refresh_s)


def _answer(facts: Facts) -> str:
    """What the comparison comes to, before its numbers."""
    setting = facts.setting
    comparison = Comparison(setting.measure, setting.target, setting.steps or 0, facts.rows)
    sentence = conclusion(comparison, is_timed=setting.hosts is not None)
    rounds = "" if setting.rounds > 1 else " One seed and one round: differences of a few per cent may be chance."
    return f'<p class="answer"><b>{text(sentence)}.</b>{text(rounds)}</p>' if sentence else ""


def _figures(facts: Facts) -> str:
    draw = [over_time, over_bytes, step_split] if facts.rows else []
    draw += [link_use] if any(row.figures["link_use"] is not None for row in facts.rows) else []
    return "\n".join(one(facts) for one in draw)


def _sentence(setting: Setting) -> str:
    """One sentence on what was run."""
    model = f" {setting.model}" if setting.model else ""
    where = "one machine"
    if setting.hosts is not None:
        links = [f"{'unshaped' if setting.link == 'none' else setting.link} links"] if setting.link else []
        links += [f"host {host} on {link}" for host, link in setting.link_of.items()]
        links += [f"host {host} {slowdown:g} times slower" for host, slowdown in setting.slow_of.items()]
        where = f"{setting.hosts} host{'s' * (setting.hosts != 1)} of the lab" + f" ({', '.join(links)})" * bool(links)
    how = [f"{setting.steps} step{'s' * (setting.steps != 1)}"] if setting.steps else []
    how += [f"{setting.batch} examples per worker and step"] if setting.batch else []
    how += [f"{setting.rounds} round{'s' * (setting.rounds != 1)}", f"seed {setting.seed}"]
    measure = MEASURES[setting.measure]
    how += [f"target {measure.noun} {measure.brief(setting.target)}"] if setting.target is not None else []
    workers = f"{setting.workers} worker{'s' * (setting.workers != 1)}"
    return f"{setting.task}{model}, trained by {workers} on {where}: {', '.join(how)}."
