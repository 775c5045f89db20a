"""Models that see images: their parts, images as features, positions of image tokens, and features in packed rows."""
