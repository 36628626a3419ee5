"""What every room stands on: errors, files, randomness, named tensors, packages."""
