"""The page of a comparison: its text, and what a real browser makes of it."""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from laconic_lab import figures as declared
from laconic_lab.cli import compare
from laconic_lab.errors import TaskError
from laconic_lab.report import write_report

PHASES = ("compute", "select", "encode", "exchange", "decode")
HOSTILE = "</table><script>alert('1')</script>\"&<b>"
SETTING: dict[str, Any] = {
    "kind": "comparison", "target": 0.873, "task": "fashion-mnist", "model": None, "workers": 4, "hosts": 4,
    "link": "100mbit", "link_of": {"3": "50mbit"}, "slow_of": {"2": 4.0}, "steps": 300, "batch": 32, "seed": 0,
    "rounds": 2,
}  # fmt: skip
# scheme, accuracy, seconds to target, step ms, bytes, interface bytes, link use, ratio, speed-ups
FIGURES: list[tuple[Any, ...]] = [
    ("dense", 0.8912, 143.27, 686.04, 7_234_560, 7_379_251, 0.9312, 1.0, 1.0, 0.52),
    ("bf16", 0.8899, 74.61, 367.18, 3_617_280, 3_693_242, 0.9057, 2.0, 1.92, 1.0),
    ("topk:rho=0.01", 0.8864, 15.83, 61.27, 113_844, 118_056, 0.7128, 63.548, 9.051, 4.713),
    ("torch-powersgd:rank=2", 0.8713, None, 100.49, 230_400, 241_920, 0.6233, 31.4, None, None),
    ("silent", 0.7951, None, 58.33, 0, 812, None, None, None, None),
]
SHOWN = [  # the same as a reader sees it; -, where there is nothing
    ["dense", "89.12 %", "143.3", "686.0 685.0 to 688.0", "7,234,560", "7,379,251 +2.0 %", "7,234,560",
     "7,379,251 +2.0 %", "1.0x", "1.00x", "0.52x", "93.12 %"],
    ["bf16", "88.99 %", "74.6", "367.2 366.2 to 369.2", "3,617,280", "3,693,242 +2.1 %", "3,617,280",
     "3,693,242 +2.1 %", "2.0x", "1.92x", "1.00x", "90.57 %"],
    ["topk:rho=0.01", "88.64 %", "15.8", "61.3 60.3 to 63.3", "113,844", "118,056 +3.7 %", "113,844",
     "118,056 +3.7 %", "63.5x", "9.05x", "4.71x", "71.28 %"],
    ["torch-powersgd:rank=2", "87.13 %", "-", "100.5 99.5 to 102.5", "230,400", "241,920 +5.0 %", "230,400",
     "241,920 +5.0 %", "31.4x", "-", "-", "62.33 %"],
    ["silent", "79.51 %", "-", "58.3 57.3 to 60.3", "0", "812 -", "0", "812 -", "-", "-", "-", "-"],
]  # fmt: skip
BEST = ["89.12 %", "15.8", "61.3", "113,844", "118,056", "113,844", "118,056", "63.5x", "9.05x", "4.71x"]


def _row(scheme: str, number: int, figures: tuple[Any, ...]) -> dict[str, Any]:
    accuracy, seconds, step_ms, sent, seen, use, ratio, dense, bf16 = figures
    split = dict(
        zip(PHASES, (0.6 * step_ms, 0.1 * step_ms, 0.1 * step_ms, 0.15 * step_ms, 0.05 * step_ms), strict=True)
    )
    return {
        "kind": "row", "scheme": scheme, "folder": f"run-{number}", "accuracy": accuracy, "seconds_to_target": seconds,
        "step_ms": step_ms, "step_ms_quartiles": [step_ms - 1, step_ms + 2], "split_ms": split,
        "bytes_out": sent, "bytes_in": sent, "link_bytes_out": seen, "link_bytes_in": seen, "link_use": use,
        "ratio": ratio, "speedup": dense, "speedup_bf16": bf16,
    }  # fmt: skip


def _evals(row: dict[str, Any], which: int) -> list[dict[str, Any]]:
    return [
        {
            "kind": "eval", "step": step, "seconds": step * row["step_ms"] / 1000 * (1 + 0.1 * which), "loss": 1.0,
            "accuracy": round(row["accuracy"] * step / (step + 20) + 0.001 * which, 4),
            "bytes_out": step * row["bytes_out"],
        }
        for step in range(0, 301, 50)
    ]  # fmt: skip


def _write(folder: Path, facts: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))


def make(folder: Path, *, rename: dict[str, str] | None = None, rows: bool = True, **instead: Any) -> Path:
    """A comparison's folder; `instead` replaces what was run."""
    setting = {**SETTING, **instead}
    facts = [setting]
    for number, (scheme, *figures) in enumerate(FIGURES if rows else []):
        row = _row((rename or {}).get(scheme, scheme), number, tuple(figures))
        if setting["hosts"] is None:
            row.update(link_bytes_out=None, link_bytes_in=None, link_use=None)
        facts.append(row)
        for which in range(setting["rounds"]):
            _write(folder / row["folder"] / f"round-{which + 1}", [{"kind": "job"}, *_evals(row, which)])
    _write(folder, facts)
    return folder


class _Reader(HTMLParser):
    """What a page holds: its tables as rows of texts, its bold cells, its drawings, its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.bold: list[str] = []
        self.drawings: list[int] = []  # elements in each
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if "svg" in self._open:
            self.drawings[-1] += 1
        elif tag == "svg":
            self.drawings.append(0)
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "strong":
            self.bold.append("")
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "small" in self._open:
            data = f" {data}"
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data
        if "strong" in self._open:
            self.bold[-1] += data


def _page(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("comparison"))


def test_the_table_holds_every_number(folder: Path) -> None:
    read = _Reader(_page(folder))
    assert read.tables[0][2:] == SHOWN
    assert sorted(read.bold) == sorted(BEST)
    assert "topk:rho=0.01 reached 87.3\N{NO-BREAK SPACE}% 4.7x sooner than bf16, sending 32x fewer bytes." in read.text
    for said in (
        "4 workers",
        "4 hosts",
        "100mbit links",
        "host 3 on 50mbit",
        "300 steps",
        "2 rounds",
        "seed 0",
        "87.3\xa0%",
    ):
        assert said in read.text
    for said in ("evaluation is taken off", "never by ratio", "headers and acknowledgements", "no propagation delay"):
        assert said in read.text
    assert "sent nothing: silent" in read.text


def test_every_figure_has_its_numbers_behind_it(folder: Path) -> None:
    _check_numbers(_Reader(_page(folder)))


def _check_numbers(read: _Reader) -> None:
    """Each number of the records stands in the table behind its figure."""
    _, seconds, sent, split, use = read.tables
    rows = [_row(scheme, number, tuple(figures)) for number, (scheme, *figures) in enumerate(FIGURES)]
    evals = [(row["scheme"], which, e) for row in rows for which in (0, 1) for e in _evals(row, which)]
    for table, name, form in ((seconds, "seconds", ".2f"), (sent, "bytes_out", ",.0f")):
        want = [
            [s, str(w + 1), str(e["step"]), f"{e[name]:{form}}", f"{100 * e['accuracy']:.2f} %"] for s, w, e in evals
        ]
        assert table[1:] == want
    assert split[1:] == [
        [row["scheme"], *(f"{ms:.2f}" for ms in row["split_ms"].values()), f"{row['step_ms']:.2f}"] for row in rows
    ]
    assert use[1:] == [[row["scheme"], f"{100 * row['link_use']:.2f} %"] for row in rows if row["link_use"]]


def test_it_needs_nothing_from_outside_and_runs_nothing(folder: Path) -> None:
    page = _page(folder)
    assert "://" not in page and "url(" not in page and "@import" not in page
    for tag, attributes in _Reader(page).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "xlink:href", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)


def test_the_same_records_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert _page(folder) == _page(folder) == _page(make(tmp_path / "elsewhere"))


def test_names_from_the_records_stay_texts(tmp_path: Path) -> None:
    hostile = make(
        tmp_path, rename={"dense": HOSTILE, "bf16": "a\ud800" * 200}, task=HOSTILE, link_of={HOSTILE: HOSTILE}
    )
    page = _page(hostile)
    assert "<script" not in page and "<b>" not in page
    read = _Reader(page)
    assert read.tables[0][2][0] == HOSTILE
    assert read.text.count(HOSTILE) > 10


def test_outside_a_lab_the_interface_is_not_spoken_of(tmp_path: Path) -> None:
    read = _Reader(_page(make(tmp_path, hosts=None, link=None, link_of={}, slow_of={}, target=None, rounds=1)))
    assert "one machine" in read.text and "lab" not in read.text.split() and "interface" not in read.text
    lab = (5, 7, 11)
    assert read.tables[0][2:] == [[cell for i, cell in enumerate(row) if i not in lab] for row in SHOWN]
    assert len(read.tables) == 4


def test_what_diverged_is_marked_and_does_not_compete(tmp_path: Path) -> None:
    made = make(tmp_path, hosts=1, workers=1)
    _break(made, '"accuracy": 0.8912', '"diverged_at": 7, "accuracy": 0.8912')
    read = _Reader(_page(made))
    assert read.tables[0][2][0] == "dense diverged at step 7"
    assert "89.12 %" not in read.bold and "88.99 %" in read.bold
    assert "1 worker on 1 host of the lab" in read.text


def test_figures_that_some_schemes_have_are_shown_and_explained(tmp_path: Path) -> None:
    made = make(tmp_path)
    _break(
        made,
        '"accuracy": 0.8912',
        '"union": 1.974, "worst_accuracy": 0.7, "consensus_distance": 0.02, "accuracy": 0.8912',
    )
    read = _Reader(_page(made))
    assert read.tables[0][2][len(SHOWN[0]) :] == ["1.97", "70.00 %", "2.00 %"]
    assert read.tables[0][3][len(SHOWN[0]) :] == ["-", "-", "-"]
    assert "Under |U|/k: |U|/k at a server" in read.text and "servers out" not in read.text


def test_a_comparison_by_loss_is_drawn_by_loss(tmp_path: Path) -> None:
    made = make(tmp_path, measure="loss", target=1.5, task="chars")
    _break(made, '"accuracy": 0.8912', '"loss": 1.4712, "accuracy": 0.8912')
    _break(made, '"accuracy": 0.8899', '"loss": 1.6, "accuracy": 0.8899')
    read = _Reader(_page(made))
    assert read.tables[0][0][1:3] == ["validation loss", "s to 1.5"] and read.tables[0][2][1] == "1.4712"
    assert "1.4712" in read.bold and "Validation loss against training time" in read.text
    assert "target validation loss 1.5" in read.text and "accuracy" not in read.text


def test_figures_are_declared_once_and_keep_their_names() -> None:
    """Records of earlier runs have these keys."""
    assert [figure.name for figure in declared.FIGURES] == [
        *("link_bytes_out", "link_bytes_in", "link_use", "mean_step_ms", "waited_s"),
        *("tokens_per_s", "peak_memory_bytes", "seconds_slowest"),
        *("worst_accuracy", "worst_loss", "consensus_distance"),
        *("union", "oldest_residual", "never_sent"),
        *("server_bytes_out", "server_link_bytes_out", "server_held_bytes"),
    ]
    rounds = [{"union": 2.0, "worst_accuracy": 0.5 + 0.1 * i, "server_bytes_out": 80} for i in (1, 2)]
    found = declared.of_rounds(rounds, steps=8)
    assert set(found) == {
        *("link_bytes_out", "link_bytes_in", "tokens_per_s", "peak_memory_bytes", "worst_accuracy", "worst_loss"),
        *("consensus_distance", "union", "server_bytes_out", "mean_step_ms", "waited_s"),
    }
    assert found["worst_accuracy"] == pytest.approx(0.65) and found["server_bytes_out"] == 10
    assert declared.of_rounds([{**one, "server_link_bytes_out": 88} for one in rounds], 8)["server_bytes_out"] == 11


def test_the_command_prints_where_the_page_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    compare.add_report_parser(parser.add_subparsers())
    asked = parser.parse_args(["report", str(folder)])
    assert asked.run(asked) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"


def _break(folder: Path, old: str, new: str) -> None:
    path = folder / "records.jsonl"
    path.write_text(path.read_text().replace(old, new))


def test_what_is_missing_or_broken_is_said_in_one_line(tmp_path: Path) -> None:
    def refused(folder: Path, why: str) -> None:
        with pytest.raises(TaskError, match=why) as caught:
            write_report(folder)
        assert "\n" not in str(caught.value)
        assert not (folder / "report.html").exists()

    refused(tmp_path / "nowhere", "nowhere has no records.jsonl.*laconic compare --out")
    _write(tmp_path / "train", [{"kind": "job"}])
    refused(tmp_path / "train", "train holds one run of `laconic train`; give a folder that `laconic compare --out`")
    refused(make(tmp_path / "none", rows=False), "holds no row")
    for name, old, new, why in (
        ("cut", '"kind": "row"', '"kind": "ro', "is not JSON"),
        ("lacking", '"step_ms": 686.04', '"a": 1', "a row lacks step_ms"),
        ("word", '"accuracy": 0.8912', '"accuracy": "good"', "cannot be made from the records"),
        ("list", '{"kind": "comparison"', '[]\n{"kind": "comparison"', "cannot be made from the records"),
        ("rounds", '"rounds": 2', '"rounds": 3', "round-3 has no records.jsonl"),
    ):
        broken = make(tmp_path / name)
        _break(broken, old, new)
        refused(broken, why)
    empty = make(tmp_path / "empty")
    _write(empty / "run-0" / "round-2", [{"kind": "job"}])
    refused(empty, "no evaluation")


def _plan_row(scheme: str, step_ms: float, factor: float | None) -> dict[str, Any]:
    return {
        "scheme": scheme, "step_ms": step_ms, "bytes_out": 2_400_000, "memory_bytes": 4_800_000, "waits_ms": 7.25,
        "steps_factor": factor, "steps_range": None if factor is None else [0.97, None],
        "steps_source": "" if factor is None else "a record", "seconds_to_target": factor and step_ms * factor,
        "tried": scheme == "bf16",
    }  # fmt: skip


def make_plan(folder: Path, **instead: Any) -> Path:
    """A plan's folder: of eleven schemes, one of which nobody would take."""
    names = ["streaming:every=64", "bf16", HOSTILE, *(f"topk:rho=0.0{i}" for i in range(1, 8)), "silent"]
    rows = [_plan_row(name, 40.0 + i, None if name == "silent" else 1.0 + i / 10) for i, name in enumerate(names)]
    rates = [10 ** (6 + place / 4) for place in range(21)]
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "pick": "streaming:every=64", "limit": "link", "line": 'laconic.follow(model, optimizer, "streaming:every=64")',
        "reasons": ["the network is 98 % of a step under bf16"], "workers": 4, "steps": 1000, "seconds": 21.4,
        "bits_per_s": 94.1e6, "rows": rows, "what_if": {"16 workers": {"pick": "bf16"}},
        "curves": {row["scheme"]: [[rate, row["step_ms"] + 2e9 / rate] for rate in rates] for row in rows},
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps({**plan, **instead}))
    return folder


def test_a_plans_page_holds_its_answer_rows_and_picture(tmp_path: Path) -> None:
    page = _page(make_plan(tmp_path))
    read = _Reader(page)
    assert 'laconic.follow(model, optimizer, "streaming:every=64")' in read.text
    for said in ("98 % of a step", "4 workers", "94.1mbit", "limits: link", "with 16 workers it would be bf16"):
        assert said in read.text
    rows, numbers = read.tables
    assert [row[0] for row in rows[1:]] == [
        row["scheme"] for row in json.loads((tmp_path / "plan.json").read_text())["rows"]
    ]
    assert rows[2] == ["bf16", "41.0", "7.2", "2.400", "4.8", "1.10 (0.97 to inf)", "45", "a record"]
    assert rows[-1][1] == "50.0*" and rows[-1][5:] == ["-", "-", "-"]
    assert read.bold == ["streaming:every=64", "40.0*"]
    assert numbers[0][:3] == ["link", "streaming:every=64", "bf16"] and len(numbers[0]) == 1 + 5
    assert len(numbers) == 1 + 21 and numbers[1][:2] == ["1mbit", "2,040.0"]
    assert page.count("soonest to a target: ") == 1 and "which scheme reaches a target first: " in read.text
    assert len(read.drawings) == 1 and "yours: 94.1mbit" in page and "<script" not in page


def test_a_plan_that_is_broken_is_said_in_one_line(tmp_path: Path) -> None:
    folder = make_plan(tmp_path, rows=[])
    with pytest.raises(TaskError, match="cannot be made from the records"):
        write_report(folder)
    (folder / "plan.json").write_text('{"pick": ')
    with pytest.raises(TaskError, match="cannot be made from the records"):
        write_report(folder)


# In a real browser.

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium runs it")
QUIET = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
        "--hide-scrollbars",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--enable-logging=stderr", "--v=0", "--dump-dom"),
]
# Puts the page into a frame of some width and writes down how wide things came out there. A table may reach out of
# its own box, which scrolls; no text of a drawing may reach out of the page or lie on another.
MEASURE = """<!doctype html><pre id="found"></pre><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const box = (element) => element.getBoundingClientRect();
  const outside = (element) => box(element).left < 0 || box(element).right > page.documentElement.clientWidth;
  const size = (text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
  const meet = (a, b) => box(a).left < box(b).right && box(b).left < box(a).right
    && box(a).top + 3 < box(b).bottom && box(b).top + 3 < box(a).bottom;
  const pairs = [...page.querySelectorAll("svg")].flatMap((svg) => {
    const texts = [...svg.querySelectorAll("text")];
    const on = (a, i) => texts.slice(i + 1).filter((b) => meet(a, b)).map((b) => [a.textContent, b.textContent]);
    return texts.flatMap(on);
  });
  document.querySelector("#found").textContent = JSON.stringify({
    window: page.documentElement.clientWidth,
    page: Math.max(page.documentElement.scrollWidth, page.body.scrollWidth),
    drawings: [...page.querySelectorAll("svg")].map((svg) => [box(svg).width, box(svg).height]),
    outside: [...page.querySelectorAll("svg text")].filter(outside).map((text) => text.textContent),
    smallest: Math.min(...[...page.querySelectorAll("svg text")].map(size)),
    pairs,
  });
};
</script><iframe style="border:0;width:WIDTHpx;height:2000px" srcdoc="PAGE"></iframe>"""


def _browse(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The page after loading, and what the browser said on its console."""
    assert CHROMIUM is not None
    ran = subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={profile}", path.as_uri()],
        capture_output=True, text=True, timeout=300, check=True, encoding="utf-8",
    )  # fmt: skip
    return ran.stdout, [line for line in ran.stderr.splitlines() if "CONSOLE" in line]


@in_a_browser
def test_a_browser_draws_it_without_complaint(folder: Path, tmp_path: Path) -> None:
    dumped, console = _browse(write_report(folder), tmp_path)
    assert console == []
    read = _Reader(dumped)
    assert read.tables[0][2:] == SHOWN
    _check_numbers(read)
    assert len(read.drawings) == 5 and min(read.drawings) > 15
    faulty = tmp_path / "faulty.html"
    faulty.write_text('<svg><path d="M NaN"/></svg>')
    assert _browse(faulty, tmp_path)[1], "the browser does not tell of faults, so its silence means nothing"


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("is_plan", [False, True])
def test_it_fits_a_phone_and_a_desk(folder: Path, tmp_path: Path, width: int, is_plan: bool) -> None:
    page = html.escape(_page(make_plan(tmp_path / "plan") if is_plan else folder))
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(MEASURE.replace("WIDTH", str(width)).replace("PAGE", page), encoding="utf-8")
    dumped, console = _browse(wrapper, tmp_path / "profile")
    found_text = re.search(r'<pre id="found">(.*?)</pre>', dumped)
    assert found_text is not None and console == []
    found = json.loads(html.unescape(found_text[1]))
    assert found["page"] <= found["window"] <= width
    assert found["outside"] == []
    assert all(wide > 0 and high > 0 for wide, high in found["drawings"])
    assert found["pairs"] == []
    assert found["smallest"] > 9  # px; below it a reader has to zoom
