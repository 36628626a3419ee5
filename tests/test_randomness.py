import torch

from fednca.base.randomness import derive_seed, numpy_rng, seeded, torch_rng


def test_a_derived_seed_is_pinned():
    # 8 bytes of hashlib's blake2b over "0:batches:3:1", shifted right by one: runs of old depend on it
    assert derive_seed(0, "batches", 3, 1) == 0x44AE136974394ED8


def test_every_part_of_the_address_matters():
    seeds = {
        derive_seed(*address) for address in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 0, 1), (0, "a", 1, 0)]
    }
    assert len(seeds) == 6


def test_generators_repeat():
    assert numpy_rng(0, "x").random() == numpy_rng(0, "x").random()
    assert torch.equal(torch.rand(3, generator=torch_rng(0, "x")), torch.rand(3, generator=torch_rng(0, "x")))


def test_a_seeded_block_leaves_the_global_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    with seeded(0, "init"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded(0, "init"):
        assert torch.equal(torch.rand(2), inside)
