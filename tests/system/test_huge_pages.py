"""Weights in huge pages."""

import copy
import gc
import mmap
import pickle
import re
from pathlib import Path

import pytest
import torch
import transformers

from rehead.checkpoint import load, own
from rehead.system import huge_pages
from rehead.system.huge_pages import ALIGNMENT, BLOCK, PAGE, HugePages

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_pages = pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="this system has no huge pages"
)


def resident():
    """Bytes of this process in huge pages."""
    return sum(
        int(size) * 1024
        for size in re.findall(r"AnonHugePages: +(\d+)", Path("/proc/self/smaps").read_text())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copies_are_tensors_like_any_other(dtype):
    pages = HugePages()
    given = [torch.randn(shape).to(dtype) for shape in [(3, 5), (1,), (0, 4), (700, 301), ()]]
    kept = [pages.keep(tensor) for tensor in given]
    for one, other in zip(kept, given, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == dtype
        assert one.is_contiguous()
        assert one.data_ptr() % ALIGNMENT == 0
        assert torch.equal(copy.deepcopy(one), other)
        assert torch.equal(pickle.loads(pickle.dumps(one)), other)
        assert one.untyped_storage().nbytes() == other.nbytes
    kept[0].zero_()
    assert given[0].any()
    for one, other in zip(kept[1:], given[1:], strict=True):
        assert torch.equal(one, other)


@needs_pages
def test_they_lie_in_huge_pages_and_are_freed():
    gc.collect()  # what earlier tests left would be freed meanwhile
    before, pages = resident(), HugePages()
    kept = [pages.keep(torch.ones(BLOCK // 16)) for _ in range(6)]  # two blocks, a quarter each
    assert resident() - before >= 6 * BLOCK // 4 - 2 * PAGE
    assert all(one.eq(1).all() for one in kept)
    larger = pages.keep(torch.ones(BLOCK // 4 + 1))
    assert larger.eq(1).all()
    del kept, larger, pages
    gc.collect()
    assert resident() - before < BLOCK // 4


@needs_pages
def test_a_loaded_model_lies_there(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    gc.collect()
    before = resident()
    model = load(tmp_path)
    assert resident() - before >= sum(weight.nbytes for weight in model.parameters()) - PAGE


@pytest.mark.parametrize("missing", ["advice", "kernel", "addresses"])
def test_without_huge_pages_memory_is_ordinary(missing, monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    def refused(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    if missing == "advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(huge_pages.mmap, "mmap", Mapping if missing == "kernel" else refused)
    given = torch.randn(40)
    kept = HugePages().keep(given)
    assert torch.equal(kept, given)
    assert (kept is given) == (missing != "kernel")


def test_weights_for_another_device_are_not_copied_first(tmp_path, monkeypatch):
    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=3
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    taken = []
    monkeypatch.setattr(
        huge_pages, "_block", lambda n_bytes, block=huge_pages._block: taken.append(1) or block(n_bytes)
    )
    monkeypatch.setattr(own, "choose_device", torch.device)  # meta stands for a GPU
    assert load(tmp_path, device="meta").head.weight.is_meta
    assert not taken
    given = torch.randn(40)
    for device in ("meta", "cuda:0", "mps"):
        assert HugePages(device).keep(given) is given
    if hasattr(mmap, "MADV_HUGEPAGE"):
        load(tmp_path)
        assert taken
