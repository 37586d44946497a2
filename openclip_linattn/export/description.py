"""What a program needs to know that has exported files and nothing else."""

import math
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

from openclip_linattn.conversion.branches import CAPTIONS
from openclip_linattn.errors import UserError
from openclip_linattn.export.towers import Tower
from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.encoders.models import LoadedModel


def describe(
    checkpoint: Checkpoint, loaded: LoadedModel, towers: list[Tower], suffix: str, tokenizer_files: list[str]
) -> dict[str, Any]:
    """The content of export.json, for JSON.

    Logits are logit_scale * image features @ text features, + logit_bias where there is one. The tokenizer's example
    is a caption with its tokens, but for the padding, and its options are the arguments that OpenCLIP gives its class.
    Raises UserError for a scale that is no number.
    """
    clip = loaded.clip
    scale = clip.logit_scale.exp().item()
    if not math.isfinite(scale):
        raise UserError("the model's own logit scale is NaN or infinite: export another checkpoint")
    bias = getattr(clip, "logit_bias", None)
    described = {
        "model": checkpoint.model,
        "checkpoint": _name_of(checkpoint),
        "torch": torch.__version__,
        "normalized": True,
        "towers": {tower.part: _describe_tower(tower, suffix) for tower in towers},
        "preprocess": clip.visual.preprocess_cfg,
        "logit_scale": scale,
        "logit_bias": None if bias is None else bias.item(),
    }
    for tower in towers:
        if tower.part == "text":
            described["tokenizer"] = {
                **_describe_tokenizer(loaded.tokenizer, tower.batches[0][0], tokenizer_files),
                "options": _tokenizer_options(checkpoint),
            }
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


def _tokenizer_options(checkpoint: Checkpoint) -> dict[str, Any]:
    """What OpenCLIP makes the tokenizer with besides its files: how texts are cleaned, say."""
    text = open_clip.get_model_config(checkpoint.model.replace("/", "-"))["text_cfg"]
    mode = {"tokenizer_mode": text["tokenizer_mode"]} if text.get("tokenizer_mode") else {}
    return {**text.get("tokenizer_kwargs", {}), **mode}


def _special_token(tokenizer: Any, *names: str) -> int | None:
    """The number of the first of these tokens that a tokenizer of transformers has; it complains of others."""
    known = tokenizer.special_tokens_map
    return next((getattr(tokenizer, f"{name}_token_id") for name in names if f"{name}_token" in known), None)


def _describe_tokenizer(tokenizer: Any, tokens: Tensor, files: list[str]) -> dict[str, Any]:
    """`tokens` are those of the first of `CAPTIONS`."""
    special: dict[str, Any]
    if isinstance(tokenizer, SimpleTokenizer):
        special = {"start": tokenizer.sot_token_id, "end": tokenizer.eot_token_id, "padding": 0}
    else:
        inner = tokenizer.tokenizer
        special = {
            "start": _special_token(inner, "bos", "cls"),  # BERT has the latter only
            "end": _special_token(inner, "eos", "sep"),
            "padding": _special_token(inner, "pad"),
        }
    return {
        "class": f"open_clip.tokenizer.{type(tokenizer).__name__}",
        "files": files,
        **special,
        "example": {
            "text": CAPTIONS[0],
            "tokens": [token for token in tokens.tolist() if token != special["padding"]],
        },
    }
