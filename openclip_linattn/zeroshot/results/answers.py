"""What checkpoints answered for every image, as it is compared: from this call, or as it was kept."""

from openclip_linattn.zeroshot.results.paired import Answers
from openclip_linattn.zeroshot.results.prediction_files import load_answers
from openclip_linattn.zeroshot.results.predictions import Predictions
from openclip_linattn.zeroshot.results.rows import Row, RowKey, row_key


class AnswerBook:
    """The answers behind the rows of an evaluation.

    Those that were found in it are in memory, for checkpoints outside a run keep no predictions.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, RowKey], Answers] = {}

    def add(self, row: Row, predictions: Predictions) -> None:
        """Note what the checkpoint of `row` chose."""
        self._found[_key(row)] = Answers(str(row["checkpoint"]), predictions.right, predictions.digest)

    def knows(self, row: Row) -> bool:
        """Whether the answers of `row` are there."""
        return _key(row) in self._found or "predictions" in row

    def of(self, row: Row, name: str) -> Answers:
        """Return the answers of `row`, its checkpoint called `name`; raises UserError where they are not kept."""
        found = self._found.get(_key(row))
        return load_answers(row, name) if found is None else Answers(name, found.right, found.asked)


def _key(row: Row) -> tuple[str, RowKey]:
    return str(row["checkpoint"]), row_key(row)
