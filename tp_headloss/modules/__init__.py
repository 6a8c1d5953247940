"""The vocabulary matrices of a model as modules."""
