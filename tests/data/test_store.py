import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednca.base.errors import FedncaError, RunFailedError
from fednca.data import store
from fednca.data.images import ImageError, read_resized
from fednca.data.processes import cores
from fednca.data.store import FEW, StoredImages, open_store, verify_store
from fednca.data.types import FileImages

SIZE = 8
ROW = SIZE * SIZE * 3


def decoded(files: FileImages) -> np.ndarray:
    return np.stack([read_resized(path, SIZE) for path in files.paths])


def everything(images: StoredImages) -> np.ndarray:
    return np.concatenate(images.files)


def swap_content(path: Path, content: bytes) -> None:
    """Change a file such that its size and time do not show it."""
    status = path.stat()
    path.write_bytes(content.ljust(status.st_size, b"\0")[: status.st_size])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def break_files(files: FileImages, rows: list[int]) -> None:
    for row in rows:
        files.paths[row].write_bytes(b"")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("per_shard", [1, 7, 40, 1000])
def test_files_are_stored_as_they_are_read(files, cache, workers, per_shard):
    stored = open_store(files, SIZE, folder=cache, workers=workers, shard_bytes=per_shard * ROW + ROW // 2)
    assert stored.images.shape == (40, SIZE, SIZE, 3)
    assert [len(shard) for shard in stored.images.files[:-1]] == [per_shard] * (len(stored.images.files) - 1)
    np.testing.assert_array_equal(everything(stored.images), decoded(files))
    np.testing.assert_array_equal(stored.rows, np.arange(40))
    assert stored.left_out == ()
    verify_store(stored.folder)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", [1, 2])
def test_arrays_are_stored_as_pillow_resizes_them(cache, workers, step):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 9, 13, 3), dtype=np.uint8)[::step]
    stored = open_store(pixels, SIZE, folder=cache, workers=workers, shard_bytes=12 * ROW)
    expected = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for image in pixels]
    np.testing.assert_array_equal(everything(stored.images), np.stack(expected))


@pytest.mark.parametrize("per_shard", [1, 7, 39, 40])
def test_take_gathers_rows_in_any_order_and_number(files, cache, per_shard):
    images = open_store(files, SIZE, folder=cache, shard_bytes=per_shard * ROW).images
    whole, rng = decoded(files), np.random.default_rng(1)
    for count in (0, 1, 5, 200):
        rows = rng.integers(0, 40, count)
        batch = images.take(rows)
        assert batch.flags.writeable
        np.testing.assert_array_equal(batch, whole[rows])


def test_shards_cannot_be_written_to(files, cache):
    with pytest.raises(ValueError, match="read-only"):
        open_store(files, SIZE, folder=cache).images.files[0][0] = 0


def test_no_images_make_an_empty_store(cache):
    for _ in range(2):
        images = open_store(FileImages(()), SIZE, folder=cache).images
        assert images.shape == (0, SIZE, SIZE, 3)
        assert images.take(np.empty(0, np.intp)).shape == (0, SIZE, SIZE, 3)


def test_a_store_is_built_once(files, cache, monkeypatch):
    whole = everything(open_store(files, SIZE, folder=cache).images)
    for path in files.paths:
        swap_content(path, b"no image any more")
    np.testing.assert_array_equal(everything(open_store(files, SIZE, folder=cache).images), whole)
    monkeypatch.chdir(files.paths[0].parent)
    relative = FileImages(tuple(Path(path.name) for path in files.paths))
    np.testing.assert_array_equal(everything(open_store(relative, SIZE, folder=cache).images), whole)
    assert len(list(cache.iterdir())) == 1


def rewritten(files: FileImages) -> FileImages:
    Image.new("RGB", (3, 3), "red").save(files.paths[5])
    return files


def touched(files: FileImages) -> FileImages:
    os.utime(files.paths[5], ns=(0, 0))
    return files


def reordered(files: FileImages) -> FileImages:
    return FileImages(files.paths[::-1])


@pytest.mark.parametrize("change", [rewritten, touched, reordered])
def test_other_files_are_another_store(files, cache, change):
    before = open_store(files, SIZE, folder=cache)
    changed = change(files)
    after = open_store(changed, SIZE, folder=cache)
    assert after.folder != before.folder
    np.testing.assert_array_equal(everything(after.images), decoded(changed))


def test_another_size_another_policy_and_other_pixels_are_another_store(files, cache):
    pixels = decoded(files)
    stores = [open_store(files, SIZE, folder=cache), open_store(files, 4, folder=cache)]
    stores += [open_store(files, SIZE, folder=cache, on_corrupt="skip"), open_store(pixels, SIZE, folder=cache)]
    pixels[3, 2, 1, 0] ^= 1
    stores += [open_store(pixels, SIZE, folder=cache)]
    assert len({stored.folder for stored in stores}) == 5


def cut_a_shard(folder: Path) -> None:
    os.truncate(folder / "shard-001.u8", ROW - 1)


def lengthen_a_shard(folder: Path) -> None:
    with (folder / "shard-001.u8").open("ab") as file:
        file.write(b"x")


def remove_a_shard(folder: Path) -> None:
    (folder / "shard-001.u8").unlink()


def cut_the_note(folder: Path) -> None:
    os.truncate(folder / "store.json", 20)


def age_the_note(folder: Path) -> None:
    note = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(note | {"format": 0}))


def strip_the_note(folder: Path) -> None:
    (folder / "store.json").write_text('{"format": 1}')


@pytest.mark.parametrize(
    "damage", [cut_a_shard, lengthen_a_shard, remove_a_shard, cut_the_note, age_the_note, strip_the_note]
)
def test_a_damaged_store_is_built_again(files, cache, damage):
    folder = open_store(files, SIZE, folder=cache, shard_bytes=15 * ROW).folder
    damage(folder)
    with pytest.raises(FedncaError, match=f"^store '{folder}' is missing or incomplete; open it again to rebuild it$"):
        verify_store(folder)
    np.testing.assert_array_equal(everything(open_store(files, SIZE, folder=cache).images), decoded(files))
    assert len(list(cache.iterdir())) == 1


def test_verify_names_the_shard_that_changed(files, cache):
    stored = open_store(files, SIZE, folder=cache, shard_bytes=15 * ROW)
    path = stored.folder / "shard-001.u8"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedncaError, match=rf"^store '{stored.folder}' is damaged in shard-001\.u8; delete the folder"):
        verify_store(stored.folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_image_that_cannot_be_read_fails_the_build(files, cache, workers):
    break_files(files, [38, 21, 30])
    path = files.paths[21]
    with pytest.raises(ImageError, match=rf"^image '{path}' is empty \(0 bytes\); replace the file"):
        open_store(files, SIZE, folder=cache, workers=workers)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("bad", [[0], [39], [0, 1, 2, 17, 18, 39], list(range(3, 40)), list(range(40))])
@pytest.mark.parametrize("per_shard", [1, 7, 40])
def test_images_that_cannot_be_read_are_left_out_by_choice(files, cache, bad, per_shard):
    whole = decoded(files)
    break_files(files, bad)
    kept = [row for row in range(40) if row not in bad]
    for _ in range(2):  # built, then opened again
        stored = open_store(files, SIZE, folder=cache, on_corrupt="skip", shard_bytes=per_shard * ROW)
        np.testing.assert_array_equal(stored.rows, kept)
        np.testing.assert_array_equal(everything(stored.images), whole[kept])
        assert stored.left_out == tuple((row, str(files.paths[row]), "is empty (0 bytes)") for row in bad)
    verify_store(stored.folder)
    assert sum(path.stat().st_size for path in stored.folder.glob("*.u8")) == len(kept) * ROW


def test_a_missing_file_is_left_out_until_it_appears(files, cache):
    content = files.paths[7].read_bytes()
    files.paths[7].unlink()
    assert open_store(files, SIZE, folder=cache, on_corrupt="skip").left_out == (
        (7, str(files.paths[7]), "cannot be read (No such file or directory)"),
    )
    files.paths[7].write_bytes(content)
    assert open_store(files, SIZE, folder=cache, on_corrupt="skip").left_out == ()


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_counts_up_to_all_images(files, cache, workers):
    heard = []
    open_store(files, SIZE, folder=cache, workers=workers, progress=lambda *counts: heard.append(counts))
    assert heard == sorted(set(heard))
    assert len(heard) > 2
    assert (heard[0], heard[-1]) == ((0, 40), (40, 40))


@pytest.mark.parametrize(("count", "processes"), [(FEW - 1, 0), (FEW, cores() - 1)])
def test_many_images_go_to_other_cores_too_and_few_do_not(cache, count, processes):
    heard = []
    images = np.zeros((count, 4, 4, 3), np.uint8)
    open_store(images, 4, folder=cache, progress=lambda *_: heard.append(len(multiprocessing.active_children())))
    assert max(heard) == processes


def test_a_killed_worker_is_one_sentence(files, cache):
    def kill_when_born() -> None:  # long before it has done its first task: it has yet to import what it needs
        while not (born := multiprocessing.active_children()):
            time.sleep(0.001)
        born[0].kill()

    killer = threading.Thread(target=kill_when_born, daemon=True)
    killer.start()
    with pytest.raises(RunFailedError, match=r"^a worker was killed, perhaps because memory ran out; free some"):
        open_store(FileImages(files.paths * 20), SIZE, folder=cache, workers=2)
    killer.join()
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(files, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFailedError, match=r"^cannot write '.*file/cache/.*': Not a directory; "):
        open_store(files, SIZE, folder=tmp_path / "file" / "cache")


def test_arrays_of_another_shape_are_another_store(cache):
    pixels = np.arange(2 * 4 * 9 * 3, dtype=np.uint8)
    one, other = (open_store(pixels.reshape(2, *side, 3), 4, folder=cache) for side in ((4, 9), (6, 6)))
    assert one.folder != other.folder


@pytest.mark.parametrize("place", [0, 150, -1])
def test_a_change_in_any_block_is_found(cache, monkeypatch, place):
    monkeypatch.setattr(store, "BLOCK", 100)
    stored = open_store(np.random.default_rng(0).integers(0, 256, (9, 4, 4, 3), dtype=np.uint8), 4, folder=cache)
    verify_store(stored.folder)
    path = stored.folder / "shard-000.u8"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedncaError, match="is damaged in shard-000"):
        verify_store(stored.folder)


def test_store_json_has_the_keys_by_which_stores_of_older_versions_are_found(files, cache):
    note = json.loads((open_store(files, SIZE, folder=cache).folder / "store.json").read_text())
    assert set(note) == {"format", "size", "per_shard", "count", "left_out", "blake2b"}
