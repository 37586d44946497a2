"""The progress display of a ladder."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from openclip_linattn.ladder.runs import Outcome, Run


def progress_bars(console: Console) -> Progress:
    """Bars in samples, shown where `console` is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} samples"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Board:
    """A bar for all runs together and one for each run under way, and a line when a run is done."""

    def __init__(self, progress: Progress, runs: Sequence[Run]) -> None:
        self._progress = progress
        self._done = dict.fromkeys(runs, 0)
        self._all = progress.add_task("all runs", total=sum(run.samples for run in runs))
        self._bars = {
            run: progress.add_task(run.name, total=run.samples, start=False, visible=False) for run in runs
        }

    def start(self, run: Run) -> None:
        """Shows the run's bar."""
        self._progress.update(self._bars[run], visible=True)
        self._progress.start_task(self._bars[run])

    def update(self, run: Run, samples: int) -> None:
        """Moves the run's bar to so many samples."""
        self._done[run] = samples
        self._progress.update(self._bars[run], completed=samples)
        self._progress.update(self._all, completed=sum(self._done.values()))

    def say(self, run: Run, text: str) -> None:
        """Prints a line about a run."""
        self._progress.console.print(f"{run.name}: {text}", markup=False, highlight=False, soft_wrap=True)

    def end(self, outcome: Outcome) -> None:
        """Takes the run's bar away and prints how it ended."""
        run = outcome.run
        if not outcome.failed:
            self.update(run, run.samples)
        self._progress.update(self._bars[run], visible=False)
        self.say(run, f"{outcome.status}: {outcome.message}" if outcome.failed else outcome.status)
