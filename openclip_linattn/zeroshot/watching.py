"""How long work tells its progress to whoever shows it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
Watch = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def unwatched(_title: str, _total: int) -> Iterator[Advance]:
    """The `Watch` that shows nothing; any other takes a title and the number of steps, and hears of each."""
    yield lambda _: None
