"""The parts of a source: what stands between its `::`, and on the lines of its list files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.data.sources.pipe_forms import check_split_pipe
from openclip_linattn.errors import UserError

LIST_ENDINGS = (".txt", ".list")


@dataclass(frozen=True)
class Part:
    """A folder, pattern or command; `place` is the line of the list file that holds it ("urls.txt, line 3")."""

    text: str
    place: str | None = None

    def error(self, error: UserError) -> UserError:
        """`error` with the place in front."""
        return error if self.place is None else UserError(f"{self.place}: {error}")


def is_list(text: str) -> bool:
    """Whether a part of a source is a file that lists sources, going by its ending."""
    return scheme_of(text) == "local" and text.endswith(LIST_ENDINGS)


def split(source: str) -> list[Part]:
    """The parts of `source`, in order, with list files replaced by their lines.

    Raises UserError, with the file and the number of the line, where a list is not there, names nothing, or has a
    line that is a list itself or cuts a command in two.
    """
    components = source.split("::")
    check_split_pipe(components)
    parts: list[Part] = []
    for component in components:
        parts += _lines(local_path(component)) if is_list(component) else [Part(component)]
    return parts


def _lines(path: Path) -> list[Part]:
    parts = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        line_part = Part(text, f"{path}, line {number}")
        components = text.split("::")
        try:
            check_split_pipe(components)
        except UserError as error:
            raise line_part.error(error) from error
        for component in components:
            if is_list(component):
                raise line_part.error(
                    UserError(f"{component} is a list itself: write what it names into {path.name}.")
                )
            parts.append(Part(component, line_part.place))
    if not parts:
        raise UserError(f"The list {path} names no source: write a folder, pattern or command on each line.")
    return parts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"The list {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"The list {path} is not a text file: it names sources, one a line.") from error
