"""Set before anything is imported: Triton decides at import time whether its interpreter runs the kernels."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
