"""Every test runs in float64, from one seed, on one thread."""

import numpy as np
import pytest
import torch
import torch.distributed.tensor  # assert_close would, in seconds, within some test's time limit
from hypothesis import settings

settings.register_profile("rehead", derandomize=True, deadline=None)
settings.load_profile("rehead")


@pytest.fixture(autouse=True)
def _exact():
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def by_loops():
    """Attention as the seeds write it (A2-A4): one head and one query at a time, in NumPy."""

    def attend(query, key, value, seen=None, *, scale=None, reads=None):
        q, k, v = (t.detach().double().numpy() for t in (query, key, value))
        (B, L, H, E), S, K = q.shape, k.shape[1], k.shape[2]
        out = np.zeros((B, L, H, v.shape[-1]))
        for b, i, h in np.ndindex(B, L, H):
            kept = [j for j in range(S) if seen is None or seen[b % len(seen), i, j]]
            kv_head = h // (H // K) if reads is None else reads(h)
            if kept:
                logits = k[b, kept, kv_head] @ q[b, i, h] * (E**-0.5 if scale is None else scale)
                weights = np.exp(logits - logits.max())
                out[b, i, h] = weights @ v[b, kept, kv_head] / weights.sum()
        return torch.from_numpy(out)

    return attend
