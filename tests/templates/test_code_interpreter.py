"""The server of the template `code-interpreter-v1`, outside a sandbox, by the unmodified Python SDK of E2B's code interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b.connection_config import ConnectionConfig
from e2b_code_interpreter import Sandbox
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "deploy" / "templates" / "code-interpreter" / "server.py"
READY_S = 120.0

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The SDK's object, whose code goes to a server of our own: nothing but that is asked of it."""
    home = tmp_path_factory.mktemp("home")
    asked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "free_ports.py", "1"], capture_output=True, text=True, timeout=30, check=True
    )
    url = f"http://127.0.0.1:{int(asked.stdout)}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(home), "INTERPRETER_PORT": asked.stdout.strip(), "PATH": path, "GREETING": "outer"}
    log = (home / "log").open("w")
    server = subprocess.Popen([sys.executable, SERVER], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + READY_S
        while not _answers(url):
            assert server.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.1)
        config = ConnectionConfig(api_key="e2b_" + "0" * 40, sandbox_url=url)
        yield Sandbox(
            sandbox_id="i" * 21,
            sandbox_domain="localhost",
            envd_version=Version("0.6.13"),
            envd_access_token=None,
            traffic_access_token=None,
            connection_config=config,
        )
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_javascript_sdk(sandbox: Sandbox) -> None:
    node = ROOT / "build" / "tools" / "node"
    script = ROOT / "tests" / "e2e" / "js" / "templates" / "interpreter.mjs"
    if not node.exists() or not (script.parents[1] / "node_modules" / "@e2b" / "code-interpreter").exists():
        pytest.skip("node or the JavaScript packages are not here; `make test` installs both")
    environment = {**os.environ, "INTERPRETER_URL": sandbox.connection_config.get_sandbox_url(sandbox.sandbox_id, "localhost")}
    ran = subprocess.run([node, "--test", script], env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-2000:]}"


def test_a_value_stays_between_executions(sandbox: Sandbox) -> None:
    sandbox.run_code("x = 20")
    ended = sandbox.run_code("x += 1; x")
    assert (ended.text, ended.error) == ("21", None)
    assert isinstance(ended.execution_count, int)
    assert sandbox.run_code("'plain'").text == "plain"


def test_output_comes_while_the_code_runs(sandbox: Sandbox) -> None:
    seen: list[tuple[str, float, bool]] = []

    def told(message: Any) -> None:
        seen.append((message.line, time.monotonic(), message.error))

    code = "import sys, time\nprint('first', flush=True)\ntime.sleep(1)\nprint('second', flush=True)\nprint('apart', file=sys.stderr)"
    ended = sandbox.run_code(code, on_stdout=told, on_stderr=told)
    assert [line for line, _, _ in seen] == ["first\n", "second\n", "apart\n"]
    assert seen[1][1] - seen[0][1] > 0.5
    assert (ended.logs.stdout, ended.logs.stderr) == (["first\n", "second\n"], ["apart\n"])


def test_errors_have_name_value_and_traceback(sandbox: Sandbox) -> None:
    error = sandbox.run_code("def broken():\n    return 1 / 0\nbroken()").error
    assert error is not None
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "broken" in error.traceback


def test_a_chart_is_a_picture_and_data(sandbox: Sandbox) -> None:
    ended = sandbox.run_code(
        "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2.5])\nplt.title('Sums')\nplt.ylabel('n')\nplt.show()"
    )
    assert ended.error is None
    shown = ended.results[0]
    assert shown.png is not None
    assert shown.png.startswith("iVBOR")
    chart = shown.chart
    assert chart is not None
    assert (chart.type.value, chart.title) == ("bar", "Sums")
    assert [(bar.label, float(bar.value)) for bar in chart.elements] == [("a", 1.0), ("b", 2.5)]


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        ("plt.plot([1, 2, 3], [4, 5, 6], label='l')", "line"),
        ("plt.scatter([1, 2], [3, 4])", "scatter"),
        ("plt.pie([1, 3], labels=['a', 'b'])", "pie"),
        ("f, a = plt.subplots(1, 2); a[0].plot([1]); a[1].bar(['x'], [1])", "superchart"),
    ],
)
def test_kinds_of_charts(sandbox: Sandbox, draw: str, kind: str) -> None:
    ended = sandbox.run_code(f"import matplotlib.pyplot as plt\n{draw}\nplt.show()")
    assert ended.error is None
    assert [one.chart.type.value for one in ended.results if one.chart is not None] == [kind]


def test_a_table_is_html_and_data(sandbox: Sandbox) -> None:
    code = "import pandas as pd\npd.DataFrame({'n': [1, 2], 't': pd.to_datetime(['2026-01-01', None]), 'a': ['x', None]})"
    (shown,) = sandbox.run_code(code).results
    assert shown.is_main_result
    assert "<table" in (shown.html or "")
    assert shown.data is not None
    assert (shown.data["n"], shown.data["a"]) == ([1, 2], ["x", None])
    assert shown.data["t"][0].startswith("2026-01-01T00:00:00")


def test_other_kinds_of_content_are_kept(sandbox: Sandbox) -> None:
    code = (
        "from IPython.display import display, HTML, Markdown, SVG, JSON, Latex\n"
        "display(HTML('<b>h</b>'), Markdown('*m*'), Latex('$l$'), JSON({'j': 1}))\n"
        "display({'application/x-own': 'o', 'text/plain': 't'}, raw=True)"
    )
    html, markdown, latex, as_json, own = sandbox.run_code(code).results
    assert (html.html, markdown.markdown, latex.latex, as_json.json) == ("<b>h</b>", "*m*", "$l$", {"j": 1})
    assert (own.text, own.extra, own.is_main_result) == ("t", {"application/x-own": "o"}, False)


def test_other_languages(sandbox: Sandbox) -> None:
    ended = sandbox.run_code("const one: number = 20; console.log('said'); one + 1", language="typescript")
    assert (ended.error, ended.text, ended.logs.stdout) == (None, "21", ["said\n"])
    assert sandbox.run_code("await Promise.resolve(5) * 2", language="js").text == "10"
    failed = sandbox.run_code("throw new TypeError('no')", language="javascript").error
    assert failed is not None
    assert "no" in failed.value
    ended = sandbox.run_code("cd /; word=kept; pwd", language="bash")
    assert ended.logs.stdout == ["/\n"]
    assert "kept" in "".join(sandbox.run_code("echo $word", language="bash").logs.stdout)
    with pytest.raises(Exception, match="there is no kernel for 'cobol'"):
        sandbox.run_code("1", language="cobol")


@pytest.mark.parametrize(
    ("language", "get"),
    [("python", "import os; print(os.environ.get('{}'))"), ("js", "console.log(Deno.env.get('{}'))"), ("bash", "echo ${}")],
)
def test_variables_are_of_one_execution(sandbox: Sandbox, language: str, get: str) -> None:
    def value(**env: str) -> str:
        return "".join(sandbox.run_code(get.replace("{}", "GREETING"), language=language, envs=env).logs.stdout).strip()

    for word in ("hello", 'it\'s "quoted" $HOME'):
        assert value(GREETING=word) == word
        assert value() == "outer"
    sandbox.run_code("1" if language != "bash" else "true", language=language, envs={"FRESH": "f"})
    gone = "".join(sandbox.run_code(get.replace("{}", "FRESH"), language=language).logs.stdout).strip()
    assert gone in ("None", "undefined", "")


def test_contexts_are_apart(sandbox: Sandbox, tmp_path: Path) -> None:
    context = sandbox.create_code_context(cwd=str(tmp_path), language="python")
    assert (context.language, context.cwd) == ("python", str(tmp_path))
    assert context.id in [one.id for one in sandbox.list_code_contexts()]
    sandbox.run_code("apart = 1", context=context)
    assert sandbox.run_code("import os; os.getcwd()", context=context).text == str(tmp_path)
    assert getattr(sandbox.run_code("apart").error, "name", None) == "NameError"
    sandbox.restart_code_context(context)
    assert getattr(sandbox.run_code("apart", context=context).error, "name", None) == "NameError"
    sandbox.remove_code_context(context)
    assert context.id not in [one.id for one in sandbox.list_code_contexts()]
    with pytest.raises(Exception, match="was not found"):
        sandbox.run_code("1", context=context)


@pytest.mark.parametrize("stubborn", [False, True])
def test_what_takes_too_long_is_interrupted(sandbox: Sandbox, *, stubborn: bool) -> None:
    context = sandbox.create_code_context()
    code = "import time\nkept = 1\nwhile True:\n    time.sleep(0.1)"
    if stubborn:
        code = "import time, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)"
    with pytest.raises(Exception, match=r"(?i)timeout|timed out"):
        sandbox.run_code(code, context=context, timeout=1)
    began = time.monotonic()
    assert sandbox.run_code("1 + 1", context=context, timeout=60).text == "2"
    assert time.monotonic() - began < 30
    kept = sandbox.run_code("kept", context=context)
    assert (kept.text == "1") is not stubborn, "only a kernel that does not heed loses what it knew"
    sandbox.remove_code_context(context)


@pytest.mark.parametrize("end", ["import os; os._exit(1)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_kernel_that_dies_is_told_and_replaced(sandbox: Sandbox, end: str) -> None:
    context = sandbox.create_code_context()
    error = sandbox.run_code(end, context=context).error
    assert error is not None
    assert error.name == "KernelDied"
    assert sandbox.run_code("40 + 2", context=context).text == "42"
    sandbox.remove_code_context(context)


@pytest.mark.parametrize(
    "body", [{}, {"code": 1}, {"code": "1", "env_vars": {"A-B": "x"}}, {"code": "1", "context_id": "a", "language": "python"}]
)
def test_bad_requests_are_refused(sandbox: Sandbox, body: dict[str, Any]) -> None:
    assert httpx.post(f"{sandbox._jupyter_url}/execute", json=body).status_code == 400


def test_clients_take_turns(sandbox: Sandbox) -> None:
    sandbox.run_code("turns = []")
    code = "import time\nturns.append('in')\ntime.sleep(0.05)\nturns.append('out')\n"
    with ThreadPoolExecutor(5) as pool:
        assert [one.text for one in pool.map(lambda n: sandbox.run_code(f"{code}{n}"), range(5))] == ["0", "1", "2", "3", "4"]
    assert sandbox.run_code("turns == ['in', 'out'] * 5").text == "True"
