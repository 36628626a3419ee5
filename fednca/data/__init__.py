"""From the files of a dataset to a federation: read them, split them, and deal the images to clients."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.data.distances import cooccurrence_distance, label_distance, missing_classes
    from fednca.data.facts import partition_report
    from fednca.data.federation import Federation, Share, build_federation
    from fednca.data.fetch import Archive, Progress, obtain
    from fednca.data.images import ImageError, read_image
    from fednca.data.load import federate, load_dataset
    from fednca.data.partition import Partition, dirichlet_presence, natural_sites
    from fednca.data.sources import get_source, source_names
    from fednca.data.store import StoredImages, open_store
    from fednca.data.types import Dataset, FileImages, Source, Split
else:
    __getattr__, __dir__ = lazy(
        __name__, "types", "load", "federation", "partition", "sources", "fetch", "images", "store", "distances",
        "facts",
    )  # fmt: skip

__all__ = [
    "Archive", "Dataset", "Federation", "FileImages", "ImageError", "Partition", "Progress", "Share", "Source", "Split",
    "StoredImages", "build_federation", "cooccurrence_distance", "dirichlet_presence", "federate", "get_source",
    "label_distance", "load_dataset", "missing_classes", "natural_sites", "obtain", "open_store", "partition_report",
    "read_image", "source_names",
]  # fmt: skip
