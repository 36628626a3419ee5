"""What all other packages use: errors, files, randomness, devices, named tensors, plug-ins."""
