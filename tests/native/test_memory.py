"""A kernel without memory for its buffers raises; each case in a process of its own, which the exception would end."""

import subprocess
import sys

import pytest

from rehead.decoding.native_op import kernel
from rehead.native import KernelUnavailable

START = """
import resource, sys, torch
torch.set_num_threads(2)
from rehead.errors import ResourceError
from rehead.native import sequence

def refused(call):
    try:
        call()
    except ResourceError as error:
        assert "no memory for the buffers" in str(error), error
    else:
        raise AssertionError("no error")
"""
FORWARD = """
x = torch.ones(1, 1, 2, 3)
endless = x.expand(1, 2**42, 2, 3)
refused(lambda: sequence.attend(x, endless, endless, None, False, 0, 0, 1.0))
small = sequence.attend(x, x, x, None, False, 0, 0, 1.0)
assert torch.equal(small, x)
"""
BACKWARD = """
query, keys = torch.ones(1, 1, 2, 3), torch.ones(1, 2**20, 2, 3, requires_grad=True)
out = sequence.attend(query, keys, keys, None, False, 0, 0, 1.0)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 4 * keys.nbytes, resource.RLIM_INFINITY))
refused(lambda: out.sum().backward())
"""
DECODED = """
from rehead.config import ModelOptions
from rehead.decoding.lowering import lowered
from rehead.decoding.native_op import Kind
from rehead.decoding.native_program import NativeProgram
from rehead.model import build
model = build(ModelOptions(n_layer=1, n_embd=12, n_query_head=2).resolve(11, 16)).eval()
stores = [dict(zip(cache.rows, cache.stores)) for cache in model.new_cache(1, 16)]
program, ids, start = NativeProgram(lowered(model), stores, 16), torch.tensor([1]), torch.tensor([0])
first = program(ids, start).clone()
attend, = [op for op in program._array if op.kind == Kind.ATTEND]
group, attend.group = attend.group, 2**50
refused(lambda: program(ids, start))
attend.group = group
assert torch.equal(program(ids, start), first)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space")
@pytest.mark.skipif(isinstance(kernel(), KernelUnavailable), reason=str(kernel()))
@pytest.mark.parametrize("case", [FORWARD, BACKWARD, DECODED], ids=["forward", "backward", "decoded"])
def test_a_kernel_without_memory_raises(case):
    done = subprocess.run([sys.executable, "-c", START + case], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:] or done.returncode
