import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from fednca.data.images import ImageError, read_image, read_resized, resize_array
from fednca.errors import FedncaError

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (5, 7), dtype=np.uint8)

# What a viewer does with each EXIF orientation, by the standard's definition of row 0 and column 0.
ORIENTATIONS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


def thrice(grey: np.ndarray) -> np.ndarray:
    return np.stack([grey] * 3, axis=-1)


def saved(path: Path, array: np.ndarray, mode: str | None = None, **options) -> Path:
    """Save raw bytes under any mode that Pillow cannot guess from the array."""
    image = Image.fromarray(array) if mode is None else Image.frombytes(mode, array.shape[1::-1], array.tobytes())
    image.save(path, **options)
    return path


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "webp", "ppm"])
def test_lossless_colour_comes_back_as_it_was(tmp_path, suffix):
    path = saved(tmp_path / f"a.{suffix}", RGB, **{"lossless": True} if suffix == "webp" else {})
    image = read_image(path)
    assert image.flags.writeable
    np.testing.assert_array_equal(image, RGB)


def test_grey_becomes_three_equal_channels(tmp_path):
    np.testing.assert_array_equal(read_image(saved(tmp_path / "a.png", GREY)), thrice(GREY))


def test_one_bit_becomes_black_and_white(tmp_path):
    bits = GREY > 100
    Image.fromarray(bits).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), thrice(np.where(bits, 255, 0)))


@pytest.mark.parametrize("transparency", [{}, {"transparency": 3}, {"transparency": bytes(range(0, 160, 10))}])
def test_palettes_are_looked_up_and_their_transparency_dropped(tmp_path, transparency):
    colours, index = RNG.integers(0, 256, (16, 3), dtype=np.uint8), GREY % 16
    image = Image.frombytes("P", (7, 5), index.tobytes())
    image.putpalette(colours.tobytes())
    image.save(tmp_path / "a.png", **transparency)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), colours[index])


def test_alpha_is_dropped_not_blended(tmp_path):
    alpha = np.linspace(0, 255, 35).astype(np.uint8).reshape(5, 7, 1)
    colour = saved(tmp_path / "rgba.png", np.concatenate([RGB, alpha], axis=2))
    grey = saved(tmp_path / "la.png", np.stack([GREY, alpha[..., 0]], axis=2), "LA")
    np.testing.assert_array_equal(read_image(colour), RGB)
    np.testing.assert_array_equal(read_image(grey), thrice(GREY))


def test_cmyk_is_ink_taken_from_white(tmp_path):
    ink = RNG.integers(0, 256, (5, 7, 4), dtype=np.uint8)
    expected = (255.0 - ink[..., :3]) * (255.0 - ink[..., 3:]) / 255
    image = read_image(saved(tmp_path / "a.tif", ink, "CMYK"))
    np.testing.assert_allclose(image, expected, atol=1)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("deep", [False, True])
def test_exif_orientation_is_applied(tmp_path, orientation, deep):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = RGB[..., 0].astype(np.uint16) * 257 if deep else RGB
    if deep:
        pixels[0, 0] = 65535
    path = saved(tmp_path / "a.png", pixels, exif=exif)
    upright = thrice(np.rint(pixels / 257).astype(np.uint8)) if deep else RGB
    np.testing.assert_array_equal(read_image(path), ORIENTATIONS[orientation](upright))


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(
    ("highest", "full"),
    [(0, 255), (200, 255), (256, 1023), (1023, 1023), (1024, 4095), (4095, 4095), (4096, 16383), (16384, 65535)],
)
def test_deep_grey_is_scaled_by_the_smallest_depth_that_holds_it(tmp_path, suffix, highest, full):
    values = np.linspace(0, highest, 35).round().astype(np.uint16).reshape(5, 7)
    image = read_image(saved(tmp_path / f"a.{suffix}", values))
    np.testing.assert_array_equal(image, thrice(np.rint(values * (255 / full)).astype(np.uint8)))


@pytest.mark.parametrize(
    ("values", "full"),
    [
        (np.array([[0, 4095]], np.int32), 4095),
        (np.array([[0.0, 0.25, 1.0]], np.float32), 1),
        (np.array([[0.0, 1000.0, 4000.0]], np.float32), 4095),
    ],
)
def test_integers_of_32_bits_and_floats_are_scaled_alike(tmp_path, values, full):
    image = read_image(saved(tmp_path / "a.tif", values))
    np.testing.assert_array_equal(image, thrice(np.rint(values * (255 / full)).astype(np.uint8)))


@pytest.mark.parametrize("values", [[-1.0, 3.0], [0.0, np.nan], [0.0, 65536.0]])
def test_grey_values_that_have_no_scale_are_refused(tmp_path, values):
    path = saved(tmp_path / "a.tif", np.array([values], np.float32))
    with pytest.raises(ImageError, match=r"a\.tif' is .* unusual kind \(grey values run from .*\); replace the file"):
        read_image(path)


def write_dicom(path: Path, pixels: np.ndarray, kind: str = "MONOCHROME2", bits: int = 12, **elements) -> Path:
    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = header.SOPClassUID = SecondaryCaptureImageStorage
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID = generate_uid()
    header.Rows, header.Columns = pixels.shape[:2]
    header.SamplesPerPixel = 3 if kind == "RGB" else 1
    if kind == "RGB":
        header.PlanarConfiguration = 0
    header.BitsAllocated, header.BitsStored, header.HighBit = 8 * pixels.itemsize, bits, bits - 1
    header.PixelRepresentation = int(pixels.dtype.kind == "i")
    header.PhotometricInterpretation = kind
    for name, value in elements.items():
        setattr(header, name, value)
    header.PixelData = pixels.tobytes()
    header.save_as(path, enforce_file_format=True)
    return path


RAW = RNG.integers(0, 4096, (6, 8), dtype=np.uint16)


def linear_by_the_standard(x: float, centre: float, width: float) -> float:
    """DICOM PS3.3 C.11.2.1.2.1, for an output from 0 to 255."""
    if x <= centre - 0.5 - (width - 1) / 2:
        return 0
    if x > centre - 0.5 + (width - 1) / 2:
        return 255
    return ((x - (centre - 0.5)) / (width - 1) + 0.5) * 255


def exact_by_the_standard(x: float, centre: float, width: float) -> float:
    """DICOM PS3.3 C.11.2.1.3.2."""
    if x <= centre - width / 2:
        return 0
    return 255 if x > centre + width / 2 else ((x - centre) / width + 0.5) * 255


def sigmoid_by_the_standard(x: float, centre: float, width: float) -> float:
    """DICOM PS3.3 C.11.2.1.3.1."""
    return 255 / (1 + np.exp(-4 * (x - centre) / width))


@pytest.mark.parametrize(
    ("function", "formula"),
    [
        (None, linear_by_the_standard),
        ("LINEAR", linear_by_the_standard),
        ("LINEAR_EXACT", exact_by_the_standard),
        ("SIGMOID", sigmoid_by_the_standard),
    ],
)
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_dicom_goes_through_rescale_and_its_first_window(tmp_path, function, formula, kind):
    elements = {} if function is None else {"VOILUTFunction": function}
    elements |= {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": [2000, 9], "WindowWidth": [3000, 5]}
    path = write_dicom(tmp_path / "a.dcm", RAW, kind, **elements)
    shown = np.vectorize(formula, otypes=[float])(RAW * 2.0 - 1024, 2000, 3000)
    np.testing.assert_allclose(
        read_image(path), thrice(255 - shown if kind == "MONOCHROME1" else shown), atol=0.5 + 1e-6
    )


@pytest.mark.parametrize("window", [{}, {"WindowCenter": "", "WindowWidth": ""}])
@pytest.mark.parametrize("pixels", [RAW, RAW.astype(np.int16) - 2000])
def test_dicom_without_a_window_is_shown_from_lowest_to_highest(tmp_path, window, pixels):
    path = write_dicom(tmp_path / "a.dcm", pixels, bits=16, **window)
    x = pixels.astype(float)
    np.testing.assert_allclose(read_image(path), thrice((x - x.min()) / np.ptp(x) * 255), atol=0.5 + 1e-6)


def test_dicom_lookup_tables_come_before_windows(tmp_path):
    table = Dataset()
    table.LUTDescriptor = [4096, 0, 12]
    table.LUTData = np.arange(4095, -1, -1, dtype=np.uint16).tobytes()
    path = write_dicom(tmp_path / "a.dcm", RAW, VOILUTSequence=[table], WindowCenter=5, WindowWidth=2)
    np.testing.assert_allclose(read_image(path), thrice((4095 - RAW.astype(float)) / 4095 * 255), atol=0.5 + 1e-6)


def test_dicom_in_colour_and_under_any_name(tmp_path):
    write_dicom(tmp_path / "a", RGB, "RGB", bits=8)
    np.testing.assert_array_equal(read_image(tmp_path / "a"), RGB)


def test_a_flat_dicom_is_black(tmp_path):
    assert not read_image(write_dicom(tmp_path / "a.dcm", np.full_like(RAW, 700))).any()


@pytest.mark.parametrize(
    ("kind", "elements", "problem"),
    [
        ("MONOCHROME2", {"NumberOfFrames": 3, "Rows": 2}, "is DICOM with 3 frames, but only single images can be read"),
        ("PALETTE COLOR", {}, "is DICOM in PALETTE COLOR of uint16; only grey and 8-bit RGB or YBR can be read"),
        ("MONOCHROME2", {"Rows": 99}, r"is cut off, damaged or of an unusual kind \(.*\)"),
    ],
)
def test_dicom_that_is_not_one_plain_image_is_refused(tmp_path, kind, elements, problem):
    path = write_dicom(tmp_path / "a.dcm", RAW, kind, **elements)
    with pytest.raises(ImageError, match=rf"^image '{path}' {problem}; replace the file or leave it out$"):
        read_image(path)


def test_dicom_without_pydicom_says_what_to_install(tmp_path, monkeypatch):
    path = write_dicom(tmp_path / "a.dcm", RAW)
    for name in [name for name in sys.modules if name.split(".")[0] == "pydicom"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        FedncaError, match=rf"^image '{path}', which is DICOM, .* pip install 'fednca\[dicom\]'$"
    ) as caught:
        read_image(path)
    assert not isinstance(caught.value, ImageError), "or whoever leaves broken images out would leave out all DICOM"


def noisy_jpeg(path: Path) -> Path:
    return saved(path, RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("cut.jpg", lambda sound: sound[: len(sound) // 2], r"is cut off, .* of an unusual kind \(.*truncated.*\)"),
        ("cut.dcm", lambda sound: sound[:200], r"is cut off, damaged or of an unusual kind \(.*\)"),
        ("empty.jpg", lambda sound: b"", r"is empty \(0 bytes\)"),
        ("text.jpg", lambda sound: b"this is a text" * 20, r"is not an image of a known format \(JPEG, .*, DICOM\)"),
        ("head.png", lambda sound: b"\x89PNG\r\n\x1a\n", r"is .*"),
        ("script.eps", lambda sound: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image of .*"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content(noisy_jpeg(tmp_path / "sound.jpg").read_bytes()))
    with pytest.raises(ImageError, match=rf"^image '{path}' {problem}; replace the file or leave it out$") as caught:
        read_image(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [("missing.png", "No such file or directory"), (".", "Is a directory")])
def test_what_cannot_be_read_says_why(tmp_path, name, reason):
    with pytest.raises(ImageError, match=rf"cannot be read \({reason}\)"):
        read_resized(tmp_path / name, 8)


def test_images_beyond_pillows_limit_are_refused_and_those_it_only_warns_of_are_read(tmp_path, monkeypatch):
    path = saved(tmp_path / "a.png", RGB)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 34)
    np.testing.assert_array_equal(read_image(path), RGB)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 17)
    with pytest.raises(ImageError, match=r"a\.png' has more pixels than the limit of 34"):
        read_image(path)


@pytest.mark.parametrize("name", ["Röntgen Ärzte/肺.png", "emoji 🩻/a b.png"])
def test_paths_may_be_of_any_script(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir()
    np.testing.assert_array_equal(read_image(saved(path, RGB)), RGB)


def test_a_single_pixel_fills_its_square(tmp_path):
    path = saved(tmp_path / "a.png", np.array([[[7, 8, 9]]], np.uint8))
    np.testing.assert_array_equal(read_resized(path, 4), np.full((4, 4, 3), (7, 8, 9)))


@pytest.mark.parametrize("shape", [(48, 32), (9, 7), (16, 16)])
def test_resizing_squashes_bilinearly_with_antialiasing(tmp_path, shape):
    """torch's antialiased bilinear filter as reference; Pillow rounds its weights: one grey level of slack."""
    images = RNG.integers(0, 256, (3, *shape, 3), dtype=np.uint8)
    planes = torch.from_numpy(images).permute(0, 3, 1, 2).double()
    small = torch.nn.functional.interpolate(planes, (16, 16), mode="bilinear", antialias=True)
    expected = small.permute(0, 2, 3, 1).numpy()
    resized = resize_array(images, 16)
    assert resized.dtype == np.uint8
    np.testing.assert_allclose(resized, expected, atol=1)
    np.testing.assert_array_equal(read_resized(saved(tmp_path / "a.png", images[0]), 16), resized[0])


def test_arrays_of_the_size_asked_for_are_left_alone():
    images = np.zeros((2, 16, 16, 3), np.uint8)
    assert resize_array(images, 16) is images


def test_an_image_error_survives_the_way_between_processes():
    error = ImageError(Path("a.png"), "is odd")
    assert str(copy.copy(error)) == str(error), "pickle takes it apart and puts it together in the same way"
    assert str(error) == "image 'a.png' is odd; replace the file or leave it out"


def test_reading_images_needs_neither_torch_nor_pydicom():
    """Worker processes import nothing else, so they start fast."""
    code = "import sys, fednca.data.store; print({'torch', 'pydicom', 'sklearn', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.data
def test_chest_x_rays_with_alpha_are_their_first_channel(data_folder):
    paths = sorted((data_folder / "nih-layout").rglob("*.png"))
    modes = set()
    for path in paths:
        with Image.open(path) as image:
            modes.add(image.mode)
            first = np.asarray(image.getchannel(0))
        np.testing.assert_array_equal(read_image(path), thrice(first))
    assert modes == {"L", "RGBA"}
