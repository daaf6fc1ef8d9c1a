"""Pictures of offline pages and figures, drawn by an installed Chrome, Chromium or Edge."""

from __future__ import annotations

import base64
import html
import importlib.util
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.parse
import zlib
from pathlib import Path

from workbench.environment import BROWSER, PLAYWRIGHT, variable
from workbench.errors import WorkbenchError
from workbench.file_io import replacing

NAMES = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "msedge",
    "brave-browser",
)  # fmt: skip
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
SECONDS = 60
SCALES = {"svg": 1, "png": 3}
PRINTED_SCALE = 6  # pixels of a PNG per pixel of a figure with a size in mm: 677 dpi
FONT = "Source Sans"


def find_browser() -> str | None:
    """Return the path of a browser: `$WORKBENCH_BROWSER`, one on the path, in the usual places, or Playwright's."""
    if given := variable(BROWSER):
        return given if Path(given).exists() else None
    root = Path(variable(PLAYWRIGHT) or Path.home() / ".cache/ms-playwright")
    candidates = itertools.chain(
        (path for name in NAMES if (path := shutil.which(name))),
        (place for place in PLACES if Path(place).exists()),
        (str(p) for p in sorted(root.glob("chromium*/chrome-*/*")) if p.name in ("chrome", "headless_shell")),
    )  # fmt: skip
    return next(candidates, None)


def screenshot(page: Path, out: Path, *, width: int, height: int) -> Path:
    """Draw an HTML file as a PNG of width x height CSS pixels, at twice the resolution; returns `out`."""
    browser = _found()
    with tempfile.TemporaryDirectory() as folder, replacing(out) as part:
        drawn = Path(folder) / "page.png"
        size = f"--window-size={width},{height}"
        process = _run(browser, folder, page, "--force-device-scale-factor=2", size, f"--screenshot={drawn}")
        if not drawn.exists():
            raise _refusal(process, "page")
        shutil.copyfile(drawn, part)
    return out


def font_face() -> str:
    """Return the CSS of the dashboard's font with its file inside, so that a picture carries it; empty without a dashboard."""
    spec = importlib.util.find_spec("streamlit")
    files = (
        sorted(Path(str(spec.origin)).parent.glob("static/static/media/SourceSansVF-Upright*.woff2")) if spec else []
    )
    data = [base64.b64encode(file.read_bytes()).decode() for file in files[:1]]
    return "".join(
        f"@font-face {{font-family: '{FONT}'; font-weight: 200 900; src: url(data:font/woff2;base64,{d})}}"
        for d in data
    )


def save_figure(page: str, out: Path, *, width: int, height: int, face: str = "", mm: float | None = None) -> Path:
    """Write the first plotly figure of an HTML page as .svg, or as .png at three times the resolution; returns `out`.

    Args:
        width: Pixels of the drawing; `height` too.
        face: CSS of `font_face`, for a figure whose texts are in `FONT`.
        mm: Width on paper. An SVG has its size in mm, a PNG its pixels per metre. None: pixels alone.
    """
    browser, kind = _found(), out.suffix[1:]
    with tempfile.TemporaryDirectory() as folder, replacing(out) as part:
        inside = Path(folder) / "page.html"
        scale = SCALES[kind] if mm is None else PRINTED_SCALE
        values = FONT, width, height, "true" if kind == "png" else "false", width, height, scale
        script = f"<style id='face'>{face}</style><script>{_TO_IMAGE % values}</script></body>"
        seed = zlib.crc32(page.encode())  # plotly's names of clips are random: equal in equal figures only
        fixed = (
            f"<head><script>{{let n = {seed}; Math.random = () => (n = n * 16807 % 2147483647) / 2147483647}}</script>"
        )
        inside.write_text(page.replace("<head>", fixed, 1).replace("</body>", script), encoding="utf-8")
        process = _run(browser, folder, inside, "--dump-dom")
        image = re.search(r'<textarea id="drawn">data:image/[^,]*,(.*?)</textarea>', process.stdout, re.DOTALL)
        if image is None:
            raise _refusal(process, "figure")
        data = html.unescape(image[1])
        if kind == "png":
            png = base64.b64decode(data)
            if mm is not None:  # its pixels per metre, in a chunk after 8 bytes of signature and 25 of header
                chunk = b"pHYs" + struct.pack(">IIB", *[round(width * scale / mm * 1000)] * 2, 1)
                png = png[:33] + struct.pack(">I", 9) + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[33:]
            part.write_bytes(png)
        else:
            text = urllib.parse.unquote(data)
            if mm is not None:
                paper = f'width="{mm:g}mm" height="{height * mm / width:.6g}mm"'
                text = text.replace(f'width="{width}" height="{height}"', paper, 1)
            part.write_text(text, encoding="utf-8")
    return out


_TO_IMAGE = """
addEventListener('load', async () => {
  const face = document.querySelector('#face').textContent, begin = 'data:image/svg+xml,', written = document.createElement('textarea');
  if (face) await document.fonts.load("12px '%s'"); // the room for texts is measured in it
  let url = await Plotly.toImage(document.querySelector('.js-plotly-plot'), {format: 'svg', width: %d, height: %d});
  const drawn = decodeURIComponent(url.slice(begin.length)).replace(/<svg[^>]*>/, (tag) => tag + (face && `<style>${face}</style>`));
  url = begin + encodeURIComponent(drawn);
  if (%s) {
    const image = new Image(), canvas = document.createElement('canvas'), size = [%d, %d].map((n) => %d * n);
    image.src = url;
    await image.decode();
    [canvas.width, canvas.height] = size;
    canvas.getContext('2d').drawImage(image, 0, 0, ...size);
    url = canvas.toDataURL();
  }
  written.id = 'drawn';
  written.textContent = url;
  document.body.replaceChildren(written);
})
"""


def _found() -> str:
    if (browser := find_browser()) is None:
        cure = "set WORKBENCH_BROWSER to one, or open the page"
        raise WorkbenchError(f"no Chrome, Chromium or Edge found to draw with; {cure}")
    return browser


def _refusal(process: subprocess.CompletedProcess[str], what: str) -> WorkbenchError:
    cause = process.stderr.strip()[-300:]
    return WorkbenchError(f"{process.args[0]} did not draw the {what} (exit {process.returncode}): {cause}")


def _run(browser: str, folder: str, page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page without a window and wait until it is drawn."""
    command = [
        browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
        "--virtual-time-budget=5000", *flags, page.resolve().as_uri(),
    ]  # fmt: skip
    if sys.platform == "linux" and os.geteuid() == 0:  # root has no sandbox of its own to put the browser into
        command.insert(1, "--no-sandbox")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkbenchError(f"{browser} did not draw the page: {error}") from error
