"""The operators in plain torch, a cache-sized block of tokens at a time, each with its gradient by hand.

They run on every device. A module per operator, all with the same functions on plain tensors below autograd:
`forward(q, k, v, ...) -> (o, state)`, `backward(do, q, k, v, state, ...) -> gradients` and
`state_shape(q, v)`. Layouts are those of `openclip_linattn.ops.layout`.
"""
