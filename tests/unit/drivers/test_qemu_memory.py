"""What a process has written of a file that it maps privately is gathered into the file, and nothing else."""

import contextlib
import mmap
import os
import subprocess
import sys

import pytest

from atoll.drivers.qemu import memory

PAGES = 64
SCRIPT = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE)
for line in sys.stdin:
    place, text = line.split()
    if text == "read":
        m[int(place)]
    else:
        m[int(place):int(place) + len(text)] = text.encode() if text != "zero" else bytes(4)
    print("done", flush=True)
"""


class Mapper:
    """A process that maps a file privately, reads and writes."""

    def __init__(self, file):
        self.file = file
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, place, text):
        self.process.stdin.write(f"{place} {text}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def gather(self):
        return memory.gather(self.process.pid, self.file)


@pytest.fixture
def mapper(tmp_path):
    file = tmp_path / "memory"
    with file.open("wb") as made:
        made.truncate(PAGES * mmap.PAGESIZE)
    made = Mapper(file)
    yield made
    made.process.stdin.close()
    made.process.wait()
    made.process.stdout.close()


def test_what_was_written_is_in_the_file_afterwards(mapper):
    mapper.do(0, "first")
    mapper.do(17 * mmap.PAGESIZE + 5, "second")
    mapper.do(18 * mmap.PAGESIZE, "third")
    mapper.do(30 * mmap.PAGESIZE, "read")
    assert mapper.file.read_bytes() == bytes(PAGES * mmap.PAGESIZE), "nobody else sees it before"
    assert mapper.gather() == 3 * mmap.PAGESIZE
    content = mapper.file.read_bytes()
    assert content[:5] == b"first"
    assert content[17 * mmap.PAGESIZE + 5 :][:6] == b"second"
    assert content[18 * mmap.PAGESIZE :][:5] == b"third"
    assert len(content) == PAGES * mmap.PAGESIZE
    assert mapper.file.stat().st_blocks * 512 <= 8 * mmap.PAGESIZE, "the rest is not on the disk"


def test_a_second_gathering_begins_from_the_first(mapper):
    mapper.do(0, "first")
    mapper.gather()
    mapper.do(0, "later")
    mapper.do(mmap.PAGESIZE, "other")
    mapper.gather()
    content = mapper.file.read_bytes()
    assert (content[:5], content[mmap.PAGESIZE :][:5]) == (b"later", b"other")


def test_zeros_replace_what_was_there(mapper):
    mapper.do(0, "something")
    mapper.gather()
    for place in range(0, 12, 4):
        mapper.do(place, "zero")
    mapper.do(5 * mmap.PAGESIZE, "zero")
    mapper.gather()
    assert mapper.file.read_bytes() == bytes(PAGES * mmap.PAGESIZE)


def test_another_mapping_of_the_file_begins_from_what_was_gathered(mapper):
    mapper.do(3 * mmap.PAGESIZE, "kept")
    mapper.gather()
    second = Mapper(mapper.file)
    second.do(0, "own")
    assert second.gather() == mmap.PAGESIZE
    second.process.communicate()
    assert mapper.file.read_bytes()[3 * mmap.PAGESIZE :][:4] == b"kept"


def test_a_process_without_the_file_is_refused(mapper, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(mmap.PAGESIZE))
    with pytest.raises(OSError, match="as its memory"):
        memory.gather(mapper.process.pid, other)
    with contextlib.suppress(FileNotFoundError):
        memory.gather(2**22 + 1, mapper.file)
        pytest.fail("nobody has this number")


def test_a_map_is_read_by_inode_and_device():
    device = os.makedev(0xFD, 0x02)
    text = (
        "7f0000000000-7f0000002000 rw-p 00001000 fd:02 77 /vm/memory\n"
        "7f0000004000-7f0000005000 rw-p 00000000 fd:03 77 /elsewhere\n"
        "7f0000006000-7f0000007000 rw-p 00000000 00:00 0 \n"
        "7f0000008000-7f0000009000 rw-p 00003000 fd:02 77 /vm/memory (deleted)\n"
    )
    assert memory.regions(text, 77, device) == [
        memory.Region(0x7F0000000000, 0x7F0000002000, 0x1000),
        memory.Region(0x7F0000008000, 0x7F0000009000, 0x3000),
    ]
