"""Prompt templates by name, or from a file."""

from pathlib import Path

from open_clip import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.labels import read_templates

NAMED = {
    "openai80": tuple(template("{c}") for template in OPENAI_IMAGENET_TEMPLATES),
    "simple7": tuple(template("{c}") for template in SIMPLE_IMAGENET_TEMPLATES),
    "one": ("a photo of a {c}.",),
}


def find_templates(source: str | Path) -> tuple[str, ...]:
    """Return the templates that `source` names: openai80, simple7, one, or a file with one per line.

    Raises UserError for what is neither, and for a wrong template, by its line.
    """
    if str(source) in NAMED:
        return NAMED[str(source)]
    if not Path(source).is_file():
        raise UserError(f"templates {str(source)!r} are neither a file nor one of {', '.join(NAMED)}")
    return tuple(read_templates(Path(source)))
