"""Read an image file as 8-bit RGB: JPEG, PNG, TIFF and similar with Pillow, DICOM with pydicom."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fednca.base.errors import FedncaError
from fednca.base.packages import needed

# Pillow hands some other formats to external programs (EPS to Ghostscript); no dataset needs them.
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "GIF", "WEBP", "JPEG2000", "PPM")
DICOM_SUFFIXES = (".dcm", ".dicom")

FULL_SCALES = tuple(2**bits - 1 for bits in (8, 10, 12, 14, 16))
TINY = 1e-9  # the smallest range of values to divide by


class ImageError(FedncaError):
    """An image cannot be read; the error has its path and the problem."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)  # the bare arguments, so that the error can be pickled in a worker process
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        """Return the error as one sentence."""
        return f"image '{self.path}' {self.problem}; replace the file or leave it out"


def read_image(path: Path) -> NDArray[np.uint8]:
    """Decode an image as it is meant to be seen: (H, W, 3).

    EXIF rotation is applied and alpha is dropped. Grey images of more than 8 bits are scaled to 8. Their white is
    taken to be the smallest of 2^8-1, 2^10-1, 2^12-1, 2^14-1 and 2^16-1 that is at least their maximum, or 1 for
    floats up to 1. For DICOM, the rescaling, the display window and inverted grey (MONOCHROME1) are applied.
    """
    return np.array(_read(path))


def read_resized(path: Path, size: int) -> NDArray[np.uint8]:
    """Decode an image and squash it to a square, by antialiased bilinear resampling: (size, size, 3)."""
    return np.array(_read(path).resize((size, size), Image.Resampling.BILINEAR))


def resize_array(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Squash images like `read_resized`, unless they already have that size: (N, H, W, 3) → (N, size, size, 3)."""
    if images.shape[1:3] == (size, size):
        return images
    resized = np.empty((len(images), size, size, 3), np.uint8)
    for image, small in zip(images, resized, strict=True):
        small[:] = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
    return resized


def _read(path: Path) -> Image.Image:
    """Decode a file to mode RGB; raise ImageError if anything is wrong with it."""
    try:
        # Pillow and pydicom warn about odd metadata and large images; only the pixels matter here.
        with warnings.catch_warnings(action="ignore"), path.open("rb") as file:
            head = file.read(132)
            if not head:
                raise ImageError(path, "is empty (0 bytes)")
            file.seek(0)
            if path.suffix.lower() in DICOM_SUFFIXES or head[128:] == b"DICM":
                return _read_dicom(path, file)
            return _read_common(file)
    except (FedncaError, MemoryError):
        raise
    except Exception as error:  # a decoder may raise anything when it is fed garbage
        raise ImageError(path, _explain(error)) from error


def _explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    if isinstance(error, UnidentifiedImageError):
        return f"is not an image of a known format ({', '.join(FORMATS)}, DICOM)"
    if isinstance(error, Image.DecompressionBombError):
        return f"has more pixels than the limit of {2 * (Image.MAX_IMAGE_PIXELS or 0):,}"
    return f"is cut off, damaged or of an unusual kind ({' '.join(str(error).split())})"


def _read_common(file: BinaryIO) -> Image.Image:
    with Image.open(file, formats=FORMATS) as image:
        image.info.pop("transparency", None)  # drops alpha from palette and grey images too
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            return Image.fromarray(_scale_grey(np.asarray(image))).convert("RGB")
        return image.convert("RGB")


def _scale_grey(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale grey values of more than 8 bits to 8, since Pillow would clip them at 255: (H, W) → (H, W)."""
    scales = FULL_SCALES if np.issubdtype(values.dtype, np.integer) else (1, *FULL_SCALES)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= scales[-1]):  # NaN fails this test too
        raise ValueError(f"grey values run from {low} to {high}, but only 0 to {scales[-1]} can be read")
    full = next(scale for scale in scales if high <= scale)
    return _to_bytes(values.astype(np.float32) / full)


def _read_dicom(path: Path, file: BinaryIO) -> Image.Image:
    # A missing package is not an ImageError, which could leave out a whole folder of good files.
    decoder = needed("pydicom.pixels", "dicom", f"image '{path}', which is DICOM,")
    header = needed("pydicom", "dicom").dcmread(file)
    frames = int(header.get("NumberOfFrames") or 1)
    if frames > 1:
        raise ImageError(path, f"is DICOM with {frames} frames, but only single images can be read")
    kind = header.PhotometricInterpretation
    pixels = decoder.pixel_array(header)
    if kind not in ("MONOCHROME1", "MONOCHROME2"):
        if pixels.dtype != np.uint8 or pixels.ndim != 3:
            raise ImageError(path, f"is DICOM in {kind} of {pixels.dtype}; only grey and 8-bit RGB or YBR can be read")
        return Image.fromarray(pixels)
    values = decoder.apply_modality_lut(pixels, header)
    if header.get("VOILUTSequence"):
        depth = header.VOILUTSequence[0].LUTDescriptor[2]
        shown = decoder.apply_voi(np.rint(values).astype(np.int64), header) / (2**depth - 1)
    else:
        centre, width = _first(header.get("WindowCenter")), _first(header.get("WindowWidth"))
        shown = _window(values, centre, width, header.get("VOILUTFunction") or "LINEAR")
    return Image.fromarray(_to_bytes(1 - shown if kind == "MONOCHROME1" else shown)).convert("RGB")


def _first(numbers: Sequence[float] | float | None) -> float | None:
    return None if numbers is None else float(np.ravel(numbers)[0])


def _window(values: NDArray[Any], centre: float | None, width: float | None, function: str) -> NDArray[Any]:
    """Map values to 0..1 by the display window (DICOM PS3.3 C.11.2.1), or by their own range if there is none."""
    if centre is None or width is None:
        return (values - float(values.min())) / max(float(np.ptp(values)), TINY)
    if function == "SIGMOID":
        return 1 / (1 + np.exp(-4 * (values - centre) / max(width, TINY)))
    if function == "LINEAR":
        centre, width = centre - 0.5, width - 1
    return np.clip((values - centre) / max(width, TINY) + 0.5, 0, 1)


def _to_bytes(shown: NDArray[Any]) -> NDArray[np.uint8]:
    """Map 0..1 to 0..255."""
    rounded: NDArray[Any] = np.rint(255 * shown)
    return rounded.astype(np.uint8)
