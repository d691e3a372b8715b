"""CPU versions in float32: the same names and meanings as `ref`, built from torch's fused operators."""
