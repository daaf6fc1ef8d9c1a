"""The dashboard's server: who is answered, what comes from memory, what a garbage collection looks through."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import browsing
import dashboard
import pytest
import visiting
from browsing import ask, connected

from workbench.cli import dashboard_process
from workbench.errors import WorkbenchError
from workbench.runs.run import runs_folder

pytest.importorskip("streamlit")
from app.server import FRONT


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    server = dashboard_process.serve(tmp_path_factory.mktemp("runs"), browsing.free_port())
    yield int(server.url.rpartition(":")[2])
    dashboard_process.stop(server)


SMALL, LARGE = (
    f"/static/js/{pick((FRONT / 'static' / 'js').glob('*.js'), key=lambda p: p.stat().st_size).name}" for pick in (min, max)
)  # fmt: skip


@pytest.mark.parametrize("path", ["/", "/_stcore/health"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", ""])
def test_other_host_names_get_nothing(port, path, host):
    answer, body = ask(port, path, host)
    assert answer.status == 403
    assert b"script" not in body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:80"])
def test_this_machine_is_answered(port, host):
    assert ask(port, "/", host)[0].status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost:1", "http://127.0.0.1:{}.evil.example", "null", ""]
)
def test_pages_of_other_servers_get_nothing_not_even_those_of_this_machine(port, origin):
    origin = origin.format(port)
    for path in ("/", SMALL, "/_stcore/host-config", "/media/x"):
        assert ask(port, path, Origin=origin)[0].status == 403
    assert connected(port, origin) == 403


def test_our_own_pages_and_programs_are_connected(port):
    assert connected(port, f"http://127.0.0.1:{port}") == 101
    assert connected(port, None) == 101
    assert ask(port, SMALL, Origin=f"http://127.0.0.1:{port}")[0].status == 200


@pytest.mark.parametrize("path", ["/", "/depth", "/nowhere", "/index.html", SMALL, "/_stcore/health", "/media/x"])
def test_every_answer_keeps_pages_from_loading_or_telling_anything_elsewhere(port, path):
    answer, _ = ask(port, path)
    fence = answer.getheader("Content-Security-Policy")
    assert "default-src 'self'" in fence
    assert "frame-ancestors 'self'" in fence
    assert "http" not in fence
    assert answer.getheader("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize("path", [SMALL, LARGE])
def test_files_of_the_front_end_are_what_lies_on_disk(port, path):
    for _ in range(2):
        answer, body = ask(port, path)
        assert body == (FRONT / path.lstrip("/")).read_bytes()
        assert answer.getheader("Content-Type").startswith("text/javascript")
        assert "immutable" in answer.getheader("Cache-Control")


@pytest.mark.slow
def test_the_first_page_has_its_name_too_and_keeps_its_link(port):
    answer, _ = ask(port, "/start?show=here&a=x%20y%0d%0aSet-Cookie:z=1")
    assert answer.status == 307
    assert answer.getheader("Location") == "/?show=here&a=x%20y%0d%0aSet-Cookie:z=1"
    assert answer.getheader("Set-Cookie") is None or "z=1" not in answer.getheader("Set-Cookie")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["/static/../../../../etc/passwd", "/static/js/%2e%2e/%2e%2e/index.html", "//static/js", "/static/js/", "/static"],
)
def test_only_listed_files_are_sent(port, path):
    _, body = ask(port, path)
    assert b"root:" not in body
    assert not body.startswith((b"import", b"var", b"const"))


# ---- beginning and end ----


@pytest.mark.slow
def test_a_dashboard_ends_with_who_started_it_even_where_nothing_can_be_written(tmp_path):
    for name in (".app.log", dashboard_process.NOTE):  # neither can be a file
        (tmp_path / name).mkdir()
    port = browsing.free_port()
    code = (
        "import time; from pathlib import Path; from workbench.cli import dashboard_process;"
        f"dashboard_process.serve(Path({str(tmp_path)!r}), {port}); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert soon(lambda: dashboard_process._healthy(port), 60)
    finally:
        starter.kill()
        starter.wait()
    assert soon(lambda: not dashboard_process._healthy(port), 10)


def soon(true, within):
    end = time.monotonic() + within
    while time.monotonic() < end and not true():
        time.sleep(0.1)
    return true()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc")
@pytest.mark.slow
def test_visitors_who_leave_take_their_open_files_with_them(tmp_path):
    dashboard.run(tmp_path, "r", "transformer", 0, "text", steps=(0,))
    server = dashboard_process.serve(tmp_path, browsing.free_port())
    try:
        visiting.together(server.url, ["start?a=r"])
        opened = lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))  # noqa: E731
        before = opened()
        visiting.together(server.url, ["start?a=r"] * 4)
        assert soon(lambda: opened() <= before, 10)
    finally:
        dashboard_process.stop(server)


@pytest.mark.slow
def test_ctrl_c_while_a_dashboard_starts_ends_it(tmp_path, monkeypatch):
    started = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    monkeypatch.setattr(dashboard_process, "_healthy", lambda port: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        dashboard_process.serve(tmp_path, browsing.free_port())
    assert started[0].poll() is not None


@pytest.mark.slow
def test_what_cannot_be_a_folder_of_runs_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(WorkbenchError, match=r"file cannot be the folder of runs: File exists"):
        dashboard_process.make_folder(tmp_path / "file")
    with pytest.raises(WorkbenchError, match=r"loop cannot be the folder of runs"):
        dashboard_process.make_folder(runs_folder(tmp_path / "loop"))
