"""The report as one HTML file that needs no network: plotly.js, data, tables and style are all inside.

The page forbids itself every connection by its content security policy, so what would need one cannot work unseen.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from openclip_scaling.reading.runs import write_atomically
from openclip_scaling.reporting.report_blocks import Block, Picture

_NEEDED = {"plotly": "plotly", "markdown_it": "markdown-it-py"}  # module: package
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def missing() -> str | None:
    """Why there can be no HTML report, and what to do; None where there can."""
    absent = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if not absent:
        return None
    return (
        f"report.html is not written, because {' and '.join(absent)} is not installed; "
        "pip install 'openclip-linattn[report]' brings it."
    )


def write_html(path: Path, blocks: Sequence[Block]) -> None:
    """Write text and interactive pictures into one file. Only where nothing is missing()."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # an extra, and slow to import

    numbered = list(enumerate(blocks))
    page = _PAGE.substitute(
        policy=_POLICY,
        title=_title(blocks),
        style=_STYLE,
        library=get_plotlyjs(),
        contents=_contents(numbered),
        body="\n".join(_rendered(number, block) for number, block in numbered),
    )
    write_atomically(path, page)


def _title(blocks: Iterable[Block]) -> str:
    first = next((block for block in blocks if isinstance(block, str)), "")
    return html.escape(first.partition("\n")[0].lstrip("# "))


def _contents(numbered: Iterable[tuple[int, Block]]) -> str:
    """A link to every chapter."""
    links = [
        f'<a href="#part{number}">{html.escape(title)}</a>'
        for number, block in numbered
        if isinstance(block, str)
        for title in _HEADING.findall(block)
    ]
    return "\n".join(links)


def _rendered(number: int, block: Block) -> str:
    if isinstance(block, Picture):
        return (
            f'<figure><div class="plot">{_plot(f"picture{number}", block)}</div>'
            f"<figcaption>{html.escape(block.caption)}</figcaption></figure>"
        )
    from markdown_it import MarkdownIt

    text = MarkdownIt("commonmark", {"html": False}).enable("table").render(block)
    wide = text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    return f'<section id="part{number}">{wide}</section>'


def _plot(name: str, picture: Picture) -> str:
    from plotly.io import to_html  # type: ignore[import-untyped]

    config: dict[str, Any] = {
        "displaylogo": False,  # it links to a web site
        "responsive": True,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
        "toImageButtonOptions": {"format": "svg", "filename": Path(picture.file).stem},
    }
    return str(
        to_html(picture.interactive(), config=config, include_plotlyjs=False, full_html=False, div_id=name)
    )


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 0 1rem 3rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
figure { margin: 1.5rem 0; }
figcaption { font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border-bottom: 1px solid #8886; padding: .25rem .6rem; text-align: left; vertical-align: top; }
@media (max-width: 50rem) { table { width: max-content; } td { max-width: 18rem; } }
@media (prefers-color-scheme: dark) { .plot { filter: invert(1) hue-rotate(180deg); } }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
<script>$library</script>
</head>
<body>
<nav>$contents</nav>
<noscript><p>The pictures here need JavaScript; report.md shows them without.</p></noscript>
$body
</body>
</html>
""")
