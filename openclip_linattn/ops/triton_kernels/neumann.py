"""Neumann linear attention: passes over the tokens in Triton, one small solve per head in PyTorch.

Float32 heads wider than 64 go to `torch_kernels`: the matrices that they are multiplied with do not fit together
into the shared memory of a multiprocessor.
"""

from torch import Tensor

from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients
from openclip_linattn.ops.small_systems import saved_shape, solution, solve_backward, solve_forward
from openclip_linattn.ops.torch_kernels import neumann as in_torch
from openclip_linattn.ops.triton_kernels.chunks import tokens_per_program
from openclip_linattn.ops.triton_kernels.launch import Tile, choose, choose_from, on_device_of, rows
from openclip_linattn.ops.triton_kernels.neumann_kernels import (
    input_gradients_kernel,
    output_gradients_kernel,
    output_kernel,
    sum_kernel,
)

# As in `launch`: not timed, and chosen by what the assembler reports.
_SUM = {
    (2, 16): Tile(64, 4, 2),
    (2, 32): Tile(64, 4, 2),
    (2, 64): Tile(64, 8, 2),
    (2, 128): Tile(32, 8, 2),
    (4, 16): Tile(32, 4, 2),
    (4, 32): Tile(16, 4, 2),
    (4, 64): Tile(16, 8, 2),
}
_INPUT_GRADIENTS = {**_SUM, (2, 64): Tile(64, 8, 2, registers=128), (2, 128): Tile(64, 16, 2)}


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of what the small solves save."""
    if _too_wide(q, v):
        return in_torch.state_shape(q, v)
    return (*q.shape[:2], *saved_shape(q.shape[-1], v.shape[-1]))


def forward(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, Dv) and the state for `backward`.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), gamma (H,) or (B, H), float32.
    """
    if _too_wide(q, v):
        return in_torch.forward(q, k, v, gamma)
    o = empty_output(q, v)
    batch, heads, tokens, d = q.shape
    chunk = tokens_per_program(q)
    grid = (batch * heads, -(-tokens // chunk))
    line = 3 * (d + 1) + v.shape[-1]
    partial = q.new_empty(grid[1], batch, heads, d + 1, line, dtype=compute_dtype(q))
    with on_device_of(q):
        blocks, options = choose_from(_SUM, q, v)
        sum_kernel[grid](rows(q), rows(k), rows(v), partial, heads, tokens, chunk, blocks, **options)
        gram_q, gram_k, cross, summed = _total(partial).split([d + 1] * 3 + [v.shape[-1]], -1)
        x, state = solve_forward(gram_q, gram_k, cross, summed, tokens, _per_head(gamma))
        blocks, options = choose(q, v, backward=False)
        output_kernel[grid](rows(q), rows(o), x.contiguous(), heads, tokens, chunk, blocks, **options)
    return o, state


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of q, k and v in one buffer (B, N, 2 H D + H Dv), and that of gamma."""
    if _too_wide(q, v):
        return in_torch.backward(do, q, k, v, state, gamma)
    gradients = empty_gradients(q, v)
    batch, heads, tokens, d = q.shape
    dq, dk, dv = (rows(x) for x in split_gradients(gradients, heads, d))
    inputs = rows(do), rows(q), rows(k), rows(v)
    chunk = tokens_per_program(q)
    grid = (batch * heads, -(-tokens // chunk))
    partial = state.new_empty(grid[1], batch, heads, d + 1, v.shape[-1])
    with on_device_of(q):
        blocks, options = choose(q, v, backward=True)
        output_gradients_kernel[grid](*inputs[:2], partial, heads, tokens, chunk, blocks, **options)
        of_system = solve_backward(_total(partial), state)
        matrices = (m.contiguous() for m in (solution(state, v.shape[-1]), *of_system[:4]))
        blocks, options = choose_from(_INPUT_GRADIENTS, q, v)
        input_gradients_kernel[grid](*inputs, *matrices, dq, dk, dv, heads, tokens, chunk, blocks, **options)
    return gradients, of_system.gamma.sum_to_size(_per_head(gamma).shape).view_as(gamma)


def _total(partial: Tensor) -> Tensor:
    """The sum of partial sums (chunks, B, H, ...), in a fixed order."""
    return partial[0] if partial.shape[0] == 1 else partial.sum(0)


def _per_head(gamma: Tensor) -> Tensor:
    """gamma (H,) or (B, H) as (1 or B, H, 1, 1)."""
    return gamma.reshape(-1, gamma.shape[-1], 1, 1)


def _too_wide(q: Tensor, v: Tensor) -> bool:
    return q.element_size() == 4 and max(q.shape[-1], v.shape[-1]) > 64
