"""Decode steps as CUDA graphs: recording, the loop on the device, fused kernels, weights fetched ahead."""
