"""Float32 kernels for CPUs: same names and semantics as `ref`, built from torch's fused operators."""
