"""Freed memory is kept, as the kernel counts pages that it had to supply."""

import json
import platform
import subprocess
import sys

import pytest

COUNT = """
import json, resource
from rehead.system.allocator import keeping_freed_memory, return_freed_memory
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        torch.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

return_freed_memory()
returned = faults()
with keeping_freed_memory():
    print(json.dumps([returned, faults()]))
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_is_kept():
    """Two hundred tensors of 4 MiB, one after the other: supplied a few times, or each time."""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    returned, kept = json.loads(done.stdout)
    assert kept < returned / 5
