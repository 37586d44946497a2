"""Test only: the training entrypoint under torchrun on CPU, where OpenCLIP's DDP call is refused by torch.

OpenCLIP passes device_ids, which torch accepts for accelerators only; nothing else is changed.
"""

import sys
from typing import Any

import torch

_Stock = torch.nn.parallel.DistributedDataParallel


class _OnCpu(_Stock):
    def __init__(self, module: torch.nn.Module, device_ids: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


torch.nn.parallel.DistributedDataParallel = _OnCpu

if __name__ == "__main__":
    from openclip_linattn.train import main

    sys.exit(main())
