"""A GPU that is not there: its tensors say cuda, are computed on the CPU, and refuse what CUDA refuses.

A plugin of pytest, for a process of its own: `PRETENDED_GPU` names the library that `build` makes, which PyTorch must
find before it looks for a GPU. It shows what is on the wrong device, and nothing about kernels, memory or speed.
"""

import ctypes
import os
import subprocess
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

if "PRETENDED_GPU" in os.environ:
    ctypes.CDLL(os.environ["PRETENDED_GPU"])

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rehead.checkpoint.files.deferred import Deferred

GPU = torch.device("cuda", 0)
BYTES = 80 * 2**30
aten = torch.ops.aten
ACROSS = (aten.copy_.default, aten._to_copy.default)
"""Operations that take from one device to another."""
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
"""Operations whose indices may be on the CPU."""


def build(folder):
    """Compile pretended_gpu.cpp for the installed PyTorch; return the library's path."""
    torch_folder = Path(find_spec("torch").origin).parent
    library, libraries = folder / "pretended_gpu.so", torch_folder / "lib"
    source = Path(__file__).with_suffix(".cpp")
    flags = ["-std=c++20", "-shared", "-fPIC", "-O0", f"-I{torch_folder / 'include'}"]
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run(["c++", *flags, str(source), "-o", str(library), *links], check=True)
    return library


class OnGPU(torch.Tensor):
    """A tensor of the GPU; its values are in `held`."""

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), device=GPU, **layout)
        made.held = held
        return made

    def __repr__(self, **_):
        return f"OnGPU({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, Deferred) for kind in types):
            return NotImplemented  # its values come first
        return execute(operation, args, kwargs or {})


class Generator(torch.Generator):
    """A generator that knows for which device it was made."""

    on_gpu: ClassVar = set()

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, device="cpu")
        (cls.on_gpu.add if torch.device(device).type == "cuda" else cls.on_gpu.discard)(made._cdata)
        return made


def execute(operation, args, kwargs):
    """Run an operation on the values, as the GPU would: all tensors there, but for numbers and indices."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    mine = [x for x in tensors if isinstance(x, OnGPU)]
    device = kwargs.get("device")
    goes_there = torch.device(device).type == "cuda" if device is not None else bool(mine)
    if operation not in ACROSS and mine:
        require_there(operation, args, tensors)
    drawn = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)]
    if any((x._cdata in Generator.on_gpu) != goes_there for x in drawn):
        raise RuntimeError(f"{operation}: a generator of another device")
    if operation is aten._fused_sdp_choice.default:
        return 0  # the kernel that is written in other operations
    if operation is aten.is_pinned.default:
        return False
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    held = {id(x.held): x for x in mine}
    out = operation(*tree_map(of, args), **tree_map(of, kwargs))
    if operation is aten.copy_.default:
        return args[0]

    def there(x):
        if not isinstance(x, torch.Tensor) or isinstance(x, OnGPU) or any(x is y for y in tensors):
            return x
        return held[id(x)] if id(x) in held else OnGPU(x) if goes_there else x

    return tree_map(there, out)


def require_there(operation, args, tensors):
    """Refuse what CUDA refuses: tensors of both devices, results on the CPU, kernels that are not there."""
    if operation.namespace == "rehead":
        raise RuntimeError(f"{operation} has no kernel for cuda")
    on_cpu = [x for x in tensors if not isinstance(x, OnGPU) and x.dim() > 0]
    if operation in INDEXED and isinstance(args[0], OnGPU):
        on_cpu = [x for x in args[2:3] if not isinstance(x, OnGPU) and x.dim() > 0]
    written = [
        x
        for x, of_schema in zip(args, operation._schema.arguments, strict=False)
        if of_schema.alias_info is not None and of_schema.alias_info.is_write
    ]
    on_cpu += [x for x in written if isinstance(x, torch.Tensor) and not isinstance(x, OnGPU)]
    if on_cpu:
        raise RuntimeError(f"{operation}: tensors on cuda and cpu, of {[tuple(x.shape) for x in on_cpu]}")


def of(x):
    return x.held if isinstance(x, OnGPU) else x


class Operations(TorchDispatchMode):
    """Catches the operations that get no tensor of the GPU, as `torch.zeros(3, device="cuda")`."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, Deferred) for kind in types):
            return NotImplemented  # its values come first
        with self:
            parts = operation.decompose(*args, **kwargs or {})
        if parts is not NotImplemented:
            return parts
        return execute(operation, args, kwargs or {})


class Calls(TorchFunctionMode):
    """Does what C++ would do before it comes to an operation, and could not do here."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is DEVICE:
            return func(*args, **kwargs)
        if func is torch.Tensor.tolist:
            return func(of(args[0]))
        if func in (torch.tensor, torch.as_tensor) and numbered(kwargs.get("device")) == GPU:
            grad = kwargs.get("requires_grad", False)
            rest = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad")}
            return func(*args, **rest).to(GPU).requires_grad_(grad)
        return func(*map(numbered, args), **{key: numbered(value) for key, value in kwargs.items()})


DEVICE = torch.device


def numbered(x):
    """Return cuda:0 for cuda."""
    is_one = isinstance(x, DEVICE) and x.type == "cuda"
    return GPU if is_one or (isinstance(x, str) and x == "cuda") else x


@contextmanager
def pretending():
    """Within the block the machine has a GPU."""
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "a GPU that is not there",
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "mem_get_info": (BYTES, BYTES),
        "get_device_properties": SimpleNamespace(multi_processor_count=100, total_memory=BYTES),
        "get_device_capability": (9, 0), "is_bf16_supported": True, "_lazy_init": None, "synchronize": None,
        "reset_peak_memory_stats": None, "empty_cache": None, "set_device": None, "set_rng_state": None,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
        patch.setattr(torch, "Generator", Generator)
        # Tensors of a subclass can be swapped, but not put into each other, nor read in inference mode.
        patch.setattr(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with Calls(), Operations():
                yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)


@pytest.fixture(autouse=True)
def _there(_exact):
    with pretending():
        yield
