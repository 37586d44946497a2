"""The machine on which runs train side by side, and what each of them has of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from openclip_linattn.errors import UserError


@dataclass(frozen=True)
class Slot:
    """What one of the runs that train side by side has for itself: some cards, by number, or one's share of the CPU."""

    cards: tuple[int, ...] = ()

    @property
    def device(self) -> str:
        """PyTorch's name for it in this process."""
        return f"cuda:{self.cards[0]}" if self.cards else "cpu"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a training process is told: the cards that it sees, none where it has a share of the CPU."""
        given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = [given[card] if given else str(card) for card in self.cards]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


@dataclass(frozen=True)
class Machine:
    """How many runs train side by side, and the cards that are dealt to them (0: they train on the CPU)."""

    jobs: int
    gpus: int = 0

    def slots(self, processes: int) -> list[Slot]:
        """What each of the runs side by side has, a card for each of its processes."""
        each = processes if self.gpus else 0
        return [Slot(tuple(range(job * each, (job + 1) * each))) for job in range(self.jobs)]

    def check_cards(self) -> None:
        """Raises UserError where PyTorch sees fewer cards."""
        if not self.gpus:
            return
        import torch

        found = torch.cuda.device_count()
        if found < self.gpus:
            raise UserError(
                f"executor.local.gpus is {self.gpus}, and PyTorch sees {found} cards here; train on a machine that has "
                "them, or change the plan (`openclip-linattn doctor` shows the devices)"
            )
