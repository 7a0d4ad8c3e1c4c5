"""How a machine becomes a host, cut off at every point on the way."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass, field

import pytest

from atoll.agent import enrollment
from atoll.agent.config import AgentConfig, load_identity
from atoll.agent.enrollment import DRAFT_FILE, by_token, obtain
from atoll.base.errors import Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.wire.agent import Enroll, Enrolled, HostFacts, Known, Registration

FACTS = HostFacts(arch="x86_64", cpu_count=2, memory_mib=1024, disk_mib=1000, boot_id="b")
WANTED = Registration(name="box", capacity=Vector(2000, 1024, 900, 5), facts=FACTS, reserve=Vector(disk_mib=100), labels={"a": "b"})


@dataclass
class Control:
    """Who has been admitted, by digest; one use of its one token."""

    token: str = "t0ken"
    used_for: str | None = None
    admitted: dict[str, Registration] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    lose: list[str] = field(default_factory=list)
    """Answers to lose: what was asked is done."""

    def connect(self, credential: Secret) -> Line:
        return Line(self, credential.reveal())


@dataclass
class Line:
    control: Control
    credential: str

    async def enroll(self, message: Enroll) -> Enrolled:
        control = self.control
        control.said.append("enroll")
        assert message.credential_digest == hashlib.sha256(self.credential.encode()).hexdigest()
        assert self.credential not in message.model_dump_json()
        if message.token != control.token or control.used_for not in (None, message.credential_digest):
            raise Refused(Code.ENROLLMENT_TOKEN_INVALID, "no")
        control.used_for = message.credential_digest
        control.admitted.setdefault(message.credential_digest, message)
        self._lost("enroll")
        return Enrolled(host_id="hst_1", credential_version=1, install_id="ins_1")

    async def identity(self) -> Known:
        self.control.said.append("identity")
        found = self.control.admitted.get(hashlib.sha256(self.credential.encode()).hexdigest())
        if found is None:
            raise Refused(Code.CREDENTIAL_REVOKED, "nobody's")
        self._lost("identity")
        return Known(host_id="hst_1", name=found.name, credential_version=1, install_id="ins_1")

    def _lost(self, call: str) -> None:
        if call in self.control.lose:
            self.control.lose.remove(call)
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "lost")


@pytest.fixture
def config(tmp_path):
    return AgentConfig(state_directory=tmp_path, control_url="http://127.0.0.1:1", facts=FACTS)


async def run(config, control, wanted=WANTED, token="t0ken"):
    return await obtain(config, wanted, connect=control.connect, admit=by_token(Secret(token)), dice=os.urandom)


async def test_a_machine_becomes_a_host_and_keeps_its_credential_for_root_alone(config):
    control = Control()
    obtained = await run(config, control)
    assert (obtained.identity.host_id, obtained.name, obtained.new) == ("hst_1", "box", True)
    assert load_identity(config.credential_path) == obtained.identity
    assert stat.S_IMODE(config.credential_path.stat().st_mode) == 0o600
    assert [path.name for path in config.state_directory.iterdir()] == ["credential"]
    assert obtained.identity.credential.reveal() not in repr(obtained)
    assert control.said == ["enroll", "identity"]


@pytest.mark.parametrize("lost", [["enroll"], ["identity"], ["enroll", "identity"], ["identity", "identity"]])
async def test_a_lost_answer_costs_nothing(config, lost):
    control = Control(lose=list(lost))
    for _ in lost:
        with pytest.raises(OutcomeUnknown):
            await run(config, control)
    obtained = await run(config, control, token="the file is empty by now")
    assert obtained.identity.host_id == "hst_1"
    assert len(control.admitted) == 1


async def test_a_draft_is_on_the_disk_before_anything_is_said(config, monkeypatch):
    control = Control()
    drafts = []

    class Looking(Line):
        async def enroll(self, message):
            drafts.append(json.loads((config.state_directory / DRAFT_FILE).read_text()))
            return await super().enroll(message)

    await obtain(config, WANTED, connect=lambda secret: Looking(control, secret.reveal()), admit=by_token(Secret("t0ken")), dice=os.urandom)
    assert drafts[0]["registration"]["credential_digest"] == control.used_for


@pytest.mark.parametrize("what", ["write_private", "save_identity"])
async def test_a_disk_that_is_full_uses_no_token_up(config, monkeypatch, what):
    """Before the draft: nothing was said. After the enrolment: the next run finds out who it is."""
    control = Control()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(enrollment, what, full)
        with pytest.raises(OSError, match="No space"):
            await run(config, control)
    assert load_identity(config.credential_path) is None
    assert len(control.admitted) == (0 if what == "write_private" else 1)
    assert (await run(config, control)).identity.host_id == "hst_1"
    assert len(control.admitted) == 1


async def test_what_the_machine_changes_by_itself_is_the_same_registration(config):
    control = Control(lose=["enroll"])
    with pytest.raises(OutcomeUnknown):
        await run(config, control)
    less_free = WANTED.model_copy(update={"capacity": Vector(2000, 1024, 700, 5), "reserve": Vector(disk_mib=300)})
    await run(config, control, less_free)
    (admitted,) = control.admitted.values()
    assert admitted.capacity.disk_mib == 900, "what was sent first is what counts"


async def test_another_configuration_after_a_lost_answer_is_a_conflict(config):
    control = Control(lose=["enroll"])
    with pytest.raises(OutcomeUnknown):
        await run(config, control)
    for changed in ({"name": "other"}, {"labels": {}}, {"region": "far"}, {"reserve": Vector(memory_mib=1)}):
        with pytest.raises(Refused) as refused:
            await run(config, control, WANTED.model_copy(update=changed))
        assert refused.value.code is Code.ENROLLMENT_CONFLICT
    assert (await run(config, control)).new is False


async def test_another_configuration_before_anything_was_admitted_is_fine(config):
    control = Control()
    with pytest.raises(Refused):
        await run(config, control, token="wrong")
    obtained = await run(config, control, WANTED.model_copy(update={"labels": {"c": "d"}}))
    assert obtained.new
    (admitted,) = control.admitted.values()
    assert admitted.labels == {"c": "d"}


async def test_a_refused_token_keeps_the_draft_for_the_next_one(config):
    control = Control()
    with pytest.raises(Refused):
        await run(config, control, token="wrong")
    draft = (config.state_directory / DRAFT_FILE).read_bytes()
    await run(config, control)
    assert json.loads(draft)["credential"] == load_identity(config.credential_path).credential.reveal()


async def test_weather_is_not_taken_for_nobody(config):
    """A draft, and control away: the token must not be tried before it is known whether it was used."""
    control = Control(lose=["enroll"])
    with pytest.raises(OutcomeUnknown):
        await run(config, control)

    class Away(Line):
        async def identity(self):
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "away")

    control.said.clear()
    with pytest.raises(Unavailable):
        await obtain(config, WANTED, connect=lambda secret: Away(control, secret.reveal()), admit=by_token(Secret("t")), dice=os.urandom)
    assert control.said == []


async def test_a_damaged_draft_is_told(config):
    (config.state_directory / DRAFT_FILE).write_text('{"credential": "s3cret"')
    with pytest.raises(Refused) as refused:
        await run(config, Control())
    assert refused.value.code is Code.SETUP_FAILED
    assert "s3cret" not in str(refused.value)
