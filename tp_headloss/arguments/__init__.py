"""Objects that callers write: options, teachers, sets of ids, rules of sampling, sequences."""
