"""The training engine: one loop, composed from four axes (family, conditioning, objective, trainable part)."""
