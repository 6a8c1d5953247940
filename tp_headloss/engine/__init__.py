"""The carriers: what streams logits, merges packets and writes gradients, and knows families by
their contract only."""
