"""The first pass of ragged attention by a library of CUDA kernels; torch's own needs none."""
