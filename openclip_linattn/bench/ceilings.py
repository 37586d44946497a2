"""What the machine itself can do, measured in the same run, and the least time that an operator needs there."""

from dataclasses import dataclass

import torch

from openclip_linattn.bench.passes import FORWARD, TRAINING
from openclip_linattn.bench.timing import Clock, Run
from openclip_scaling.flops import ATTENTION_MACS, FLOP_PER_MAC, attention_macs

LEAST_TENSORS = {FORWARD: 4, TRAINING: 11}
"""Tensors of T bytes that must be read or written: Q, K, V, O; then Q, K, V, dO, dQ, dK, dV."""
ONE_ROW_TENSORS = {FORWARD: 3, TRAINING: 10}
"""lininfsa gives every token the same row, so its output is a view of it and is not written."""
TRAINING_FLOPS = 3
"""Products of forward and backward over those of forward alone, with nothing computed again."""

_BUFFER_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
_MATRIX = {"cpu": 2048, "cuda": 8192}
_REPEATS = 7


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of the machine, and how they were measured."""

    copy_bytes_per_s: float
    """Bytes read and written by torch's copy of a buffer far beyond the caches."""
    matmul_flops_per_s: float
    """FLOP (2 per multiply-add) of a product of two large matrices in the run's number type."""
    buffer_bytes: int
    matrix_size: int

    def floor_seconds(self, least_bytes: float, flops: float) -> float:
        """The least time: moving the bytes or doing the products, whichever takes longer."""
        return max(least_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, clock: Clock, *, tiny: bool = False
) -> Ceilings:
    """The best rates of some copies and some matrix products: what the machine can do, not what it does on average."""
    buffer_bytes = _BUFFER_BYTES[device.type] // (16 if tiny else 1)
    size = _MATRIX[device.type] // (4 if tiny else 1)
    return Ceilings(
        2 * buffer_bytes / _copy_seconds(device, buffer_bytes, clock),
        2 * size**3 / _product_seconds(device, dtype, size, clock),
        buffer_bytes,
        size,
    )


def _copy_seconds(device: torch.device, size: int, clock: Clock) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return _least(lambda: target.copy_(source), clock)


def _product_seconds(device: torch.device, dtype: torch.dtype, size: int, clock: Clock) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return _least(lambda: a @ b, clock)


def least_bytes(kind: str, direction: str, tensor_bytes: int) -> int:
    """The fewest bytes that an operator of that kind can move, from T, the bytes of one (B, H, N, D) tensor."""
    tensors = ONE_ROW_TENSORS if kind == "lininfsa" else LEAST_TENSORS
    return tensors[direction] * tensor_bytes


def product_flops(
    kind: str, direction: str, *, batch: int, heads: int, tokens: int, head_width: int
) -> float:
    """FLOP of the products of an operator; 0 for a kind that `openclip_scaling.flops` does not count."""
    if kind not in ATTENTION_MACS:
        return 0.0
    macs = batch * attention_macs(kind, tokens, heads * head_width, heads)
    return FLOP_PER_MAC * macs * (TRAINING_FLOPS if direction == TRAINING else 1)


def _least(run: Run, clock: Clock) -> float:
    run()
    return min(clock(run) for _ in range(_REPEATS))
