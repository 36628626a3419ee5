"""Use a trained model: predictions, metrics on new data, export to other formats, a page to drop images on."""
