"""A server's run on one page and as metrics, over HTTP: who is there, how far it has come, what it costs."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from laconic.errors import LaunchError
from laconic.members.host import MemberServer, address_of

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>laconic members</title><style>
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%}th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}.gone{color:#999}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}div{overflow-x:auto}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}th,td{border-color:#444}}</style>
<h1>Members of a run</h1><dl id="run"></dl><div><table id="members"></table></div><p id="note"></p><script>
const number=v=>typeof v==="number"?v.toLocaleString("en",{maximumSignificantDigits:5}):v;
const columns=["id","address","tokens","rounds","late","residual_norm","share","clipped_norm","loss","seen_s_ago"];
const cell=(tag,text,to)=>{const e=document.createElement(tag);e.textContent=text??"-";to.append(e)};
async function draw(){try{const run=await (await fetch("stats.json")).json();
const dl=document.getElementById("run");dl.replaceChildren();
for(const key of ["scheme","combine","tokens","rounds","num_members","wait_budget_s","lost_norm","bytes_in",
"bytes_out"])
{cell("dt",key,dl);cell("dd",number(run[key]),dl)}
const table=document.getElementById("members");table.replaceChildren();
const head=document.createElement("tr");for(const c of columns)cell("th",c,head);table.append(head);
for(const m of run.members){const row=document.createElement("tr");if(!m.is_there)row.className="gone";
for(const c of columns)cell("td",number(m[c]),row);table.append(row)}
document.getElementById("note").textContent="";}
catch(e){document.getElementById("note").textContent="The server does not answer; this page tries again."}
setTimeout(draw,1000)}draw()</script></html>"""
_RUN_METRICS = {
    "tokens": "counter",
    "rounds": "counter",
    "num_members": "gauge",
    "wait_budget_s": "gauge",
    "lost_norm": "gauge",
    "bytes_out": "counter",
    "bytes_in": "counter",
}
_MEMBER_METRICS = {
    "is_there": "gauge",
    "tokens": "counter",
    "steps": "counter",
    "rounds": "counter",
    "late": "counter",
    "residual_norm": "gauge",
    "share": "gauge",
    "clipped_norm": "counter",
    "seen_s_ago": "gauge",
    "loss": "gauge",
}


def prometheus_text(stats: dict[str, Any]) -> str:
    """A server's stats in Prometheus's text format."""
    lines = []
    for name, kind in _RUN_METRICS.items():
        lines += [f"# TYPE laconic_run_{name} {kind}", f"laconic_run_{name} {stats[name]}"]
    for name, kind in _MEMBER_METRICS.items():
        lines.append(f"# TYPE laconic_member_{name} {kind}")
        for member in stats["members"]:
            if member.get(name) is not None:
                id = member["id"].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                lines.append(f'laconic_member_{name}{{id="{id}"}} {float(member[name])}')
    return "\n".join(lines) + "\n"


class PageServer:
    """Serves `/` (a page that draws itself anew each second), `/stats.json` and `/metrics` in a thread of its own.

    Args:
        server: Whose run it shows.
        listen: Where it is read, as "host:port", or ":port" for every interface.
    """

    def __init__(self, server: MemberServer, listen: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kinds = {"/": "text/html", "/stats.json": "application/json", "/metrics": "text/plain; version=0.0.4"}
                if self.path not in kinds:
                    self.send_error(404)
                    return
                text = {
                    "/": lambda: _PAGE,
                    "/stats.json": lambda: json.dumps(server.stats()),
                    "/metrics": lambda: prometheus_text(server.stats()),
                }[self.path]()
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", f"{kinds[self.path]}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        host, port = address_of(listen if not listen.startswith(":") else f"0.0.0.0{listen}")
        try:
            self._http = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise LaunchError(f"cannot serve metrics at {listen} ({error.strerror}); give another port") from None
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, name="laconic-page", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it is read, as "host:port"."""
        host, port = self._http.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
