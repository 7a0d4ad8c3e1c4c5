"""How a machine is a host, written down and read again; and what it registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.inventory import Overcommit
from atoll.programs import hosting, instance, subnets
from atoll.programs.hosting import DriverName, HostConfig, Reserve
from atoll.programs.layout import Layout

INSTALL = "ins_" + "0" * 20
WHOLE = HostConfig(
    install_id=INSTALL,
    name='worker "1"',
    control=("https://a.example:3443", "https://b.example:3443"),
    subnet=7,
    region="attic",
    labels={"disk": "ssd", "a b": "=\n"},
    reserve=Reserve(1000, 2048, 4096),
    overcommit=Overcommit(4.0, 1.5, 2.0),
    slots=99,
    driver=DriverName.FAKE,
    head_start_wait_s=7.5,
    joined=True,
)


@pytest.mark.parametrize("subnet", [7, 0, None])
def test_it_is_read_as_it_was_written(tmp_path: Path, subnet: int | None) -> None:
    from dataclasses import replace

    place = Layout(tmp_path)
    config = replace(WHOLE, subnet=subnet, authority=place.authority)
    hosting.save(place, config)
    assert hosting.load(place) == config
    before = place.host_config.stat().st_mtime_ns
    hosting.save(place, config)
    assert place.host_config.stat().st_mtime_ns == before


def test_an_instance_is_a_host_too(tmp_path: Path) -> None:
    place = Layout(tmp_path)
    instance.write_config(place, instance.Config(INSTALL, 4000, 3, "box"))
    found = hosting.load(place)
    assert (found.name, found.control, found.subnet, found.joined) == ("box", ("http://127.0.0.1:4001",), 3, False)
    assert found.slot_cidr == subnets.cidr(3)


def test_a_home_that_is_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        hosting.load(Layout(tmp_path))
    assert refused.value.code is Code.NOT_RUNNING


@pytest.mark.parametrize(
    "text",
    ["", "install_id = 1", 'install_id = "x"\nname = "a"\ncontrol = ["u"]', f'install_id = "{INSTALL}"\nname = "a"\ncontrol = ["u"]\nsubnet = 64',
     f'install_id = "{INSTALL}"\nname = "a"\ncontrol = ["u"]\ndriver = "none"', "[["],
)  # fmt: skip
def test_a_broken_file_is_told(tmp_path: Path, text: str) -> None:
    place = Layout(tmp_path)
    place.host_config.write_text(text)
    with pytest.raises(Refused) as refused:
        hosting.load(place)
    assert refused.value.code is Code.SETUP_FAILED
    assert str(place.host_config) in refused.value.message
