"""Converts a checkpoint of an OpenCLIP ViT to another attention, and makes sure that the result loads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import open_clip
import torch

from openclip_linattn import add_model_configs
from openclip_linattn.configs import read_config
from openclip_linattn.conversion.branches import CAPTIONS, branch_sizes, noise_images
from openclip_linattn.conversion.convert import check_kind, convert_places
from openclip_linattn.conversion.places import TowerPlace, find_place
from openclip_linattn.conversion.sources import load_source
from openclip_linattn.conversion.targets import Target, choose_target
from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path, write_json
from openclip_linattn.towers import kinds_label
from openclip_linattn.zeroshot.checkpoints import CONVERTED_FROM, Checkpoint
from openclip_linattn.zeroshot.encoders.models import LoadedModel

PREPROCESSING = ("image_mean", "image_std", "image_interpolation", "image_resize_mode")


@dataclass(frozen=True)
class BranchRow:
    """The size (root mean square) of one block's attention output before and after; see `branch_sizes`."""

    tower: str
    block: int
    before: float
    after: float


@dataclass(frozen=True)
class Conversion:
    """What became of a checkpoint: the file, the model that it loads into, and what there is to know."""

    source: Path
    source_model: str
    source_kinds: Mapping[str, str]
    output: Path
    model: str
    config: Path | None
    rescaled: bool
    branches: list[BranchRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def convert_checkpoint(
    source: str,
    kind: str,
    *,
    model: str | None = None,
    text: bool = False,
    last: int | None = None,
    rescale: bool = True,
    output: Path | None = None,
) -> Conversion:
    """Writes the checkpoint `source` with attention of `kind`, loaded once more through OpenCLIP to make sure of it.

    The file holds `state_dict`, and what it was made from; optimizer state and epoch stay behind. Where no registered
    model has the shape, the config of a new one is written beside it, for `openclip_linattn.add_model_configs` and
    OPENCLIP_LINATTN_MODEL_CONFIGS.

    Args:
        source, model: see `load_source`.
        kind: the new attention of the image tower.
        text: whether the text tower is converted too, to the causal form.
        last: convert only the last so many blocks of each tower; those before them keep, and must have, softmax.
        rescale: see `convert_attention`.
        output: the new file; by default <model>.pt in the current folder.

    Raises UserError where the source cannot be found, loaded or converted, and where the output exists.
    """
    check_kind(kind)
    if output is not None:
        _check_output(output)  # before weights are downloaded and read
    checkpoint, loaded = load_source(source, model)
    clip = loaded.clip
    _check_weights(checkpoint, clip)
    target = _target(checkpoint, clip, kind, text=text, last=last)
    if output is None:
        output = Path(f"{target.name}.pt")
        _check_output(output)
    places = [_place(clip, part, target) for part in (("image", "text") if text else ("image",))]
    kinds = {place.part: kinds_label(place.kinds) for place in places}
    before = [branch_sizes(clip, place, loaded.tokenizer) for place in places]
    convert_places(places, kind, blocks=target.tower.last, rescale=rescale)
    after = [branch_sizes(clip, place, loaded.tokenizer) for place in places]
    conversion = Conversion(
        source=checkpoint.path,
        source_model=checkpoint.model,
        source_kinds=kinds,
        output=output,
        model=target.name,
        config=None if target.registered else output.with_name(f"{target.name}.json"),
        rescaled=rescale,
        branches=[
            BranchRow(place.part, block, *sizes)
            for place, *pair in zip(places, before, after, strict=True)
            for block, sizes in enumerate(zip(*pair, strict=True))
        ],
        notes=_notes(checkpoint, clip),
    )
    _write(conversion, target, loaded)
    return conversion


def _target(checkpoint: Checkpoint, clip: Any, kind: str, *, text: bool, last: int | None) -> Target:
    config = open_clip.get_model_config(checkpoint.model.replace("/", "-"))
    context = checkpoint.settings.get("force_context_length")
    if context is not None:
        config["text_cfg"]["context_length"] = context
    return choose_target(
        checkpoint.model,
        config,
        kind,
        text=text,
        last=last,
        custom_text=isinstance(clip, open_clip.CustomTextCLIP),
        image_size=clip.visual.image_size,
    )


def _place(clip: Any, part: str, target: Target) -> TowerPlace:
    """The tower with the training length of its family, whatever the size of its images was."""
    place = find_place(clip, part)
    tokens = target.tower.train_tokens if part == "image" else target.tower.text_train_tokens
    return replace(place, train_tokens=tokens or place.train_tokens)


def _check_weights(checkpoint: Checkpoint, clip: Any) -> None:
    """Raises UserError for weights that are not finite, as of a run that diverged: no conversion can be checked."""
    broken = [name for name, weight in clip.named_parameters() if not weight.isfinite().all()]
    if broken:
        raise UserError(
            f"{checkpoint.path} holds NaN or infinite numbers in {len(broken)} of its weights, {broken[0]} first; take "
            "an earlier checkpoint"
        )


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise UserError(
            f"{output} is a folder; give the name of the new file, such as {output / 'converted.pt'}"
        )
    if output.exists():
        raise UserError(f"{output} exists already; give another --output, or remove it")
    if not output.parent.is_dir():
        raise UserError(f"the folder {output.parent} does not exist; make it, or give another --output")
    if output.suffix == ".safetensors":
        raise UserError(f"{output}: checkpoints are written by torch.save; give a name that ends in .pt")


def _notes(checkpoint: Checkpoint, clip: Any) -> list[str]:
    notes = ["optimizer state and epoch are not taken over: train on with --pretrained, not with --resume"]
    if _has_quick_gelu(clip):
        notes.append(
            f"{checkpoint.model} was trained with QuickGELU, and the models here have GELU: its features change by "
            "that too, until it is trained further"
        )
    flags = {key: value for key, value in checkpoint.settings.items() if key in PREPROCESSING}
    if flags:
        said = " ".join(f"--{key.replace('_', '-')} {_flag(value)}" for key, value in flags.items())
        notes.append(
            f"its images are prepared otherwise than by default, which no checkpoint says: give {said}"
        )
    return notes


def _flag(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _has_quick_gelu(clip: Any) -> bool:
    return any(isinstance(module, open_clip.transformer.QuickGELU) for module in clip.modules())


def _write(conversion: Conversion, target: Target, loaded: LoadedModel) -> None:
    """Writes config and weights, and loads them; takes both away again where that fails."""
    written = [conversion.output]
    try:
        if conversion.config is not None:
            if not _is_written(conversion.config, target):
                written.append(conversion.config)
                with _writing(conversion.config):
                    write_json(conversion.config, target.content)
            add_model_configs(conversion.config)
        content = {
            "name": target.name,
            "state_dict": loaded.clip.state_dict(),
            CONVERTED_FROM: {
                "checkpoint": str(conversion.source),
                "model": conversion.source_model,
                "attention": dict(conversion.source_kinds),
                "rescaled": conversion.rescaled,
            },
        }
        with _writing(conversion.output), atomic_path(conversion.output) as temporary:
            torch.save(content, temporary)
        _check_result(conversion, loaded)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises UserError where a file cannot be written, for want of space say."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be written ({reason}); give another --output") from error


def _is_written(path: Path, target: Target) -> bool:
    """Whether the model's config is there already; raises UserError where another is."""
    if path.exists() and read_config(path).content != target.content:
        raise UserError(f"{path} exists, and describes another model; give an --output in another folder")
    return path.exists()


def _check_result(conversion: Conversion, loaded: LoadedModel) -> None:
    """Raises UserError where the file does not give the converted model's features."""
    again = open_clip.create_model(conversion.model, pretrained=str(conversion.output)).eval()
    if _has_quick_gelu(loaded.clip):
        return
    images, texts = noise_images(loaded.clip, 2), loaded.tokenizer(list(CAPTIONS))
    with torch.no_grad():
        mine, other = (
            torch.cat((model.encode_image(images), model.encode_text(texts)))
            for model in (loaded.clip, again)
        )
    if not (other - mine).norm() <= 1e-4 * mine.norm():
        raise UserError(
            f"{conversion.source} was converted, but the result gives other features once it is loaded as "
            f"{conversion.model}; only in memory can it be converted, with convert_attention"
        )
