"""Use a trained model: predictions, metrics on new data, export to other formats, a page to drop images on."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.use.bootstrap import Resampling, Scored, intervals
    from fednca.use.card import model_card
    from fednca.use.evaluate import Labelled, read_labelled
    from fednca.use.model import TrainedModel
    from fednca.use.predict import Prediction
    from fednca.use.reading import find_images
else:
    __getattr__, __dir__ = lazy(__name__, "model", "predict", "reading", "evaluate", "bootstrap", "card")

__all__ = [
    "Labelled", "Prediction", "Resampling", "Scored", "TrainedModel", "find_images", "intervals", "model_card",
    "read_labelled",
]  # fmt: skip
