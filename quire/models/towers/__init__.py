"""The media encoders of multimodal models."""
