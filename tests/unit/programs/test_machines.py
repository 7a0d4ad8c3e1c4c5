"""Virtual machines are where the operator wants them, and nowhere else."""

import os

import pytest

from atoll.base.errors import Code, Refused
from atoll.programs import hosting, instance, machines
from atoll.programs.layout import Layout
from atoll.programs.machines import Machines
from atoll.programs.users import Account


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_INSTANCES", str(tmp_path / "instances"))
    layout = Layout(tmp_path / "home")
    instance.ensure_directories(layout, Account("me", os.geteuid(), os.getegid()))
    return layout


def dice(count):
    return bytes(range(count))


@pytest.mark.parametrize(("text", "found"), [("", None), ("off", Machines.OFF), ("kvm", Machines.KVM), ("emulated", Machines.EMULATED)])
def test_what_the_environment_says(text, found):
    assert machines.wanted({"ATOLL_MACHINES": text}) is found


def test_what_is_no_choice_is_refused():
    with pytest.raises(Refused) as refused:
        machines.wanted({"ATOLL_MACHINES": "yes"})
    assert refused.value.code is Code.INVALID_REQUEST


def test_the_operators_word_is_kept(place):
    assert instance.ensure_config(place, port=4000, dice=dice).machines is Machines.OFF
    assert instance.ensure_config(place, port=None, dice=dice, machines=Machines.KVM).machines is Machines.KVM
    kept = instance.ensure_config(place, port=None, dice=dice)
    assert (kept.machines, kept.port) == (Machines.KVM, 4000)
    assert hosting.load(place).machines is Machines.KVM
    assert instance.ensure_config(place, port=None, dice=dice, machines=Machines.OFF, may_move=False).machines is Machines.KVM
    assert instance.ensure_config(place, port=None, dice=dice, machines=Machines.OFF).machines is Machines.OFF


def test_a_configuration_of_before_has_none(place):
    instance.ensure_config(place, port=4000, dice=dice)
    text = "".join(line for line in place.config.read_text().splitlines(keepends=True) if not line.startswith("machines"))
    place.config.write_text(text)
    assert instance.load(place).machines is Machines.OFF
    place.config.write_text(text + 'machines = "sometimes"\n')
    with pytest.raises(Refused) as refused:
        instance.load(place)
    assert refused.value.code is Code.SETUP_FAILED
