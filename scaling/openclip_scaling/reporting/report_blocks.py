"""The parts of a report: text as markdown, and pictures in two forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """One picture: `still` draws it for the file of that name, `interactive` gives it as data for plotly.js."""

    caption: str
    file: str
    still: Callable[[], Figure]
    interactive: Callable[[], dict[str, Any]]


Block = str | Picture
