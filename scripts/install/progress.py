"""What a step is, how it is run beside others, and what the person in front of the machine sees meanwhile.

A step either returns what it did in a few words, or raises `StepFailed` with what went wrong and what to do about it. Steps run in
threads because all they do is wait for programs; each program's whole output goes to build/log/STEP.log, the screen gets one line at the
start, one every quarter of a minute, and one at the end.
"""

from __future__ import annotations

import concurrent.futures
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
BUILD: Final = REPOSITORY / "build"
HEARTBEAT_S: Final = 15.0


class StepFailed(Exception):
    """A step could not be done. `why` is what was seen; `todo` is what the reader does next."""

    def __init__(self, why: str, todo: str) -> None:
        super().__init__(why)
        self.why = why
        self.todo = todo


@dataclass(frozen=True)
class Step:
    """One piece of setting up: `act` is handed its own `Reporter`; `after` names the steps that must have succeeded."""

    name: str
    title: str
    act: Callable[[Reporter], str]
    after: tuple[str, ...] = ()


@dataclass
class Reporter:
    """The voice of one step: numbered lines on the screen, everything else in its log file."""

    number: int
    total: int
    title: str
    log: Path
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print one line with the step's number, whole even when several steps speak at once."""
        sys.stdout.write(f"[{self.number}/{self.total}] {self.title}: {text}\n")
        sys.stdout.flush()

    def run(
        self,
        command: Sequence[str | Path],
        *,
        todo: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        drop_env: Sequence[str] = (),
    ) -> str:
        """Run a program to its end and return its standard output; the log gets all of it.

        The program dies with this process (setpriv sets the parent-death signal), so that an interrupted set-up leaves nothing running.
        Errors: `StepFailed` with the last lines that it wrote, when it exits non-zero or does not exist.
        """
        words = [str(word) for word in command]
        environment = {key: value for key, value in os.environ.items() if key not in drop_env} | dict(env or {})
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            log.write(f"$ {shlex.join(words)}\n".encode())
            log.flush()
            try:
                child = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *words], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            except FileNotFoundError as error:
                raise StepFailed(f"{error.filename} is not installed", "apt-get install util-linux") from error
            code = self._wait(child, offset)
        output = self.log.read_bytes()[offset:].decode(errors="replace").partition("\n")[2]
        if code != 0:
            tail = "\n".join(f"    {line}" for line in output.strip().splitlines()[-12:])
            raise StepFailed(f"`{shlex.join(words)[:160]}` ended with status {code}; its last words ({self.log}):\n{tail}", todo)
        return output

    def _wait(self, child: subprocess.Popen[bytes], offset: int) -> int:
        while True:
            try:
                return child.wait(timeout=HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                self.say(f"{time.monotonic() - self.started:.0f} s, {self._last_line(offset)}")
            except BaseException:
                child.kill()
                child.wait()
                raise

    def _last_line(self, offset: int) -> str:
        with self.log.open("rb") as log:
            log.seek(max(offset, self.log.stat().st_size - 4096))
            lines = [line.strip() for line in log.read().decode(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1][:90] if lines else "working"


def run_steps(steps: Sequence[Step]) -> bool:
    """Run the steps, each as soon as those that it comes after have succeeded; True when all did.

    A failed step stops what depends on it and nothing else: the long builds beside it are not thrown away.
    """
    logs = BUILD / "log"
    logs.mkdir(parents=True, exist_ok=True)
    chosen = {step.name for step in steps}
    done: set[str] = set()
    lost: dict[str, str] = {}
    waiting = list(enumerate(steps, start=1))
    changed = threading.Condition()

    def work(number: int, step: Step) -> None:
        log = logs / f"{step.name}.log"
        log.write_bytes(b"")
        problem = _one(Reporter(number, len(steps), step.title, log), step)
        with changed:
            if problem is None:
                done.add(step.name)
            else:
                lost[step.name] = problem
            changed.notify_all()

    with concurrent.futures.ThreadPoolExecutor(max_workers=len(steps) or 1) as pool:
        while waiting:
            with changed:
                for entry in list(waiting):
                    number, step = entry
                    needs = [name for name in step.after if name in chosen]
                    if any(name in lost for name in needs):
                        lost[step.name] = "not tried"
                        print(f"[{number}/{len(steps)}] {step.title}: not tried, it needs {', '.join(n for n in needs if n in lost)}")
                        waiting.remove(entry)
                    elif all(name in done for name in needs):
                        waiting.remove(entry)
                        pool.submit(work, number, step)
                if waiting and not any(name in lost for _, step in waiting for name in step.after):
                    changed.wait(timeout=1.0)
    for problem in (text for text in lost.values() if text != "not tried"):
        sys.stderr.write(problem)
    return not lost


def _one(reporter: Reporter, step: Step) -> str | None:
    """Run one step; None, or the paragraph that explains its failure."""
    try:
        outcome = step.act(reporter)
    except StepFailed as failure:
        why, todo = failure.why, failure.todo
    except Exception as error:  # a task boundary: the other steps go on, and the reader gets the type and text of what this one met
        why, todo = f"{type(error).__name__}: {error}", f"see {reporter.log}; this is a fault of the step itself"
    else:
        reporter.say(f"{outcome} ({time.monotonic() - reporter.started:.1f} s)")
        return None
    reporter.say(f"FAILED after {time.monotonic() - reporter.started:.1f} s")
    return f"\nStep {step.name} ({step.title}) failed.\n  Why: {why}\n  What to do: {todo}\n"
