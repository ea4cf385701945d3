"""The encoders of models that see."""
