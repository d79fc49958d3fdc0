"""The memory that is left: of the machine, of control groups of both versions, of a process's own limit."""

import subprocess
import sys

import pytest

from rehead.system.machine import available_memory, physical_memory

FREE = 8_000_000_000


@pytest.fixture
def root(tmp_path):
    """A machine with 8 GB free and no limits."""
    (tmp_path / "proc/self").mkdir(parents=True)
    put(tmp_path, "proc/meminfo", f"MemTotal: 9999999 kB\nMemAvailable: {FREE // 1024:>8} kB\n")
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    return tmp_path


def put(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n".replace("\n\n", "\n"))


def group(root, folder, limit, used, stat, *, old=False):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        put(root, f"{folder}/{name}", value)


def test_without_a_limit_it_is_what_is_free(root):
    assert available_memory(root) == FREE
    assert available_memory(root / "nothing") == physical_memory()


def test_the_tightest_group_counts_without_the_files_it_holds(root):
    put(root, "proc/self/cgroup", "0::/a/b\n")
    group(root, "sys/fs/cgroup/a/b", "max", 10, "active_file 3")
    assert available_memory(root) == FREE
    group(root, "sys/fs/cgroup/a", 5_000_000, 4_000_000, "anon 9\ninactive_file 100\nactive_file 20\n")
    assert available_memory(root) == 1_000_120
    group(root, "sys/fs/cgroup", 3_000_000, 4_000_000, "inactive_file 100")
    assert available_memory(root) == 0


@pytest.mark.parametrize("place", ["sys/fs/cgroup/memory/docker/x", "sys/fs/cgroup/memory"])
def test_the_first_version_also_where_a_container_sees_only_its_own_group(root, place):
    put(root, "proc/self/cgroup", "5:devices:/docker/x\n4:cpu,memory:/docker/x\n0::/\n")
    stat = "inactive_file 1\nactive_file 2\ntotal_inactive_file 1000\ntotal_active_file 500"
    group(root, place, 2_000_000, 1_500_000, stat, old=True)
    assert available_memory(root) == 501_500


def test_a_group_without_subgroups_has_the_same_numbers_twice(root):
    put(root, "proc/self/cgroup", "4:memory:/x\n")
    stat = "inactive_file 1000\nactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 1"
    group(root, "sys/fs/cgroup/memory/x", 2_000_000, 1_500_000, stat, old=True)
    assert available_memory(root) == 501_001


@pytest.mark.process
def test_a_limit_of_addresses(tmp_path):
    """Where the rest of the machine, which others may use, says nothing."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").symlink_to("/proc/self/statm")
    code = f'from rehead.system.machine import *; print(available_memory(Path("{tmp_path}")))'
    limited = f"ulimit -v 2000000; exec {sys.executable} -c '{code}'"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, check=True, timeout=100)
    assert 2_000_000 * 1024 - 600_000_000 < int(done.stdout) < 2_000_000 * 1024
