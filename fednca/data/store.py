"""The image store: images decoded and resized once, kept as memory-mapped uint8 files, and reused by runs."""

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError, RunFailedError
from fednca.base.files import explain_write, write_atomic
from fednca.data.images import ImageError, read_resized, resize_array
from fednca.data.processes import cores, processes

if TYPE_CHECKING:
    from fednca.data.types import FileImages

FORMAT = 1  # raise it when decoding, resampling or the files change: older stores are then rebuilt
CHUNK = 16  # images per task: enough to outweigh the cost of sending it, few enough to stop soon
BLOCK = 1 << 24  # bytes per checksum: small enough that all cores can work on one shard
NOTE = "store.json"  # says what a store holds, and which images it leaves out
FEW = 256  # fewer images are decoded before worker processes would have started

LeftOut = tuple[int, str, str]
"""An image that cannot be read: its row in the input, its path, and the problem."""


@dataclass(frozen=True, eq=False)
class StoredImages:
    """Images of one size in memory-mapped files, which together are one array (N, size, size, 3).

    files: (n, size, size, 3) each, all but the last of the same length.
    """

    files: tuple[NDArray[np.uint8], ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (N, size, size, 3)."""
        count = sum(map(len, self.files))
        size = self.files[0].shape[1] if self.files else 0
        return count, size, size, 3

    def __len__(self) -> int:
        """Count the images."""
        return self.shape[0]

    def take(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Return the images of these rows, (n, size, size, 3), in their order."""
        if len(self.files) == 1:
            return self.files[0][rows]
        per_file = len(self.files[0]) if self.files else 1
        out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        shard, offset = np.divmod(rows, per_file)
        for number in np.unique(shard):
            here = shard == number
            out[here] = self.files[number][offset[here]]
        return out


@dataclass(frozen=True, eq=False)
class Stored:
    """An open store.

    rows: (N,), the rows of the input that it holds, sorted; left_out: the other rows; folder: where its files are.
    """

    images: StoredImages
    rows: NDArray[np.intp]
    left_out: tuple[LeftOut, ...]
    folder: Path


@dataclass(frozen=True)
class _Layout:
    """Where the rows of a store are: in raw files of `per_file` images each, the last of which may be shorter."""

    folder: Path
    size: int
    per_file: int

    @property
    def row_bytes(self) -> int:
        return self.size * self.size * 3

    def files(self, count: int) -> dict[Path, int]:
        """Return the files of `count` images, and how many each one holds."""
        starts = range(0, count, self.per_file)
        return {self._shard(i): min(self.per_file, count - start) for i, start in enumerate(starts)}

    def write(self, start: int, images: NDArray[np.uint8]) -> None:
        """Write images to the rows from `start` on."""
        # Not through a memory map: on a full disk that kills the process, while a failed write can be explained.
        while len(images):
            number, offset = divmod(start, self.per_file)
            here = images[: self.per_file - offset]
            with self._shard(number).open("r+b") as file:
                file.seek(offset * self.row_bytes)
                file.write(np.ascontiguousarray(here).data)
            start, images = start + len(here), images[len(here) :]

    def open(self, count: int) -> StoredImages:
        """Map the files read-only; raise ValueError if a file has the wrong size."""
        files = []
        for path, rows in self.files(count).items():
            if path.stat().st_size != rows * self.row_bytes:
                raise ValueError(f"'{path}' does not hold {rows} images")
            mapped = np.memmap(path, np.uint8, "r", shape=(rows, self.size, self.size, 3))
            files.append(mapped.view(np.ndarray))
        return StoredImages(tuple(files) or (np.empty((0, self.size, self.size, 3), np.uint8),))

    def _shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:03d}.u8"


def open_store(
    images: "NDArray[np.uint8] | FileImages",
    size: int,
    *,
    folder: Path,
    on_corrupt: Literal["fail", "skip"] = "fail",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    shard_bytes: int = 1 << 30,
) -> Stored:
    """Open the store of these images at this size, and build it first if `folder` does not have it.

    A store is found by what it was made from: the size, and the pixels or the files' paths, sizes and times. An image
    that cannot be read stops the build; with `on_corrupt` "skip" it is left out. `workers` is all cores by default.
    `progress` is called with (images done, images in total).
    """
    place = folder / _key(images, size, on_corrupt)
    stored = _reopen(place)
    if stored is None:
        with explain_write(place):
            shutil.rmtree(place, ignore_errors=True)  # what is there is damaged
            with _building_site(place) as site:
                layout = _Layout(site, size, max(1, shard_bytes // (3 * size * size)))
                _build(images, layout, on_corrupt, workers or (1 if len(images) < FEW else cores()), progress)
                _publish(site, place)
        stored = _reopen(place)
    if stored is None:
        raise RunFailedError(f"store '{place}' was deleted or damaged right after it was built; try again")
    return stored


def verify_store(folder: Path) -> None:
    """Check every shard of the store in `folder` (`Stored.folder`) by its checksum, and name the damaged ones."""
    if _reopen(folder) is None:
        raise FedncaError(f"store '{folder}' is missing or incomplete; open it again to rebuild it")
    expected = json.loads((folder / NOTE).read_text())["blake2b"]
    found = _checksums([folder / name for name in expected], cores())
    bad = [name for name in expected if found[name] != expected[name]]
    if bad:
        raise FedncaError(f"store '{folder}' is damaged in {', '.join(bad)}; delete the folder to have it rebuilt")


def _key(images: "NDArray[np.uint8] | FileImages", size: int, on_corrupt: str) -> str:
    """Return a digest of everything that decides a store's content."""
    digest = blake2b(f"format {FORMAT}, size {size}, {on_corrupt}".encode(), digest_size=16)
    if isinstance(images, np.ndarray):
        digest.update(f"pixels {images.shape}".encode())
        digest.update(np.ascontiguousarray(images).data)
    else:
        for path in images.paths:
            digest.update(os.fsencode(path.absolute()) + b"\0" + _stamp(path))
    return digest.hexdigest()


def _stamp(path: Path) -> bytes:
    try:
        status = path.stat()
    except OSError:
        return b"missing\n"
    return b"%d %d\n" % (status.st_size, status.st_mtime_ns)


def _reopen(place: Path) -> Stored | None:
    """Open a finished store; return None if there is none, or if its files do not fit its store.json."""
    try:
        note = json.loads((place / NOTE).read_text())
        if note["format"] != FORMAT:
            return None
        images = _Layout(place, note["size"], note["per_shard"]).open(note["count"])
        left_out = tuple((row, path, problem) for row, path, problem in note["left_out"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Stored(images, _rows_kept(len(images) + len(left_out), left_out), left_out, place)


def _rows_kept(count: int, left_out: Iterable[LeftOut]) -> NDArray[np.intp]:
    return np.delete(np.arange(count), [row for row, _, _ in left_out])


@contextmanager
def _building_site(place: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `place`, and delete it afterwards unless it has been renamed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    _clear_dead_sites(place.parent)
    site = place.with_name(f"{place.name}.{os.getpid()}.{uuid4().hex}.{platform.node()}.partial")
    site.mkdir()
    try:
        yield site
    finally:
        shutil.rmtree(site, ignore_errors=True)


def _clear_dead_sites(folder: Path) -> None:
    """Delete what killed builds of this machine left behind."""
    of_this_machine = re.compile(r"[0-9a-f]+\.(\d+)\.[0-9a-f]+\." + re.escape(platform.node()) + r"\.partial")
    for path in folder.glob("*.partial"):
        match = of_this_machine.fullmatch(path.name)
        if match and not _is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True


def _publish(site: Path, place: Path) -> None:
    """Give a finished store its name; if another process was faster, use its store, which is the same."""
    try:
        site.rename(place)
    except OSError:
        if _reopen(place) is None:
            raise


def _build(
    images: "NDArray[np.uint8] | FileImages",
    layout: _Layout,
    on_corrupt: str,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Fill the files, and write store.json last."""
    sources = images if isinstance(images, np.ndarray) else images.paths
    for path in layout.files(len(sources)):
        path.touch()
    starts = range(0, len(sources), CHUNK)
    chunks = [sources[start : start + CHUNK] for start in starts]
    left_out: list[LeftOut] = []
    if progress is not None:
        progress(0, len(sources))
    with processes(workers) as run:
        for start, chunk, bad in zip(starts, chunks, run(partial(_decode, layout), starts, chunks), strict=True):
            if bad and on_corrupt == "fail":
                _, path, problem = bad[0]  # chunks come back in order, so this is the first bad image
                raise ImageError(Path(path), problem)
            left_out += bad
            if progress is not None:
                progress(start + len(chunk), len(sources))
    if left_out:
        _close_gaps(layout, _rows_kept(len(sources), left_out), len(sources))
    count = len(sources) - len(left_out)
    note = {
        "format": FORMAT,
        "size": layout.size,
        "count": count,
        "per_shard": layout.per_file,
        "blake2b": _checksums(layout.files(count), workers),
        "left_out": left_out,
    }
    write_atomic(layout.folder / NOTE, json.dumps(note).encode())


def _decode(layout: _Layout, start: int, sources: NDArray[np.uint8] | tuple[Path, ...]) -> list[LeftOut]:
    """Decode, resize and write the rows from `start` on, in a worker; return the images that cannot be read."""
    if isinstance(sources, np.ndarray):
        layout.write(start, resize_array(sources, layout.size))
        return []
    bad = []
    images = np.zeros((len(sources), layout.size, layout.size, 3), np.uint8)
    for i, path in enumerate(sources):
        try:
            images[i] = read_resized(path, layout.size)
        except ImageError as error:
            bad.append((start + i, str(path), error.problem))
    layout.write(start, images)
    return bad


def _close_gaps(layout: _Layout, kept: NDArray[np.intp], count: int) -> None:
    """Move the rows `kept` of `count` together, and cut off the rest."""
    decoded = layout.open(count)
    for to in range(0, len(kept), CHUNK):
        # Rows only move towards the start, so none is overwritten before it has moved.
        layout.write(to, decoded.take(kept[to : to + CHUNK]))
    remaining = layout.files(len(kept))
    for path in layout.files(count):
        if path in remaining:
            os.truncate(path, remaining[path] * layout.row_bytes)
        else:
            path.unlink()


def _checksums(files: Iterable[Path], workers: int) -> dict[str, list[str]]:
    """Return the digests of the blocks of every shard, by the shard's name."""
    with ThreadPoolExecutor(workers) as threads:  # hashing and reading release the GIL
        digests = {
            path.name: threads.map(partial(_digest, path), range(0, path.stat().st_size, BLOCK)) for path in files
        }
        return {name: list(blocks) for name, blocks in digests.items()}


def _digest(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return blake2b(file.read(BLOCK), digest_size=16).hexdigest()
