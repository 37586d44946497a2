"""What an evaluation set is, whether its images lie in tars or in class folders."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from openclip_linattn.zeroshot.sets.folders import ClassFolders
from openclip_linattn.zeroshot.sets.labels import LabelSet


@dataclass(frozen=True)
class EvaluationSet(ABC):
    """An evaluation set whose images were counted: `n` of them, each labelled by every label set.

    `name` is short (for tables), `source` the full path or pattern (unique).
    """

    name: str
    source: str
    n: int
    label_sets: tuple[LabelSet, ...]

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the images lie, in words."""

    @abstractmethod
    def stamp(self) -> object:
        """What changes when the images do, as JSON."""


@dataclass(frozen=True)
class ShardSet(EvaluationSet):
    """A webdataset: tars whose samples hold an image and their class."""

    shards: tuple[Path, ...]

    @property
    def place(self) -> str:
        """Where the images lie, in words."""
        return f"{len(self.shards)} shard(s)"

    def stamp(self) -> object:
        """What changes when the images do: name, size and time of every tar."""
        return [(shard.name, shard.stat().st_size, shard.stat().st_mtime_ns) for shard in self.shards]


@dataclass(frozen=True)
class FolderSet(EvaluationSet):
    """Image files in one folder per class; `columns` holds, per label set, the class index of each folder."""

    folders: ClassFolders
    columns: tuple[tuple[int, ...], ...]

    @property
    def place(self) -> str:
        """Where the images lie, in words."""
        return f"{len(self.folders.names)} class folder(s)"

    def stamp(self) -> object:
        """What changes when the images do: a digest over name, size and time of every image."""
        return self.folders.digest
