"""The dashboard's server, Streamlit's with a faster first visit: `python -m app.server --port N --runs DIR`.

A first visit fetches sixty small files. Streamlit reads each from disk, and its sockets delay the second half of a small answer by
40 ms. Here the files come from memory, over a socket of our own. The document also contains the server's address, which saves a
deep link two requests. Streamlit answers everything else.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import signal
import threading
import time
from pathlib import Path

import plotly
import streamlit as st
import uvicorn
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit.runtime.memory_session_storage import MemorySessionStorage
from streamlit.web.server.starlette.starlette_websocket import is_host_allowed

from workbench.plots.style import INK

from . import streamlit_settings

FRONT = Path(st.__file__).parent / "static"
DRAWS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
PLOTLY = f"/static/plotly-{plotly.__version__}.min.js"
HERE = (
    b"<script>window.__streamlit = {BACKEND_BASE_URL: location.origin,"
    b" HOST_CONFIG: {allowedOrigins: [location.origin], useExternalAuthToken: false}}</script>"
)
STYLE = f"<style>{(Path(__file__).with_name('page.css')).read_text('utf-8').replace('INK', INK)}</style>".encode()
SCRIPT = f"<script>{(Path(__file__).with_name('page.js')).read_text('utf-8')}</script>".encode()
OTHERS = ("/_stcore", "/media", "/component", "/static")
"""Addresses that are no pages."""
KINDS = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}
FENCE = b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; frame-ancestors 'self'; form-action 'self'"
"""Content security policy: a page loads from, sends to and is framed by this server alone."""
HEADERS = (
    (b"content-security-policy", FENCE), (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"same-origin"),
)  # fmt: skip


class FrontEnd:
    """Refuses foreign hosts and origins; sends the document and the files of the front end from memory."""

    def __init__(self, app: ASGIApp) -> None:
        files = (p for p in (FRONT / "static").rglob("*") if p.suffix in KINDS)
        self.app, self.files = app, {f"/{p.relative_to(FRONT).as_posix()}": p for p in files} | {PLOTLY: DRAWS}
        # Streamlit's document with our style and script; it preloads plotly, the largest file, else requested last
        head = HERE + STYLE + SCRIPT + f'<link rel="preload" as="script" href="{PLOTLY}" data-plotly></head>'.encode()
        self.document = (FRONT / "index.html").read_bytes().replace(b"</head>", head, 1)
        self.prepare = threading.Thread(target=_prepare, daemon=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def fenced(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        if scope["type"] == "websocket" and not _is_ours(scope):
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and self.prepare.ident is None:  # the browser is busy with the front end
            self.prepare.start()
        answer = self._answer(scope) if scope["type"] == "http" else None
        await (answer or self.app)(scope, receive, fenced)

    def _answer(self, scope: Scope) -> Response | None:
        if not _is_ours(scope):
            return PlainTextResponse("This dashboard answers to 127.0.0.1 and localhost alone.", 403)
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if path in self.files:
            body, kind = _read(self.files[path])
            return Response(body, media_type=kind, headers={"Cache-Control": "public, immutable, max-age=31536000"})
        if path == "/start":  # the first page has no name in its address
            return RedirectResponse("/?" + scope["query_string"].decode("latin-1"), 307)
        if "." not in path and not path.startswith(OTHERS):  # also an unknown page, which Streamlit reports
            return Response(self.document, media_type="text/html", headers={"Cache-Control": "no-cache"})
        return None


def _is_ours(scope: Scope) -> bool:
    """Return True for a request to an allowed host, from this server's own pages."""
    headers, scheme = Headers(scope=scope), {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
    host, origin = headers.get("host"), headers.get("origin")
    return is_host_allowed(host) and origin in (None, f"{scheme}://{host}")


@functools.cache
def _read(path: Path) -> tuple[bytes, str]:
    return path.read_bytes(), KINDS[path.suffix]


def _prepare() -> None:
    """Import what every page needs and read the catalogue while the first browser loads the front end."""
    from streamlit import emojis  # noqa: F401 - takes a quarter of a second at the first icon

    from .cached_source import cached_source
    from .screens import start  # noqa: F401

    cached_source().catalogue()
    gc.collect()
    gc.freeze()  # Streamlit collects garbage after every run of a page: half a million objects of libraries take 0.1 s


# a session closes with its socket: a page is restored from its address, and open files would add up
MemorySessionStorage.save = lambda _, session_info: session_info.session.shutdown()  # type: ignore[method-assign,assignment]
streamlit_settings.apply()  # before Streamlit reads any
app = st.App(Path(__file__).with_name("main.py"), middleware=[Middleware(FrontEnd)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8501)
    parser.add_argument("--parent", type=int)
    options = parser.parse_known_args()[0]

    def end_with_parent() -> None:
        while os.getppid() == options.parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    if options.parent is not None:
        threading.Thread(target=end_with_parent, daemon=True).start()
    uvicorn.run(
        app, host=st.get_option("server.address"), port=options.port, ws="websockets-sansio", ws_per_message_deflate=False,
        access_log=False, log_level="warning", timeout_graceful_shutdown=2,
    )  # fmt: skip
