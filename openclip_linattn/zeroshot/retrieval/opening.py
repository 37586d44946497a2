"""Opens sets for image-text retrieval: clip_benchmark's tars, COCO's and Karpathy's JSON, Flickr's text files."""

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.retrieval.caption_files import CAPTION_SUFFIXES, read_caption_file
from openclip_linattn.zeroshot.retrieval.images import ImagePlace
from openclip_linattn.zeroshot.retrieval.shards import read_shard
from openclip_linattn.zeroshot.sets.shards import check_shard_count, find_shards

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetrievalSet:
    """A set for retrieval: N images, `captions[i]` (one or more) those of `images[i]`.

    `name` is for tables, `source` the full path of the captions file or of the tars' folder.
    """

    name: str
    source: str
    images: tuple[ImagePlace, ...]
    captions: tuple[tuple[str, ...], ...]

    @property
    def texts(self) -> int:
        """The number of captions."""
        return sum(map(len, self.captions))

    @property
    def steps(self) -> int:
        """The images and the distinct captions: what a model has to encode."""
        return len(self.images) + len({text for each in self.captions for text in each})

    def stamp(self) -> str:
        """What changes when the captions do, or name, size or time of an image's file: a digest."""
        files = {place.path: place.path.stat() for place in self.images}
        states = [(str(path), state.st_size, state.st_mtime_ns) for path, state in files.items()]
        keys = [place.key for place in self.images]
        return hashlib.sha256(json.dumps([states, keys, self.captions]).encode()).hexdigest()[:16]


def open_retrieval_set(
    source: str | Path, *, images: Path | None = None, split: str = "test"
) -> RetrievalSet:
    """Open `source`: a captions file (see `read_caption_file`), or tars as in `find_shards`.

    `images` is the folder of a captions file's images; by default it is looked for beside and below the
    file, as the archives of COCO and Flickr unpack. `split` chooses within Karpathy's files and, where
    `source` is a folder, its folder of that name. Blank captions are left out, with a notice. Raises
    UserError where the layout is another, where an image has no caption or is absent, because retrieval
    among fewer images is an easier task, and where nothing is left.
    """
    path = Path(source)
    if path.is_file() and path.suffix.lower() in CAPTION_SUFFIXES:
        return _from_caption_file(path.resolve(), images, split)
    if images is not None:
        raise UserError(f"a folder of images goes with a captions file, and {source} is none")
    return _from_shards(path / split if (path / split).is_dir() else path, str(source))


def _from_shards(path: Path, source: str) -> RetrievalSet:
    if path.is_dir() and not any(path.glob("*.tar")) and not any(path.glob("test/*.tar")):
        raise UserError(f"{path} holds no tar{_caption_files(path)}")
    where, shards = find_shards(str(path) if path.is_dir() else source)
    folder = shards[0].parent
    _refuse_other_tasks((folder, folder.parent))
    if where.is_dir():
        check_shard_count(shards)
    pairs = [pair for shard in shards for pair in read_shard(shard)]
    name = where.parent.name if where.name == "test" else where.name
    return _checked(name, str(where), pairs)


def _caption_files(folder: Path) -> str:
    files = sorted(each for each in folder.iterdir() if each.suffix.lower() in CAPTION_SUFFIXES)
    if not files:
        return " and no captions file; name a folder of tars with jpg and txt members, or a captions file"
    return f"; for a captions file name the file itself, such as {files[0]}"


def _refuse_other_tasks(folders: Iterable[Path]) -> None:
    for folder in folders:
        path = folder / "dataset_type.txt"
        if path.is_file() and (kind := path.read_text(encoding="utf-8").strip().lower()) != "retrieval":
            raise UserError(f"{path} says {kind!r}: this is no retrieval set")


def _from_caption_file(path: Path, images: Path | None, split: str) -> RetrievalSet:
    captions = read_caption_file(path, split)
    if not captions:
        raise UserError(f"{path} has no image")
    files = _find_images(path, list(captions), images)
    places = [
        ImagePlace(file, name, file.suffix.lower().removeprefix("."))
        for file, name in zip(files, captions, strict=True)
    ]
    return _checked(path.stem, str(path), list(zip(places, captions.values(), strict=True)))


def _find_images(path: Path, names: list[str], images: Path | None) -> list[Path]:
    """Return the files of `names`; Karpathy's put a folder before the name, which may be that of `images`."""
    folders = [images] if images else list(_image_folders(path))
    for folder in folders:
        for files in ([folder / name for name in names], [folder / Path(name).name for name in names]):
            if files[0].is_file():
                return _all_present(files, path)
    looked = f"{images} holds no {names[0]}" if images else f"{names[0]} lies neither beside nor below {path}"
    raise UserError(f"{looked}; name the folder of the images that {path.name} captions")


def _image_folders(path: Path) -> Iterable[Path]:
    home = path.parent.parent if path.parent.name == "annotations" else path.parent
    for folder in (home, home / "images"):
        if folder.is_dir():
            yield folder
            yield from sorted(each for each in folder.iterdir() if each.is_dir())


def _all_present(files: list[Path], path: Path) -> list[Path]:
    folders = {file.parent for file in files}
    present = {file for folder in folders if folder.is_dir() for file in folder.iterdir()}
    missing = [file for file in files if file not in present]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(files)} images of {path} do not exist, first {missing[0]}; fetch them, "
            "for retrieval among fewer images is an easier task"
        )
    return files


def _checked(name: str, source: str, pairs: list[tuple[ImagePlace, list[str]]]) -> RetrievalSet:
    if not pairs:
        raise UserError(f"{source} has no image")
    captions = [tuple(text for text in texts if text.strip()) for _, texts in pairs]
    bare = [place.key for (place, _), texts in zip(pairs, captions, strict=True) if not texts]
    if bare:
        raise UserError(
            f"{len(bare)} of the {len(pairs)} images of {source} have no caption, first {bare[0]!r}; "
            "caption or remove them"
        )
    blank = sum(len(texts) for _, texts in pairs) - sum(map(len, captions))
    if blank:
        logger.warning("%d captions of %s are blank and are left out", blank, source)
    return RetrievalSet(name, source, tuple(place for place, _ in pairs), tuple(captions))
