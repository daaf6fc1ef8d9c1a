"""The dashboard's server: `python -m app.server --port N --runs DIR`. Streamlit's, with a front end that comes at once.

A first visit fetches some sixty small files. Streamlit finds each on disk anew, and its sockets hold the second half of a small
answer back until the first is confirmed (40 ms). Here the files come from memory and the server binds its own socket. The
document also says where the server is, which saves a deep link two rounds of asking. Everything else is as Streamlit answers it.
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
from streamlit.runtime.session_manager import SessionInfo
from streamlit.web.server.starlette.starlette_websocket import is_host_allowed

from workbench.plots.style import INK
from workbench.views.link import PAGES

from . import settings

FRONT = Path(st.__file__).parent / "static"
DRAWS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
PLOTLY = f"/static/plotly-{plotly.__version__}.min.js"
HERE = (
    b"<script>window.__streamlit = {BACKEND_BASE_URL: location.origin,"
    b" HOST_CONFIG: {allowedOrigins: [location.origin], useExternalAuthToken: false}}</script>"
)
STYLE = f"<style>{(Path(__file__).with_name('page.css')).read_text('utf-8').replace('INK', INK)}</style>".encode()
SCRIPT = f"<script>{(Path(__file__).with_name('page.js')).read_text('utf-8')}</script>".encode()
KINDS = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}
SLOW_S, AGAIN = 0.02, 100  # a collection of garbage that is felt; collections between two looks at everything
FENCE = b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; frame-ancestors 'self'; form-action 'self'"
"""What a page may load, send and be shown in: this server alone, whatever text got into it."""
HEADERS = (
    (b"content-security-policy", FENCE), (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"same-origin"),
)  # fmt: skip


class FrontEnd:
    """Answers for hosts by name, to its own pages only; sends the document and the files of the front end from memory."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.files = app, _listing()
        self.document = _document()
        self.prepare = threading.Thread(target=_prepare, daemon=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def fenced(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        if scope["type"] == "websocket" and not _is_ours(scope):
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and self.prepare.ident is None:  # a browser is here, and busy with the front end
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
        if path.strip("/") in ("", "kept", *PAGES):
            return Response(self.document, media_type="text/html", headers={"Cache-Control": "no-cache"})
        return None


def _is_ours(scope: Scope) -> bool:
    """Whether a request names this machine, and comes from a page of this server where it says where it comes from."""
    headers, scheme = Headers(scope=scope), {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
    host, origin = headers.get("host"), headers.get("origin")
    return is_host_allowed(host) and origin in (None, f"{scheme}://{host}")


def _listing() -> dict[str, Path]:
    """Files of the front end by their paths in an address."""
    found = (p for p in (FRONT / "static").rglob("*") if p.suffix in KINDS)
    return {f"/{p.relative_to(FRONT).as_posix()}": p for p in found} | {PLOTLY: DRAWS}


@functools.cache
def _read(path: Path) -> tuple[bytes, str]:
    return path.read_bytes(), KINDS[path.suffix]


def _document() -> bytes:
    """Streamlit's, which also says that the largest file will be needed, the one that draws: else it is asked for last of all."""
    head = HERE + STYLE + SCRIPT + f'<link rel="preload" as="script" href="{PLOTLY}" data-plotly></head>'.encode()
    return (FRONT / "index.html").read_bytes().replace(b"</head>", head, 1)


def _prepare() -> None:
    """What every page needs is imported, and the runs are looked at, while a first browser reads the front end."""
    from streamlit import emojis  # noqa: F401 - a quarter of a second, at the first icon

    from .cached_source import cached_source
    from .screens import start_finding  # noqa: F401

    cached_source().catalogue()


class Aside:
    """Sets what is alive aside from the collection of garbage, which Streamlit does after every run of a page.

    The libraries alone are half a million objects: looking through them takes 0.1 s, in which nothing is sent. Now and then
    everything is looked at again, so that what has died meanwhile is freed.
    """

    def __init__(self) -> None:
        self.count, self.began = 0, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self.began = time.perf_counter()
            return
        self.count += 1
        if self.count % AGAIN == 0:
            gc.unfreeze()
        elif time.perf_counter() - self.began > SLOW_S:
            gc.freeze()


def _end(_: MemorySessionStorage, session_info: SessionInfo) -> None:
    """End what a closed socket leaves, in place of keeping it: a page comes back from its address, and its descriptors do not."""
    session_info.session.shutdown()


MemorySessionStorage.save = _end  # type: ignore[assignment]
settings.apply()  # before anything is read of them
app = st.App(Path(__file__).with_name("main.py"), middleware=[Middleware(FrontEnd)])


def _end_with_parent(parent: int) -> None:
    """End once the process that started this one is gone: a closed window takes its dashboard along."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8501)
    parser.add_argument("--parent", type=int)
    options = parser.parse_known_args()[0]
    if options.parent is not None:
        threading.Thread(target=_end_with_parent, args=(options.parent,), daemon=True).start()
    gc.callbacks.append(Aside())
    uvicorn.run(
        app, host=st.get_option("server.address"), port=options.port, ws="websockets-sansio", ws_per_message_deflate=False,
        access_log=False, log_level="warning", timeout_graceful_shutdown=2,
    )  # fmt: skip
