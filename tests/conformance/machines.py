"""What the tests of the two drivers of machines have in common: which cases are tried always, a stand as an agent has it, one case's run."""

import contextlib
import os

import pytest

from atoll.testing.conformance.suite import CASES, lacking


def cases(often):
    """Parameters for a test of one case each: without hardware virtualization a guest boots for seconds, so only those named are tried always."""
    assert {case.name for case in CASES} >= often, "what is tried always is there"
    return [pytest.param(case, id=case.name, marks=[] if case.name in often else [pytest.mark.long]) for case in CASES]


@contextlib.asynccontextmanager
async def standing(stand, lack):
    """A stand, opened, with nothing left of it afterwards; skips where something lacks.

    With the agent's mask: what machines need of others' files must be theirs to read all the same.
    """
    if lack:
        pytest.skip(f"needs {lack}")
    made, usual = stand(), os.umask(0o077)
    try:
        await made.open()
        try:
            yield made
        finally:
            await made.close()
    finally:
        os.umask(usual)


async def run(case, stand):
    """Run it, or skip it where the driver declares that it cannot."""
    if flags := lacking(case, stand.driver.capabilities):
        pytest.skip(f"{stand.driver.capabilities.name} does not declare {', '.join(flags)}")
    await case.run(stand)
