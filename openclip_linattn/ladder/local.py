"""Trains the runs of a ladder on this machine, side by side and resumable."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from rich.console import Console

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.attempt import Begin, followed
from openclip_linattn.ladder.board import Board, progress_bars
from openclip_linattn.ladder.children import Children, locked
from openclip_linattn.ladder.failures import Failure, said
from openclip_linattn.ladder.folders import check_settings, prepare
from openclip_linattn.ladder.machine import Machine, Slot
from openclip_linattn.ladder.runs import Outcome, Run
from openclip_linattn.termination import terminable

After = Callable[[Run, str], None]  # called with a trained run and the PyTorch device that it has left free


def train_ladder(
    runs: Sequence[Run],
    machine: Machine,
    *,
    after: After | None = None,
    retries: int = 0,
    console: Console | None = None,
) -> list[Outcome]:
    """Trains all runs and calls `after(run, device)` when one is done; returns how each ended.

    Finished runs are left alone, interrupted ones go on from their last checkpoint. A run that fails is taken up again
    `retries` times, unless it was refused or has diverged; an exception of `after` is a failure too. Shows bars on a
    terminal. Ended by an interrupt or SIGTERM, it ends its runs too. Raises UserError where a run's folder holds other
    settings or is in use.
    """
    console = console or Console(stderr=True)
    for run in runs:
        check_settings(run)
    with (
        locked({run.logs for run in runs}) as locks,
        terminable(),
        progress_bars(console) as progress,
        ThreadPoolExecutor(max_workers=machine.jobs) as pool,
    ):
        trainer = _Trainer(Board(progress, runs), Children(locks), SimpleQueue(), after, retries)
        for slot in machine.slots(max((run.processes for run in runs), default=1)):
            trainer.free.put(slot)
        try:
            futures = [pool.submit(trainer.train, run) for run in runs]
            return [future.result() for future in futures]
        except BaseException:
            trainer.children.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            for run in list(trainer.evaluating):
                trainer.board.say(run, "it is being evaluated, and the ladder ends when that is done")
            raise


def raise_failures(outcomes: Sequence[Outcome]) -> None:
    """Raises UserError, a line for each run that failed."""
    failed = [outcome.sentence for outcome in outcomes if outcome.failed]
    if failed:
        raise UserError("\n".join(failed))


@dataclass(frozen=True)
class _Trainer:
    board: Board
    children: Children
    free: "SimpleQueue[Slot]"
    after: After | None
    retries: int
    evaluating: set[Run] = field(default_factory=set)

    def train(self, run: Run) -> Outcome:
        """Trains one run to its end, and says so on the board."""
        slot = self.free.get()
        try:
            self.board.start(run)
            outcome = self._trained(run, slot)
            if not outcome.failed and self.after is not None:
                outcome = self._evaluated(outcome, slot, self.after)
            self.board.end(outcome)
            return outcome
        finally:
            self.free.put(slot)

    def _trained(self, run: Run, slot: Slot) -> Outcome:
        left = self.retries
        while True:
            status = prepare(run)
            if status == "already done":
                return Outcome(run, status)
            failure = self._attempt(run, slot, resume=status == "resumed")
            if failure is None:
                return Outcome(run, status)
            if not failure.again or not left or self.children.closed:
                return Outcome(run, "failed", failure.reason)
            left -= 1
            self.board.say(run, f"taken up again after a failure: {failure.reason}")

    def _evaluated(self, outcome: Outcome, slot: Slot, after: After) -> Outcome:
        if self.children.closed:
            return Outcome(outcome.run, "failed", "not evaluated: the ladder was interrupted")
        self.evaluating.add(outcome.run)
        try:
            after(outcome.run, slot.device)
        except Exception as error:  # whatever ends one evaluation, the other runs go on
            return Outcome(outcome.run, "failed", f"not evaluated: {said(error)}")
        finally:
            self.evaluating.discard(outcome.run)
        return outcome

    def _attempt(self, run: Run, slot: Slot, *, resume: bool) -> Failure | None:
        begin = Begin.of(run)
        command = run.command(resume=resume)
        child = self.children.start(command, run.console_log, {**run.environment, **slot.environment})
        try:
            return followed(run, child, begin, partial(self.board.update, run))
        finally:
            self.children.ended(child)
