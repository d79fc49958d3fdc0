"""The registered operators refuse what they cannot compute, in words; memory faults would end the process."""

import subprocess
import sys

import pytest

from rehead.native import KernelUnavailable
from rehead.native import sequence as native

pytestmark = pytest.mark.skipif(isinstance(native.kernel(), KernelUnavailable), reason=str(native.kernel()))

REFUSED = """
import torch
import rehead.native.sequence
ops, n = torch.ops.rehead, 1 << 20
x, half, few = torch.randn(n), torch.randn(n, dtype=torch.bfloat16), torch.randn(3)
q = torch.randn(1, 64, 2, 8)
rule = True, 0, 0, 1.0
out, logs = ops.attend(q, q, q, None, *rule)
none = q[:, :, :0]
calls = {
    "gelu": lambda: ops.gelu(half), "gelu, double": lambda: ops.gelu(x.double()),
    "gelu_backward": lambda: ops.gelu_backward(half, half), "upstream": lambda: ops.gelu_backward(x, half),
    "few": lambda: ops.gelu_backward(x, few),
    "attend": lambda: ops.attend(q.half(), q.half(), q.half(), None, *rule),
    "no heads": lambda: ops.attend(none, none, none, None, *rule),
    "window": lambda: ops.attend(q, q, q, None, True, -5, 0, 1.0),
    "dropped": lambda: ops.attend(q, q, q, None, True, 0, 1 << 15, 1.0),
    "out": lambda: ops.attend_backward(q, q, q, None, out[:, :1], logs, out, *rule),
    "logs": lambda: ops.attend_backward(q, q, q, None, out, logs[:, :1, :1], out, *rule),
    "gradient": lambda: ops.attend_backward(q, q, q, None, out, logs, out[:, :1], *rule),
    "half logs": lambda: ops.attend_backward(q, q, q, None, out, logs.half(), out, *rule),
    "half gradient": lambda: ops.attend_backward(q, q, q, None, out, logs, out.half(), *rule),
}
for name, call in calls.items():
    try:
        call()
    except ValueError as error:
        assert "\\n" not in str(error), error
    else:
        raise AssertionError(f"{name} was computed")
wide = torch.empty(1, 64, 2, 16)[..., ::2].copy_(out)
spread = torch.empty(1, 2, 128)[..., ::2].copy_(logs)
plain = ops.attend_backward(q, q, q, None, out, logs, out, *rule)
for left, right in zip(plain, ops.attend_backward(q, q, q, None, wide, spread, wide, *rule), strict=True):
    assert torch.equal(left, right)
"""


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_what_an_operator_cannot_compute_is_refused(flags):
    done = subprocess.run(
        [sys.executable, *flags, "-c", REFUSED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:] or done.returncode
