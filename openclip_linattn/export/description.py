"""What a program needs to know that has exported files and nothing else."""

from pathlib import Path
from typing import Any

import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

from openclip_linattn.conversion.branches import CAPTIONS
from openclip_linattn.export.towers import Tower
from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.encoders.models import LoadedModel


def describe(
    checkpoint: Checkpoint, loaded: LoadedModel, towers: list[Tower], suffix: str, tokenizer_files: list[str]
) -> dict[str, Any]:
    """The content of export.json, for JSON.

    Logits are logit_scale * image features @ text features, + logit_bias where there is one. The tokenizer's example
    is a caption with its tokens, but for the padding.
    """
    clip = loaded.clip
    bias = getattr(clip, "logit_bias", None)
    described = {
        "model": checkpoint.model,
        "checkpoint": _name_of(checkpoint),
        "torch": torch.__version__,
        "normalized": True,
        "towers": {tower.part: _describe_tower(tower, suffix) for tower in towers},
        "preprocess": clip.visual.preprocess_cfg,
        "logit_scale": clip.logit_scale.exp().item(),
        "logit_bias": None if bias is None else bias.item(),
    }
    for tower in towers:
        if tower.part == "text":
            described["tokenizer"] = _describe_tokenizer(
                loaded.tokenizer, tower.batches[0][0], tokenizer_files
            )
    return described


def _name_of(checkpoint: Checkpoint) -> str:
    """The file with its run's name, but nothing of where this machine keeps them."""
    path: Path = checkpoint.path
    return str(path.relative_to(checkpoint.run.parent)) if checkpoint.run else path.name


def _describe_tower(tower: Tower, suffix: str) -> dict[str, Any]:
    batch = tower.batches[0]
    return {
        "file": f"{tower.part}{suffix}",
        "input": tower.input_name,
        "shape": ["batch", *batch.shape[1:]],
        "dtype": str(batch.dtype).removeprefix("torch."),
        "output": "features",
        "width": tower.expected[0].shape[-1],
    }


def _describe_tokenizer(tokenizer: Any, tokens: Tensor, files: list[str]) -> dict[str, Any]:
    """`tokens` are those of the first of `CAPTIONS`."""
    special: dict[str, Any]
    if isinstance(tokenizer, SimpleTokenizer):
        special = {"start": tokenizer.sot_token_id, "end": tokenizer.eot_token_id, "padding": 0}
    else:
        inner = tokenizer.tokenizer
        special = {"start": inner.bos_token_id, "end": inner.eos_token_id, "padding": inner.pad_token_id}
    return {
        "class": f"open_clip.tokenizer.{type(tokenizer).__name__}",
        "files": files,
        **special,
        "example": {
            "text": CAPTIONS[0],
            "tokens": [token for token in tokens.tolist() if token != special["padding"]],
        },
    }
