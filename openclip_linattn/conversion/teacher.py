"""Looks at the teacher of a training command, before OpenCLIP builds it."""

import argparse
from pathlib import Path
from typing import Any

import open_clip

from openclip_linattn.errors import UserError
from openclip_linattn.registration import model_name


def check_teacher(args: argparse.Namespace) -> None:
    """Raises UserError where --distill-model and --distill-pretrained cannot teach the model of the command.

    OpenCLIP ignores one without the other, and hands the teacher the images and tokens of the model in training.
    """
    teacher, weights = args.distill_model, args.distill_pretrained
    if teacher is None and weights is None:
        return
    if teacher is None or weights is None:
        raise UserError("--distill-model and --distill-pretrained go together: OpenCLIP ignores one alone")
    if args.accum_freq > 1:
        raise UserError(
            "--accum-freq does not go with --distill-model: OpenCLIP cannot do both; leave one out"
        )
    if ":" in teacher:
        return
    name = model_name(teacher)
    if not Path(weights).is_file() and not open_clip.get_pretrained_cfg(name, weights):
        raise UserError(f"--distill-pretrained {weights}: no such file, and no pretrained tag of {name}")
    if ":" not in args.model:
        _check_inputs(name, open_clip.get_model_config(name), args)


def _check_inputs(name: str, config: dict[str, Any], args: argparse.Namespace) -> None:
    student = open_clip.get_model_config(model_name(args.model))
    size = args.force_image_size or student["vision_cfg"].get("image_size", 224)
    context = args.force_context_length or student["text_cfg"].get("context_length", 77)
    wanted = _sides(config["vision_cfg"].get("image_size", 224)), config["text_cfg"].get("context_length", 77)
    if (_sides(size), context) != wanted:
        raise UserError(
            f"the teacher {name} takes images of {wanted[0]} px and texts of {wanted[1]} tokens, and {args.model} is "
            f"trained on {_sides(size)} px and {context} tokens: OpenCLIP hands both the same"
        )


def _sides(size: Any) -> tuple[int, int]:
    sides = list(size) if isinstance(size, (list, tuple)) else [size]
    return sides[0], sides[-1]
