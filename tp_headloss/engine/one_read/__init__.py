"""One launch that reads each logit once: the way `ways.one_read` and the blocks of one sweep are
its door."""
