"""Sampling, the sets that a sampler keeps, and the most likely ids of a sharded vocabulary."""
