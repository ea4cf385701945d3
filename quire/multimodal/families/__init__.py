"""The image and audio preprocessing of each model family, without torch."""
