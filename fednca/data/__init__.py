"""From the files of a dataset to a federation: read them, split them, and deal the images to clients."""
