"""The documentation as a site: it builds without a warning, links lead somewhere, a browser has no complaint."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

import laconic

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="no mkdocs here; `make docs` installs it"
)
WIDTHS = (400, 1280)  # pixels, of a phone and of a screen
# All pages in frames of these widths: a page may not be wider than its frame, and its scripts must have run.
BROWSE = """<!doctype html><pre id="found"></pre><script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument.documentElement;
    const wider = page.scrollWidth - page.clientWidth;
    return [frame.getAttribute("src"), frame.clientWidth, wider, page.classList.contains("js")];
  });
  document.querySelector("#found").textContent = JSON.stringify(found);
};
</script>FRAMES"""


class _Page(HTMLParser):
    """What a page links to and loads, and the names that one may link to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.names: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.names.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag in ("img", "script", "link", "iframe"):
            self.loads |= {given[name] for name in ("src", "href") if name in given}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def test_links_lead_somewhere_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = {path: _Page(path) for path in sorted(site.glob("*.html")) if path.name != "404.html"}
    assert len(pages) > len(list((ROOT / "docs").glob("*.md"))) - 1
    for path, page in pages.items():
        outside = [one for one in page.loads if re.match(r"(https?:)?//", one)]
        assert not outside, f"{path.name} loads {outside}"
        for link in page.links | page.loads:
            if re.match(r"\w+:", link):
                continue
            target, _, name = link.partition("#")
            file = (path.parent / (target or path.name)).resolve()
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{path.name} links to {link}"
            assert file not in pages or name in pages[file].names, f"{path.name} links to {link}"


def test_every_public_name_and_command_is_listed(site: Path) -> None:
    names = _Page(site / "reference.html").names
    rooms = {name for name in laconic.__all__ if isinstance(getattr(laconic, name), ModuleType)}
    assert {name.lower() for name in laconic.__all__} - rooms <= names
    reference = (site / "reference.html").read_text(encoding="utf-8")
    assert "<li><code>ddp</code>: A DistributedDataParallel" in reference and "<p>Args:" not in reference
    assert {"topk", "randk", "bf16_1", "residual", "allgather", "ramp"} <= _Page(site / "parts.html").names
    text = (site / "commands.html").read_text(encoding="utf-8")
    assert all(said in text for said in ("laconic-train", "laconic-lab-cut", "--link-of", "laconic-bench-step"))


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium runs it")
def test_a_browser_has_no_complaint(site: Path, address: str, tmp_path: Path) -> None:
    pages = [(path.name, width) for path in sorted(site.glob("*.html")) if path.name != "404.html" for width in WIDTHS]
    frame = '<iframe style="border:0;width:{}px;height:900px" src="{}"></iframe>'
    frames = "".join(frame.format(width, name) for name, width in pages)
    wrapper = site / "browse.htm"
    wrapper.write_text(BROWSE.replace("FRAMES", frames), encoding="utf-8")
    assert CHROMIUM is not None
    ran = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage",
         "--enable-logging=stderr", "--v=0", "--dump-dom", f"--window-size={max(WIDTHS)},900",
         f"--user-data-dir={tmp_path}", f"{address}/{wrapper.name}"],
        capture_output=True, text=True, timeout=300, check=True, encoding="utf-8",
    )  # fmt: skip
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    said = re.search(r'<pre id="found">(.+?)</pre>', ran.stdout)
    assert said is not None
    found = json.loads(html.unescape(said[1]))
    assert [(name, width) for name, width, _, _ in found] == pages
    assert [(name, width, wider) for name, width, wider, ran_scripts in found if wider > 0 or not ran_scripts] == []
