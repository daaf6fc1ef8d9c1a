"""Visitors of a dashboard over real websockets, without a browser: they ask for a page, and again while its work is under way."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import websockets
from app_pages import figure, is_of
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg


@dataclass
class Visit:
    """What a page shows at last, by its place on the page, and every error box and exception that it ever showed."""

    address: str
    elements: dict[tuple[int, ...], Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    script: str = ""
    """Which script draws the page, as the server calls it."""

    def of(self, kind: str) -> list[Any]:
        """The elements of a kind, from top to bottom."""
        return [getattr(e, kind) for _, e in sorted(self.elements.items()) if e.WhichOneof("type") == kind]

    def charts(self) -> list[Any]:
        """The figures."""
        return [figure(c) for c in self.of("bidi_component") if is_of(c, "figure")]

    def chart(self, view: str) -> Any:
        """The figure of a view."""
        (found,) = [json.loads(c.spec) for c in self.charts() if c.id.endswith(f"figure_{view}")]
        return found

    def note(self, path: tuple[int, ...], element: Any) -> None:
        self.elements[path] = element
        if element.WhichOneof("type") == "exception":
            told = element.exception
            self.wrong.append("\n".join((f"{told.type}: {told.message}", *told.stack_trace)))
        if element.WhichOneof("type") == "alert" and element.alert.format == element.alert.ERROR:
            self.wrong.append(element.alert.body)


def together(server: str, addresses: Sequence[str]) -> list[Visit]:
    """All these pages of a server, asked for in one moment, each once nothing of it is under way any more."""

    async def visits() -> list[Visit]:
        ready = asyncio.Barrier(len(addresses))
        return await asyncio.gather(*(_visit(server, address, ready) for address in addresses))

    with ThreadPoolExecutor(1) as thread:  # a browser that drives itself keeps a loop running in the main one
        return thread.submit(lambda: asyncio.run(visits())).result()


async def _visit(server: str, address: str, ready: asyncio.Barrier) -> Visit:
    page, _, query = address.partition("?")
    seen, wire = Visit(address), f"ws://{urllib.parse.urlsplit(server).netloc}/_stcore/stream"
    async with websockets.connect(wire, subprotocols=["streamlit"], origin=server, max_size=None) as socket:
        await ready.wait()
        await _ask(socket, query, page_name=page)
        polls: dict[str, float] = {}
        while await _followed(socket, seen, polls):
            fragment, every = min(polls.items(), key=lambda item: item[1])
            await asyncio.sleep(every)
            await _ask(socket, query, page_script_hash=seen.script, fragment_id=fragment, is_auto_rerun=True)
    return seen


async def _ask(socket: Any, query: str, **more: Any) -> None:
    message = BackMsg()
    message.rerun_script.query_string = query
    for key, value in more.items():
        setattr(message.rerun_script, key, value)
    await socket.send(message.SerializeToString())


async def _followed(socket: Any, seen: Visit, polls: dict[str, float]) -> bool:
    """Note what comes until a script has run, with the parts of the page to ask for again and after how many seconds: whether there are."""
    while True:
        message = ForwardMsg.FromString(await socket.recv())
        kind = message.WhichOneof("type")
        if kind == "new_session" and not message.metadata.run.fragment_ids:
            seen.elements.clear()
            polls.clear()
        elif kind == "navigation":
            seen.script = message.navigation.page_script_hash
        elif kind == "auto_rerun":
            polls[message.auto_rerun.fragment_id] = message.auto_rerun.interval
        elif kind == "stop_auto_rerun":
            for fragment in message.stop_auto_rerun.fragment_ids:
                polls.pop(fragment, None)
        elif kind == "delta" and message.delta.WhichOneof("type") == "new_element":
            seen.note(tuple(message.metadata.delta_path), message.delta.new_element)
        elif kind == "script_finished" and message.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
            return bool(polls)
