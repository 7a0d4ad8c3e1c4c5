"""The ready-made templates, built from their recipes as the guide says, and used by the unmodified SDKs that want them by name.

A build installs packages from Debian's mirror and PyPI: minutes, so these are part of the full matrices. Where this machine trusts more
than Debian does, sandboxes are given the same certificates.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from e2b import Sandbox
from e2b_code_interpreter import Sandbox as Interpreter
from e2b_desktop import Sandbox as Desktop

from tests.e2e.conftest import ATOLL, ROOT, Product

RECIPES = ROOT / "deploy" / "templates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def build(product: Product, name: str, place: Path, *words: str) -> None:
    command = [ATOLL, "template", "build", name, str(place), *words]
    ran = subprocess.run(command, env={**os.environ, **product.environment}, capture_output=True, text=True, timeout=1500, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}"


@pytest.fixture(scope="module")
def trusting(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`base`, with what this machine trusts."""
    place = tmp_path_factory.mktemp("trusting")
    (place / "ca-certificates.crt").write_bytes(CERTIFICATES.read_bytes())
    (place / "Dockerfile").write_text(f"FROM template:base\nCOPY ca-certificates.crt {CERTIFICATES}\n")
    build(product, "trusting", place)
    yield "trusting"
    product.call("DELETE", "/templates/trusting")


@pytest.fixture(scope="module")
def interpreter(product: Product, trusting: str) -> Iterator[None]:
    words = ["--build-arg", f"BASE={trusting}", "--cpu", "2", "--memory-mib", "1024"]
    ready = ["--ready-command", "curl -fsS http://127.0.0.1:49999/health"]
    build(product, "code-interpreter-v1", RECIPES / "code-interpreter", *words, *ready)
    yield
    product.call("DELETE", "/templates/code-interpreter-v1")


@pytest.fixture(scope="module")
def desktop(product: Product) -> Iterator[Desktop]:
    build(product, "desktop", RECIPES / "desktop", "--cpu", "2", "--memory-mib", "2048")
    made = Desktop.create(resolution=(1280, 800), timeout=900)
    yield made
    made.kill()
    product.call("DELETE", "/templates/desktop")


def test_the_code_interpreter_in_python(interpreter: None) -> None:
    with Interpreter.create(timeout=300) as sandbox:
        sandbox.run_code("x = 20")
        said: list[str] = []
        ended = sandbox.run_code("print('said')\nx + 1", on_stdout=lambda message: said.append(message.line))
        assert (ended.text, said) == ("21", ["said\n"])
        shown = sandbox.run_code("import matplotlib.pyplot as plt\nplt.bar(['a'], [1])\nplt.show()").results[0]
        assert shown.chart is not None
        assert shown.png is not None
        for language, code in (("js", "20 + 1"), ("typescript", "const n: number = 21; n"), ("bash", "echo 21")):
            ended = sandbox.run_code(code, language=language)
            assert "21" in (ended.text or "".join(ended.logs.stdout)), (language, ended)
        sandbox.files.write("/home/user/a.csv", "n\n1\n2\n")
        assert sandbox.run_code("import pandas\nint(pandas.read_csv('/home/user/a.csv').n.sum())").text == "3"


def javascript(product: Product, name: str) -> None:
    command = [ROOT / "build" / "tools" / "node", "--test", ROOT / "tests" / "e2e" / "js" / "templates" / f"{name}.mjs"]
    ran = subprocess.run(command, env={**os.environ, **product.environment}, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-2000:]}"


def test_the_code_interpreter_in_javascript(product: Product, interpreter: None) -> None:
    javascript(product, "interpreter")


def size(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def has_window(desktop: Desktop, title: str) -> None:
    """Wait until it is there and has the keyboard."""
    until = time.monotonic() + 90
    while title not in (shown := desktop.commands.run("wmctrl -l; xdotool getactivewindow getwindowname || true").stdout).splitlines()[-1]:
        assert time.monotonic() < until, shown
        time.sleep(0.5)


def test_a_desktop_is_seen(desktop: Desktop) -> None:
    first = bytes(desktop.screenshot())
    assert size(first) == desktop.get_screen_size() == (1280, 800)
    assert len(first) > 5000, "one colour only"
    assert b"".join(desktop.screenshot(format="stream"))[:4] == first[:4]


def test_mouse_keyboard_and_windows(desktop: Desktop) -> None:
    desktop.move_mouse(333, 222)
    assert desktop.get_cursor_position() == (333, 222)
    desktop.drag((300, 300), (400, 350))
    assert desktop.get_cursor_position() == (400, 350)
    desktop.launch("org.xfce.mousepad")
    has_window(desktop, "Mousepad")
    windows = desktop.get_application_windows("mousepad")
    assert "Mousepad" in desktop.get_window_title(windows[0])
    desktop.wait(1000)
    desktop.write("typed by an agent")
    desktop.press(["ctrl", "s"])
    has_window(desktop, "Save As")
    # A dialog has its window before it listens: on a slow machine what is typed at once is lost.
    for tries in range(1, 7):
        desktop.wait(1000 * tries)
        desktop.press(["ctrl", "a"])
        desktop.write("/home/user/typed.txt")
        desktop.press("enter")
        desktop.wait(2000)
        if "typed.txt - Mousepad" in desktop.commands.run("xdotool getactivewindow getwindowname || true").stdout:
            break
    has_window(desktop, "typed.txt - Mousepad")
    assert desktop.files.read("/home/user/typed.txt").strip() == "typed by an agent"
    for click in (desktop.left_click, desktop.right_click, desktop.middle_click, desktop.double_click):
        click(600, 600)
    desktop.press("esc")
    desktop.scroll("down", 3)


def geometry(desktop: Desktop, window: str) -> tuple[int, int, int, int]:
    """Where a window's content is, and its size: left, top, width, height."""
    shown = desktop.commands.run(f"xwininfo -id {window}").stdout
    left, top, width, height = (int(one) for one in re.findall(r"(?:Absolute upper-left [XY]|Width|Height): +(-?\d+)", shown))
    return left, top, width, height


def test_a_button_that_is_held_moves_a_window(desktop: Desktop) -> None:
    # Its entry has another name in Debian.
    desktop.commands.run("xterm -geometry 60x20+200+200", background=True)
    window = wait_for_windows(desktop, "xterm")[-1]
    desktop.wait(2000)
    left, top, *_ = geometry(desktop, window)
    desktop.move_mouse(left + 100, top - 14)
    desktop.mouse_press()
    for step in (1, 2):
        desktop.wait(300)
        desktop.move_mouse(left + 100 + 40 * step, top - 14 + 30 * step)
    desktop.wait(300)
    desktop.mouse_release()
    desktop.wait(1000)
    moved = geometry(desktop, window)
    assert abs(moved[0] - left - 80) < 30, (left, top, moved)
    assert abs(moved[1] - top - 60) < 30, (left, top, moved)
    assert desktop.get_window_title(desktop.get_current_window_id()) == desktop.get_window_title(window)


def wait_for_windows(desktop: Desktop, application: str) -> list[str]:
    until = time.monotonic() + 90
    while not desktop.commands.run(f"xdotool search --onlyvisible --class {application} || true").stdout.split():
        assert time.monotonic() < until, application
        time.sleep(0.5)
    return desktop.get_application_windows(application)


# After the versions and an open door RFB says the size of what it shows.
SHOWN = (
    "import socket, struct; f = socket.create_connection(('127.0.0.1', 5900), 5).makefile('rwb'); "
    "f.write(f.read(12)); f.flush(); f.read(f.read(1)[0]); f.write(b'\\x01'); f.flush(); f.read(4); "
    "f.write(b'\\x01'); f.flush(); print(*struct.unpack('>HH', f.read(4)))"
)


def test_one_window_is_streamed(desktop: Desktop) -> None:
    # One that was moved over the edge of the screen cannot be streamed.
    desktop.commands.run("pkill -x xterm; while pgrep -x xterm; do sleep 0.1; done")
    desktop.commands.run("xterm -geometry 60x20+200+200", background=True)
    window = wait_for_windows(desktop, "xterm")[0]
    _, _, width, height = geometry(desktop, window)
    desktop.stream.start(window_id=window)
    until, said = time.monotonic() + 60, ""
    # It listens a little before it shows: who comes in between is sent away.
    while said.split() != [str(width), str(height)]:
        assert time.monotonic() < until, (said, desktop.commands.run("pgrep -a x11vnc; tail -20 /tmp/x11vnc_stderr.log").stdout)
        said = desktop.commands.run(f'python3 -c "{SHOWN}" 2>&1 || true').stdout
    desktop.stream.stop()


def test_a_desktop_in_javascript(product: Product, desktop: Desktop) -> None:
    javascript(product, "desktop")


def test_a_file_is_opened(desktop: Desktop) -> None:
    desktop.files.write("/home/user/note.txt", "a note\n")
    desktop.open("/home/user/note.txt")
    has_window(desktop, "note.txt")


def test_a_desktop_is_streamed_to_those_with_its_key(product: Product, desktop: Desktop) -> None:
    desktop.stream.start(require_auth=True)
    key = desktop.stream.get_auth_key()
    url = desktop.stream.get_url(auth_key=key)
    assert parse_qs(urlsplit(url).query)["password"] == [key]
    assert urlsplit(url).netloc == f"6080-{desktop.sandbox_id}.{product.domain}"
    page = product.inside(desktop, "GET", "/vnc.html", port=6080)
    assert (page.status_code, "noVNC" in page.text) == (200, True)
    by_name = product.http.get(f"{product.url}/vnc.html", headers={"Host": urlsplit(url).netloc})
    assert by_name.status_code == 200
    # What RFB says first through the stream's own way in: a version, then that a password is wanted (2) and nothing else.
    probe = (
        "import socket; s = socket.create_connection(('127.0.0.1', 5900)); v = s.recv(12); s.sendall(v); "
        "n = s.recv(1)[0]; print(v.decode().strip(), list(s.recv(n)))"
    )
    assert desktop.commands.run(f'python3 -c "{probe}"').stdout.strip() == "RFB 003.008 [2]"
    upgraded = httpx.Headers({"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"})
    upgraded["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    answer = desktop.commands.run(
        "curl -sS -m 3 -o /dev/null -w '%{http_code}' "
        + " ".join(f"-H '{name}: {value}'" for name, value in upgraded.items())
        + " http://127.0.0.1:6080/websockify || true"
    )
    assert answer.stdout == "101"
    desktop.stream.stop()
    assert desktop.commands.run("pgrep -x x11vnc || echo gone").stdout == "gone\n"


def test_base_is_built_from_its_recipe(product: Product, trusting: str) -> None:
    name = "base-by-a-build"
    build(product, name, RECIPES / "base", "--build-arg", f"BUILDER={trusting}", "--cpu", "2", "--memory-mib", "2048")
    asked = "dpkg-query -W -f '${Package}=${Version}\\n'; id; sudo id -u; python --version; git --version; stat -c '%A %U %n' /tmp /home/user /usr/bin/sudo"
    try:
        said = []
        for template in ("base", name):
            with Sandbox.create(template, timeout=300) as sandbox:
                said.append(sandbox.commands.run(asked).stdout)
        assert said[1] == said[0], "the set-up's base and the build's are the same system"
    finally:
        product.call("DELETE", f"/templates/{name}")


def test_ubuntu_is_built_from_its_recipe(product: Product, trusting: str) -> None:
    name = "ubuntu-by-a-build"
    build(product, name, RECIPES / "ubuntu", "--build-arg", f"BUILDER={trusting}", "--cpu", "2", "--memory-mib", "2048")
    try:
        with Sandbox.create(name, timeout=300) as sandbox:
            said = sandbox.commands.run(
                ". /etc/os-release; echo $ID $VERSION_CODENAME; id -un; sudo id -un; python -c 'print(6 * 7)'; git --version"
            ).stdout
            assert said.splitlines()[:4] == ["ubuntu noble", "user", "root", "42"]
            # Its packages are to be had, by the keys that it was made with.
            ran = sandbox.commands.run(
                "sudo apt-get update -q && sudo apt-get install -yq --no-install-recommends hello && hello", timeout=300
            )
            assert ran.stdout.endswith("Hello, world!\n")
    finally:
        product.call("DELETE", f"/templates/{name}")


def test_kernels_are_started_ahead(product: Product, interpreter: None) -> None:
    sandbox = Interpreter.create(timeout=300)
    try:
        events = product.call("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/events").json()["items"]
        said = {one["type"]: one["data"] for one in events}
        assert said["sandbox.accepted"]["head_start"].startswith("snp_"), said
        assert "reason" not in said["sandbox.ready"], said
        # Its kernel is older than it is, and knows the sandbox's own environment all the same.
        assert sandbox.run_code("import os; os.environ['E2B_SANDBOX_ID']").text == sandbox.sandbox_id
        other = Interpreter.create(timeout=300)
        try:
            sandbox.run_code("mine = 1")
            assert other.run_code("mine").error is not None, "one sandbox's cells are not another's"
            draws = {one.run_code("import uuid; str(uuid.uuid4())").text for one in (sandbox, other)}
            assert len(draws) == 2
        finally:
            other.kill()
    finally:
        sandbox.kill()
