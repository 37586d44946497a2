"""Tensors that say they are on a GPU, where there is none: their numbers lie in the memory of the CPU.

An operation on such a tensor and on one of the CPU fails as it does on a GPU, and so does what hands one to NumPy. The
custom operators of this package run their own Python code on them, down to the single operations and the launches of
Triton's kernels. While gradients are recorded autocast leaves them alone, and under `torch.no_grad` it casts as on a
GPU: PyTorch asks for the device in C++, where autograd would look for a stream of the card.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from openclip_linattn.ops.kernels import implementation

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")
_NAMESPACE = "openclip_linattn"
_MOVES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
# On a GPU the indices may be on the CPU.
_INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


class OnCard(torch.Tensor):
    """A tensor of the pretended card around `inner`, a tensor of the CPU with the same memory."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_subclass(
            cls, inner, inner.requires_grad, dispatch_device=True, device_for_backend_keys=CARD
        )
        self.inner = inner.detach()
        return self

    device = property(lambda self: CARD)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return CARD if PretendedCard.casts else CPU
        if func.namespace == _NAMESPACE:
            return _by_our_own_code(func, args)
        _check_devices(func, args, kwargs)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], OnCard):
            return func(args[0], args[1].inner)
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return return_and_correct_aliasing(func, args, kwargs, tree_map(_wrapped, out))


class PretendedCard(TorchFunctionMode):
    """Within it tensors can be made on the card, moved to it and taken from it."""

    casts = False
    """Whether autocast is to see the card. Within an operation PyTorch says that autocast is off."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        PretendedCard.casts = torch.is_autocast_enabled("cuda") and not torch.is_grad_enabled()
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return _moved(args[0], CPU if func is torch.Tensor.cpu else CARD)
        if func is torch.Tensor.to:
            return _to(*args, **kwargs)
        device = kwargs.get("device")
        reads_only = func is torch._C._nn._parse_to  # what Module.to is asked for
        if device is None or reads_only or torch.device(device).type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        out = func(*args, **{**kwargs, "device": CPU})
        return tree_map(lambda x: _moved(x, device) if isinstance(x, torch.Tensor) else x, out)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(x, device):
        return OnCard(x.clone()) if device.type == "cuda" else x.inner.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.device = inputs[0].device

    @staticmethod
    def backward(ctx, grad):
        return _moved(grad, ctx.device), None


def _moved(x: Any, device: Any) -> Any:
    device = torch.device(device)
    same = x.device.type == device.type or "meta" in (x.device.type, device.type)
    return x if same else _Move.apply(x, device)


def _to(x, *args, **kwargs):
    """Tensor.to in all its forms."""
    given = [*args, *kwargs.values()]
    device = next((torch.device(each) for each in given if isinstance(each, (str, torch.device))), None)
    if device is not None and device.type == "meta":
        return torch.Tensor.to(x, *args, **kwargs)
    other = next((each for each in given if isinstance(each, torch.Tensor)), None)
    dtype = next((each for each in given if isinstance(each, torch.dtype)), None)
    if other is not None:
        device, dtype = other.device, other.dtype
    moved = x if device is None else _moved(x, device)
    copy = kwargs.get("copy", False) and moved is x
    return torch.Tensor.to(moved, dtype or x.dtype, copy=copy)


def _by_our_own_code(func: Any, args: Any) -> Any:
    name = func._schema.name.removeprefix(f"{_NAMESPACE}::")
    *given, kernel = args
    module = implementation(name.removesuffix("_backward").removesuffix("_attention"), kernel)
    with torch.no_grad(), PretendedCard():
        return (module.backward if name.endswith("_backward") else module.forward)(*given)


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    if func in _MOVES:
        return
    looked_at = args[0] if func in _INDEXED and isinstance(args[0], OnCard) else (args, kwargs)
    tensors = [x for x in tree_leaves(looked_at) if isinstance(x, torch.Tensor)]
    strange = [x for x in tensors if not isinstance(x, OnCard) and x.dim() > 0]
    if strange and any(isinstance(x, OnCard) for x in tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got one of shape {tuple(strange[0].shape)} on "
            "the CPU beside those on the card"
        )


def _inner(x: Any) -> Any:
    if isinstance(x, OnCard):
        return x.inner
    return CPU if isinstance(x, torch.device) else x


def _wrapped(x: Any) -> Any:
    return OnCard(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnCard) else x
