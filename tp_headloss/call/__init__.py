"""From the arguments of a public call to a `Request`."""
