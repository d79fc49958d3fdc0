"""Memory in use: of the process, of tensors, of a cache."""

import gc
import os
import resource
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rehead.model import LanguageModel, evaluating

STATM = Path("/proc/self/statm")


def memory(device: torch.device) -> dict[str, int]:
    """Return bytes by name: `rss_bytes`, the resident memory of the process (only its peak, `rss_peak_bytes`,
    outside Linux); on CUDA also the bytes of tensors now, and their peak since the last call.
    """
    used = {}
    if STATM.exists():
        used["rss_bytes"] = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        used["rss_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        used["cuda_allocated_bytes"] = torch.cuda.memory_allocated(device)
        used["cuda_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return used


def peak_allocated(run: Callable[[], Any]) -> int:
    """Return the peak bytes of CPU tensors allocated during `run`.

    torch's allocator counts them, so they are the same in every run, unlike the resident memory.
    """
    run()  # allocates what is cached
    gc.collect()  # so that nothing older is freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = (event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]")
    moves = sorted(
        (event.start_ns(), event.nbytes()) for event in events if "CPU" in str(event.device_type())
    )
    return max(accumulate((n_bytes for _, n_bytes in moves), initial=0))


@torch.no_grad()
def held_cache_bytes(model: LanguageModel, n_token: int, batch_size: int = 1) -> int:
    """Return the bytes the cache holds after `n_token` tokens went through the model."""
    cache = model.new_cache(batch_size, n_token)
    ids = torch.zeros(batch_size, n_token, dtype=torch.long, device=model.device)
    with evaluating(model):
        model.hidden(ids, cache=cache)
    return sum(layer.n_bytes for layer in cache)
