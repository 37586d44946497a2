"""The picture of `openclip-linattn eval --picture`."""

from collections.abc import Sequence
from pathlib import Path

from openclip_linattn.cli.evaluate.titles import Row, short_names
from openclip_linattn.errors import UserError


def check_picture(path: Path | None) -> None:
    """Raise UserError where no picture could be written to `path`, before the evaluation spends its hours."""
    if path is None:
        return
    from openclip_linattn.zeroshot.results.rows import check_writable
    from openclip_scaling.pictures.plot import FORMATS  # matplotlib is slow to import

    if path.suffix.lstrip(".").lower() not in FORMATS:
        raise UserError(f"--picture {path} must end in one of {', '.join('.' + name for name in FORMATS)}")
    check_writable(path)


def draw_curves(rows: Sequence[Row], path: Path | None) -> None:
    """Draw the rows' accuracies against samples seen and image size to `path`, if there is one.

    Raises UserError where there is no curve.
    """
    if path is None:
        return
    from openclip_linattn.zeroshot.results.accuracy_picture import accuracy_picture
    from openclip_linattn.zeroshot.results.looks import run_path
    from openclip_scaling.pictures.plot import save_figure

    save_figure(accuracy_picture(rows, short_names(str(run_path(row)) for row in rows)), path)
