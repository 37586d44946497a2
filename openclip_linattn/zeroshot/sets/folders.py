"""Lists the images of a folder that has one folder per class."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.wnids import WNID
from openclip_linattn.zeroshot.watching import Watch, unwatched

logger = logging.getLogger(__name__)

# torchvision's list for its ImageFolder, in any case.
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
SPLITS = ("val", "validation", "test")  # folders of held-out images
_FEW = 20  # so few folders may be splits (train, val, ...): they are looked into first
_FLAT_IMAGENET = re.compile(r"ILSVRC2012_(val|test)_\d+\.jpe?g", re.IGNORECASE)


@dataclass(frozen=True)
class ClassFolders:
    """The images below `root`, one folder per class, folders and images in the order of their names.

    `files` holds the images' paths from `root` as bytes (millions of them stay small, and worker processes
    share them), `folder_of` the number of each one's folder, `counts` the images in each folder. `digest`
    covers name, size and time of change of every image.
    """

    root: Path
    names: tuple[str, ...]
    files: NDArray[np.bytes_]
    folder_of: NDArray[np.int32]
    counts: tuple[int, ...]
    digest: str

    def path(self, index: int) -> str:
        """Return the path of image number `index` from `root`."""
        return os.fsdecode(bytes(self.files[index]))

    @property
    def empty(self) -> list[str]:
        """The folders without an image."""
        return [name for name, count in zip(self.names, self.counts, strict=True) if count == 0]


def list_class_folders(root: Path) -> list[str]:
    """Return the names of the folders in `root`, hidden ones left out, in order.

    Raises UserError, with what to do, where there are none and where a few folders hold no image at all.
    """
    entries = _entries(root)
    names = [entry.name for entry in entries if entry.is_dir()]
    beside = [entry.name for entry in entries if _is_image(entry)]
    if not names:
        raise UserError(_without_folders(root, beside))
    if len(names) <= _FEW and not any(_is_image(entry) for name in names for entry in _entries(root / name)):
        raise UserError(_without_images(root, names))
    if beside:
        logger.warning(
            "%s: %d image(s) beside the class folders are left out, first %s", root, len(beside), beside[0]
        )
    return names


def scan(root: Path, names: list[str], watch: Watch = unwatched) -> ClassFolders:
    """Return the images in the class folders `names` of `root`; symbolic links count as what they point to.

    Hidden files and files that are no images are left out and reported once. Raises UserError for a link to
    nothing, for a folder that cannot be read, and for a folder within a class folder.
    """
    listing = _Listing()
    counts = []
    with watch(f"listing {root.name}", len(names)) as advance:
        for number, name in enumerate(names):
            counts.append(listing.add(root, name, number))
            advance(1)
    if not listing.files:
        raise UserError(f"{root} holds no image: its {len(names)} folder(s) are empty")
    listing.report(root)
    files, folder_of = np.array(listing.files), np.array(listing.folder_of, dtype=np.int32)
    return ClassFolders(root, tuple(names), files, folder_of, tuple(counts), listing.digest.hexdigest())


@dataclass
class _Listing:
    files: list[bytes] = field(default_factory=list)
    folder_of: list[int] = field(default_factory=list)
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    hidden: int = 0
    others: list[str] = field(default_factory=list)

    def add(self, root: Path, name: str, number: int) -> int:
        """Take the images of folder `name` and return how many they are."""
        before = len(self.files)
        for entry in _entries(root / name, hidden=True):
            path = f"{name}/{entry.name}"
            if entry.name.startswith("."):
                self.hidden += 1
            elif _is_image(entry):
                self._take(entry, path, number)
            elif entry.is_dir():
                raise UserError(
                    f"{root / path} is a folder inside a class folder; images must lie directly in the class "
                    "folders: move them up, or name the folder whose folders hold images"
                )
            else:
                self.others.append(path)
        return len(self.files) - before

    def _take(self, entry: "os.DirEntry[str]", path: str, number: int) -> None:
        try:
            state = entry.stat()
        except OSError as error:
            raise UserError(
                f"{entry.path} cannot be read ({error.strerror}); mend the link or the file"
            ) from error
        self.files.append(os.fsencode(path))
        self.folder_of.append(number)
        self.digest.update(os.fsencode(path) + f"\0{state.st_size}\0{state.st_mtime_ns}\n".encode())

    def report(self, root: Path) -> None:
        """Say once how many files were left out."""
        if self.hidden:
            logger.warning("%s: %d hidden file(s) in class folders are left out", root, self.hidden)
        if self.others:
            logger.warning(
                "%s: %d file(s) that are no images are left out, first %s",
                root, len(self.others), self.others[0],
            )  # fmt: skip


def _is_image(entry: "os.DirEntry[str]") -> bool:
    return Path(entry.name).suffix.lower() in IMAGE_SUFFIXES and not entry.is_dir()


def _entries(folder: Path, *, hidden: bool = False) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if hidden or not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted(entries, key=lambda entry: entry.name)


def _without_folders(root: Path, images: list[str]) -> str:
    if images and WNID.fullmatch(root.name):
        return f"{root} is the folder of one class; name the folder above it, {root.parent}"
    flat = next((name for name in images if _FLAT_IMAGENET.fullmatch(name)), None)
    if flat is not None:
        return (
            f"{root} holds ILSVRC2012 images without class folders (first {flat}): sort them into one folder "
            "per wnid by the ground truth of the ILSVRC2012 development kit (OpenCLIP's and torchvision's "
            "ImageNet folders have that form)"
        )
    if images:
        return (
            f"{root} holds {len(images)} image(s) but no class folders (first {images[0]}): "
            "put the images of each class into a folder of its own"
        )
    return f"{root} holds no tar and no class folder; name the folder of the tars or of the class folders"


def _without_images(root: Path, names: list[str]) -> str:
    within = [name for name in names if _holds_class_folders(root / name)]
    if within:
        likely = next((name for name in within if name in SPLITS), within[0])
        return (
            f"{root} holds no class folders but {', '.join(names)}; name the one to evaluate, "
            f"such as {root / likely}"
        )
    return f"{root} holds no tar, and its {len(names)} folder(s) hold no image, first {names[0]!r}"


def _holds_class_folders(folder: Path) -> bool:
    below: Iterator[Path] = (folder / entry.name for entry in _entries(folder) if entry.is_dir())
    return any(any(_is_image(entry) for entry in _entries(each)) for each in below)
