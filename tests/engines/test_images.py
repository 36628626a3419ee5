import numpy as np
import pytest
import torch
from torchvision.transforms.functional import normalize, to_tensor

from fednca.base.randomness import torch_rng
from fednca.engines.images import HALF, IMAGENET, ImageStore, Shard, batch_bounds


@pytest.mark.parametrize("samples", range(1, 40))
def test_batches_cover_every_sample_once_and_never_end_with_one(samples):
    bounds = batch_bounds(samples, 8)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(samples))
    assert samples == 1 or bounds[-1][1] - bounds[-1][0] > 1
    assert all(stop - start == 8 for start, stop in bounds[:-1])


@pytest.mark.parametrize("moments", [IMAGENET, HALF])
def test_images_are_normalised_as_torchvision_does(moments):
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    store = ImageStore.build(images, moments, torch.device("cpu"), torch.float64)
    expected = normalize(to_tensor(images[2]).double(), *map(list, moments))
    torch.testing.assert_close(store.gather(torch.tensor([2]))[0], expected, rtol=0, atol=1e-6)


def test_images_keep_their_labels_in_random_order():
    images = np.arange(10, dtype=np.uint8).repeat(12).reshape(10, 2, 2, 3)
    labels = np.eye(10, dtype=np.int8)
    store = ImageStore.build(images, ((0.0,) * 3, (1.0,) * 3), torch.device("cpu"), torch.float32)
    shard = Shard.build(store, np.array([7, 1, 4]), labels[[7, 1, 4]])
    seen = []
    for batch, target in shard.batches(2, torch_rng(0, "order")):
        seen += [round(255 * float(image[0, 0, 0])) for image in batch]
        assert [round(255 * float(image[0, 0, 0])) for image in batch] == target.argmax(1).tolist()
    assert sorted(seen) == [1, 4, 7]
