import torch

# One thread: the networks of the tests are too small to share, and a loaded machine would make them wait.
torch.set_num_threads(1)
