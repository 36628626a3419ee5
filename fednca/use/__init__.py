"""Using a trained model: predictions, metrics on new data, other formats, a page to drop images on."""
